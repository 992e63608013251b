"""A model that `module:function` names, built on `meta`, and the field's commands that use it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from estimators import command
from estimators.field import ModelSize, size_of
from estimators.models import ModelError, ModelShape, ParameterShape, model_of_config
from zero.units import ELEMENTS, find_blocks, owners_of


def build_on_meta(source: str) -> nn.Module:
    """Return the model that `module:function` builds; it takes no memory for parameters.

    Raises:
        ModelError: if the function does not return a module.
        ImportError: if there is no such module.
        AttributeError: if the module has no such function.
    """
    name, _, function = source.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; an installed command starts without it
    make = getattr(importlib.import_module(name), function)
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        raise ModelError(f"{source}() failed on meta: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{source} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def shape_of(model: nn.Module, name: str) -> ModelShape:
    """Return the parameters of a built model, with the repeated blocks that units are formed of.

    What two blocks share, or a block and the rest, belongs to the root. A model of transformers has
    a configuration; if it describes exactly these parameters, what it computes is known as well.
    """
    blocks = find_blocks(model)
    names = ["", *(name for name, _ in blocks)]
    owners = owners_of(model, blocks)
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    parameters = []
    for path, parameter in model.named_parameters():
        found = owners[id(parameter)]
        block = names[next(iter(found))] if len(found) == 1 else ""
        shape = tuple(parameter.shape)
        is_table = id(parameter) in tables
        element, trains = ELEMENTS.get(parameter.dtype), parameter.requires_grad
        use_muon = getattr(parameter, "use_muon", None)
        parameters.append(ParameterShape(path, shape, block, is_table, element, trains, use_muon))
    return _computed(model, ModelShape(name, type(model).__name__, tuple(parameters)))


def _computed(model: nn.Module, shape: ModelShape) -> ModelShape:
    """Return a shape with what its model computes, if that is known of a model of these sizes."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    values = to_dict() if callable(to_dict) else None
    if not isinstance(values, dict):
        return shape
    try:
        known = model_of_config(values, shape.name)
    except ModelError:
        return shape
    sizes = [
        [(each.name, each.shape, each.block) for each in one.parameters] for one in (known, shape)
    ]
    if sizes[0] != sizes[1]:
        return shape
    return replace(known, parameters=shape.parameters)


def _measure(source: str) -> ModelSize:
    return size_of(build_on_meta(source))


def main_zero2(arguments: Sequence[str] | None = None) -> int:
    """Run the command `estimate_zero2_model_states_mem_needs`."""
    return command.main(2, arguments, _measure)


def main_zero3(arguments: Sequence[str] | None = None) -> int:
    """Run the command `estimate_zero3_model_states_mem_needs`."""
    return command.main(3, arguments, _measure)
