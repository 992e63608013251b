"""Give a parameter another shape, wherever it is and whatever holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from offload import Field
from zero.nursery import NurserySource
from zero.parameter import REFERENCE_ATTRIBUTE, ParameterReference, reference_of
from zero.replan import Resize
from zero.source import StoreSource

_SIZES = {
    nn.Embedding: ("num_embeddings", "embedding_dim"),
    nn.Linear: ("out_features", "in_features"),
}


def resize_parameter(
    model: nn.Module,
    parameter: nn.Parameter,
    shape: Sequence[int],
    init: Callable[[torch.Tensor], object] | None = None,
) -> None:
    """Give a parameter of a model or engine another shape; a collective, between steps.

    Values and optimizer state stay where both shapes have elements; new state is zero. The object
    stays, so ties, parameter groups and aliases hold, and embeddings and linear layers learn their
    new sizes.

    Args:
        model: the model or engine.
        parameter: one of its parameters.
        shape: the new shape, of as many dimensions.
        init: fills a new tensor of that shape, before the old values are put in; zeros without it.

    Raises:
        ValueError: if the parameter is not in the model, the shape has other dimensions, or an
            optimizer of whole tensors keeps what cannot be cut; nothing has changed.
        PlanError: if the engine's budgets cannot hold the new shape; nothing has changed.
    """
    if all(parameter is not each for each in model.parameters()):
        raise ValueError("the parameter to resize is not in the model that was given")
    new = torch.Size(shape)
    if len(new) != parameter.dim() or any(length < 0 for length in new):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} cannot get shape {tuple(new)}; give"
            f" {parameter.dim()} lengths"
        )
    apply_resize(Resize(parameter, new, init))
    _tell_modules(model, parameter)


def apply_resize(resize: Resize) -> None:
    """Give a parameter another shape; the modules that hold it are not told."""
    parameter = resize.parameter
    reference = reference_of(parameter)
    source = reference.source if reference is not None else None
    if isinstance(source, StoreSource):
        on_resize = source.runtime.scheduler.on_resize
        if on_resize is None:
            raise RuntimeError(f"the engine of parameter {source.name} is gone")
        on_resize(resize)
    elif isinstance(source, NurserySource):
        _resize_in_nursery(source, resize)
    else:
        with torch.no_grad():
            parameter.data = resize.of(parameter.detach(), is_value=True)
        parameter.grad = None


def _resize_in_nursery(source: NurserySource, resize: Resize) -> None:
    source.communicator.join(f"resizing parameter {source.name} to {tuple(resize.shape)}")
    values = resize.of(source.read(Field.PARAMETER), is_value=True)
    source.communicator.broadcast(values, 0)
    parameter = resize.parameter
    new = NurserySource(
        source.nursery, source.name, parameter, values.reshape(-1), torch.Size(values.shape)
    )
    setattr(parameter, REFERENCE_ATTRIBUTE, ParameterReference(new))
    parameter.__class__ = nn.Parameter
    new.hide()


def _tell_modules(model: nn.Module, parameter: nn.Parameter) -> None:
    for module in model.modules():
        for kind, names in _SIZES.items():
            if isinstance(module, kind) and module._parameters.get("weight") is parameter:
                for name, length in zip(names, parameter.shape, strict=True):
                    setattr(module, name, length)
