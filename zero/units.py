"""Form units: parameters that are unsharded and resharded together, from a model's blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from estimators import NOTHING_STAYS, ElementType, Persistence, SegmentSpec, StateFormat
from zero.errors import ConfigError
from zero.nursery import NurserySource
from zero.parameter import ShardedParameter, reference_of
from zero.source import StoreSource

ROOT_NAME = "<root>"

ELEMENTS = {
    torch.float32: ElementType.FP32,
    torch.bfloat16: ElementType.BF16,
    torch.float16: ElementType.FP16,
}


Router: TypeAlias = tuple[str, nn.Module]
"""Name and module of what routes to experts: its forward calls them."""


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
    state_format: StateFormat | None = None
    """How its state is stored where that is not as for the rest of the model."""
    is_persistent: bool = False
    """Whether each rank keeps all of it on the device, see [Note: persistent parameters]."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """What decides the segments of a unit beside the parameters themselves."""

    element: ElementType | None = None
    """Type to train in, or None to keep each parameter's own."""
    gradient_element: ElementType | None = None
    """Type to accumulate gradients in, or None for each parameter's own."""
    persistence: Persistence = NOTHING_STAYS
    """Which small parameters stay on the device."""


@dataclass(frozen=True, slots=True)
class UnitBlueprint:
    """One unit before it is built: its module and its segments of parameters."""

    name: str
    module: nn.Module
    segments: tuple[tuple[SegmentSpec, tuple[ManagedParameter, ...]], ...]
    router: Router | None = None
    """What routes to it, if it is an expert."""


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks: children of one container that share a class and hold parameters.

    The outermost repetition counts; blocks within a block belong to it, but for its experts, which
    are the children of a container whose name says so: these are blocks of their own, after it.
    """
    return _repeated("", model, is_inside=False)


def router_of(model: nn.Module, block: str) -> Router | None:
    """Return the module whose forward calls a block, if that is an expert."""
    path, _, _ = block.rpartition(".")
    if not _holds_experts(path):
        return None
    while path:
        path, _, _ = path.rpartition(".")
        module = model.get_submodule(path)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):  # these have no forward
            break
    return path or ROOT_NAME, model.get_submodule(path)


def _holds_experts(path: str) -> bool:
    return "expert" in path.rpartition(".")[2].lower()


def _repeated(path: str, root: nn.Module, *, is_inside: bool) -> list[tuple[str, nn.Module]]:
    """Return the blocks below a module; inside of a block only experts are."""
    blocks: list[tuple[str, nn.Module]] = []
    pending = [(f"{path}." if path else "", root)]
    while pending:
        prefix, module = pending.pop(0)
        counts = not is_inside or _holds_experts(prefix.rstrip("."))
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        children = [
            (f"{prefix}{name}", child)
            for name, child in module.named_children()
            if next(child.parameters(), None) is not None
        ]
        classes = [type(child) for _, child in children]
        for name, child in children:
            if is_container and counts and classes.count(type(child)) > 1:
                blocks.append((name, child))
                if not is_inside:
                    blocks += _repeated(name, child, is_inside=True)
            else:
                pending.append((f"{name}.", child))
    return blocks


def form_units(
    model: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    grouping: Grouping,
    numels: Mapping[int, int] | None = None,
    replaced: object = None,
    format_of: Callable[[str, nn.Parameter], StateFormat | None] = lambda *_: None,
) -> list[UnitBlueprint]:
    """Return the units of a model, the root unit first, to which shared parameters belong.

    Args:
        model: the model, on the CPU or on `meta`.
        groups: parameters of each optimizer parameter group.
        grouping: types to train in, and which parameters stay on the device.
        numels: elements of parameters that are about to be resized, by their id.
        replaced: the runtime that holds the parameters now and is about to be replaced, or None.
        format_of: tells from a parameter's name and the parameter how its state is stored, None
            being as in the rest of the model.

    Raises:
        ConfigError: if a parameter has a type that cannot be trained, or shares memory.
    """
    _check_shared_memory(model)
    blocks = find_blocks(model)
    owners = owners_of(model, blocks)
    group_of = {id(each): index for index, group in enumerate(groups) for each in group}
    managed = [
        ManagedParameter(
            name,
            parameter,
            order,
            grouping.element or _element_of(name, parameter),
            group_of.get(id(parameter), -1) if parameter.requires_grad else -1,
            parameter.requires_grad,
            format_of(name, parameter),
        )
        for order, (name, parameter) in enumerate(model.named_parameters())
        if _is_managed(name, parameter, replaced)
    ]
    sizes = [(numels or {}).get(id(each.parameter), each.parameter.numel()) for each in managed]
    members: list[list[ManagedParameter]] = [[] for _ in range(len(blocks) + 1)]
    for each, stays in zip(managed, grouping.persistence.choose(sizes), strict=True):
        units = owners[id(each.parameter)]
        chosen = 0 if stays or len(units) > 1 else next(iter(units))
        members[chosen].append(replace(each, is_persistent=stays))
    named = zip([(ROOT_NAME, model), *blocks], members, strict=True)
    kept = [
        (name, module, own)
        for (name, module), own in named
        if own or module is model or any(at.startswith(f"{name}.") for at, _ in blocks)
    ]
    return [
        UnitBlueprint(
            name,
            module,
            tuple(_segments(index, name, own, (grouping.gradient_element, numels or {}))),
            router_of(model, name),
        )
        for index, (name, module, own) in enumerate(kept)
    ]


def owners_of(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> dict[int, set[int]]:
    """Return the units (0 is the root) whose modules hold each parameter, by its id.

    What belongs to a block within a block does not belong to the outer one.
    """
    units_of_module: dict[int, set[int]] = {}
    for index, (name, block) in enumerate(blocks, start=1):
        inner = {id(module) for at, module in blocks if at.startswith(f"{name}.")}
        pending = [block]
        while pending:
            module = pending.pop()
            units_of_module.setdefault(id(module), set()).add(index)
            pending += [child for child in module.children() if id(child) not in inner]
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        units = units_of_module.get(id(module), {0})
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).update(units)
    return owners


def _is_managed(name: str, parameter: nn.Parameter, replaced: object) -> bool:
    """Tell whether a parameter is sharded; one that is not must not need training.

    Raises:
        ConfigError: if it would silently not be trained, or cannot be read.
    """
    if isinstance(parameter, UninitializedParameter):
        raise ConfigError(f"parameter {name} has no shape yet; run the lazy module once first")
    reference = reference_of(parameter)
    source = reference.source if reference is not None else None
    if isinstance(source, NurserySource):
        return True
    if isinstance(source, StoreSource) and replaced is not None and source.owner() is replaced:
        return True
    if reference is not None and reference.is_alive:
        raise ConfigError(
            f"parameter {name} already belongs to an engine; destroy that engine first, or build"
            " the model anew"
        )
    if type(parameter) is ShardedParameter:
        raise ConfigError(
            f"parameter {name} was sharded by an engine that is gone, and its values with it; build"
            " the model anew"
        )
    if parameter.device.type not in ("cpu", "meta", "cuda"):
        raise ConfigError(
            f"parameter {name} is on {parameter.device}; move the model to the CPU or to a CUDA"
            " device, or build it on meta"
        )
    if type(parameter) is nn.Parameter and parameter.is_floating_point():
        return True
    if parameter.requires_grad:
        raise ConfigError(
            f"parameter {name} is a {type(parameter).__name__} of {parameter.dtype}; this version"
            " trains plain floating-point parameters: freeze it, or replace it by a plain one"
        )
    return False  # quantised weights and the like stay as they are, resident


def _segments(
    unit_index: int,
    unit: str,
    members: Iterable[ManagedParameter],
    choices: tuple[ElementType | None, Mapping[int, int]],
) -> list[tuple[SegmentSpec, tuple[ManagedParameter, ...]]]:
    """Split a unit's parameters by type, trainability and parameter group, in stable order.

    Those that stay on the device are apart from those that do not.
    """
    gradient_element, resized = choices
    keyed: dict[tuple[ElementType, int, StateFormat | None, bool], list[ManagedParameter]] = {}
    for member in members:
        has_other = member.element is ElementType.BF16 and member.param_group >= 0
        kept = member.state_format if has_other else None
        key = member.element, member.param_group, kept, member.is_persistent
        keyed.setdefault(key, []).append(member)
    return [
        (
            SegmentSpec(
                unit=unit,
                unit_index=unit_index,
                names=tuple(member.name for member in chosen),
                numels=tuple(
                    resized.get(id(member.parameter), member.parameter.numel()) for member in chosen
                ),
                element=element,
                trainable=group >= 0,
                param_group=max(group, 0),
                gradient_element=gradient_element,
                state_format=kept,
                persistent=stays,
            ),
            tuple(chosen),
        )
        for (element, group, kept, stays), chosen in keyed.items()
    ]


def _element_of(name: str, parameter: nn.Parameter) -> ElementType:
    element = ELEMENTS.get(parameter.dtype)
    if element is None:
        raise ConfigError(
            f"parameter {name} is {parameter.dtype}; this version trains float32, bfloat16 and"
            ' float16: convert the model, or set "bf16": {"enabled": true}'
        )
    return element


def _check_shared_memory(model: nn.Module) -> None:
    """Refuse two parameters on the same memory: sharding would untie them without a word."""
    ranges = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + _extent_bytes(parameter), name)
        for name, parameter in model.named_parameters()
        if type(parameter) is nn.Parameter
        and not isinstance(parameter, UninitializedParameter)
        and not parameter.is_meta
        and parameter.numel()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
        if start < end:
            raise ConfigError(
                f"parameters {first} and {second} share memory but are two objects; tie them by"
                f" assigning the same Parameter, or give {second} memory of its own (clone)"
            )


def _extent_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes from the first to the last element."""
    last = sum(
        (size - 1) * stride
        for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
    )
    return (last + 1) * parameter.element_size()
