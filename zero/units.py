"""Form units: parameters that are unsharded and resharded together, from a model's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from estimators import ElementType, SegmentSpec
from zero.errors import ConfigError

ROOT_NAME = "<root>"

_ELEMENTS = {
    torch.float32: ElementType.FP32,
    torch.bfloat16: ElementType.BF16,
    torch.float16: ElementType.FP16,
}


@dataclass(frozen=True, slots=True)
class ManagedParameter:
    """A parameter that tierzero shards."""

    name: str
    parameter: nn.Parameter
    order: int
    """Position in `named_parameters()`."""
    element: ElementType
    param_group: int
    """Index of its parameter group, or -1 if no optimizer updates it."""
    is_trainable_at_start: bool = True
    """Whether it required a gradient when the engine was made."""


@dataclass(frozen=True, slots=True)
class UnitBlueprint:
    """One unit before it is built: its module and its segments of parameters."""

    name: str
    module: nn.Module
    segments: tuple[tuple[SegmentSpec, tuple[ManagedParameter, ...]], ...]


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks: children of one container that share a class and hold parameters.

    The outermost repetition counts; blocks within a block belong to it.
    """
    blocks: list[tuple[str, nn.Module]] = []
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        prefix, module = pending.pop(0)
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        children = [
            (f"{prefix}{name}", child)
            for name, child in module.named_children()
            if next(child.parameters(), None) is not None
        ]
        classes = [type(child) for _, child in children]
        for name, child in children:
            if is_container and classes.count(type(child)) > 1:
                blocks.append((name, child))
            else:
                pending.append((f"{name}.", child))
    return blocks


def form_units(
    model: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    element: ElementType | None,
    gradient_element: ElementType | None = None,
) -> list[UnitBlueprint]:
    """Return the units of a model, the root unit first; a shared parameter belongs to the root.

    Args:
        model: the model, on the CPU or on `meta`.
        groups: parameters of each optimizer parameter group.
        element: type to train in, or None to keep each parameter's own.
        gradient_element: type to accumulate gradients in, or None for each parameter's own.

    Raises:
        ConfigError: if a parameter has a type that cannot be trained, or shares memory.
    """
    _check_shared_memory(model)
    blocks = find_blocks(model)
    owner_of_module = {
        id(module): index
        for index, (_, block) in enumerate(blocks, start=1)
        for module in block.modules()
    }
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(owner_of_module.get(id(module), 0))
    group_of = {id(each): index for index, group in enumerate(groups) for each in group}
    members: list[list[ManagedParameter]] = [[] for _ in range(len(blocks) + 1)]
    for order, (name, parameter) in enumerate(model.named_parameters()):
        if not parameter.is_floating_point():
            continue  # quantised weights stay as they are, resident
        if parameter.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"parameter {name} is on {parameter.device}; this version trains on the CPU: move"
                " the model there, or build it on meta"
            )
        units = owners[id(parameter)]
        members[units.copy().pop() if len(units) == 1 else 0].append(
            ManagedParameter(
                name,
                parameter,
                order,
                element or _element_of(name, parameter),
                group_of.get(id(parameter), -1) if parameter.requires_grad else -1,
                parameter.requires_grad,
            )
        )
    named = [(ROOT_NAME, model), *blocks]
    return [
        UnitBlueprint(name, module, tuple(_segments(index, name, members[index], gradient_element)))
        for index, (name, module) in enumerate(named)
        if members[index] or index == 0
    ]


def _segments(
    unit_index: int,
    unit: str,
    members: Iterable[ManagedParameter],
    gradient_element: ElementType | None,
) -> list[tuple[SegmentSpec, tuple[ManagedParameter, ...]]]:
    """Split a unit's parameters by type, trainability and parameter group, in stable order."""
    keyed: dict[tuple[ElementType, int], list[ManagedParameter]] = {}
    for member in members:
        keyed.setdefault((member.element, member.param_group), []).append(member)
    return [
        (
            SegmentSpec(
                unit=unit,
                unit_index=unit_index,
                names=tuple(member.name for member in chosen),
                numels=tuple(member.parameter.numel() for member in chosen),
                element=element,
                trainable=group >= 0,
                param_group=max(group, 0),
                gradient_element=gradient_element,
            ),
            tuple(chosen),
        )
        for (element, group), chosen in keyed.items()
    ]


def _element_of(name: str, parameter: nn.Parameter) -> ElementType:
    element = _ELEMENTS.get(parameter.dtype)
    if element is None:
        raise ConfigError(
            f"parameter {name} is {parameter.dtype}; this version trains float32, bfloat16 and"
            ' float16: convert the model, or set "bf16": {"enabled": true}'
        )
    return element


def _check_shared_memory(model: nn.Module) -> None:
    """Refuse two parameters on the same memory: sharding would untie them without a word."""
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel() or type(parameter) is not nn.Parameter:
            continue
        storage = parameter.untyped_storage().data_ptr()
        if storage in seen:
            raise ConfigError(
                f"parameters {seen[storage]} and {name} share memory but are two objects; tie them"
                f" by assigning the same Parameter, or give {name} memory of its own (clone)"
            )
        seen[storage] = name
