"""Give every parameter its values, unit by unit, and hand them to the store.

Only one unit of a model on `meta` is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from offload import Store, write_parameters
from zero.comm import Communicator
from zero.errors import ConfigError
from zero.parameter import REFERENCE_ATTRIBUTE, ParameterReference
from zero.runtime import Runtime
from zero.source import StoreSource
from zero.unit import Segment, Unit

InitFunction = Callable[[nn.Module], object]


def materialize_modules(module: nn.Module, visited: set[int], init_fn: InitFunction | None) -> None:
    """Replace what `module` and its children own on `meta` by initialised tensors on the CPU.

    Args:
        module: the module to walk.
        visited: modules that are done; extended.
        init_fn: sets parameters and buffers of the one module it is given; without it the
            module's own `reset_parameters` is called.

    Raises:
        ConfigError: if a module cannot be initialised, or leaves something unset.
    """
    for name, child in module.named_modules():
        if id(child) in visited:
            continue
        visited.add(id(child))
        fresh = _materialize_own(child)
        if fresh:
            _initialise(name or type(child).__name__, child, init_fn)
            _check_set(name or type(child).__name__, child, fresh)


def seal_segment(segment: Segment, store: Store, communicator: Communicator) -> None:
    """Move the values of a segment's parameters into this rank's shard; rank 0's values count."""
    masters = np.zeros(segment.layout.shard_numel, np.float32)
    target = torch.from_numpy(masters)
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    for piece in segment.pieces:
        pieces.setdefault(piece.index, []).append((piece.first, piece.start, piece.numel))
    with torch.no_grad():
        for index, member in enumerate(segment.members):
            values = member.parameter.detach().contiguous().reshape(-1)
            if communicator.world_size > 1:
                values = values.clone()
                communicator.broadcast(values, 0)
            for first, start, numel in pieces.get(index, []):
                target[start : start + numel] = values[first : first + numel].float()
    write_parameters(store, segment.index, masters)
    segment.attach(store)


def refer(runtime: Runtime, unit: Unit, segment: Segment) -> None:
    """Hang on the parameters of a segment where their values come from."""
    for position, member in enumerate(segment.members):
        source = StoreSource(runtime, segment, position, unit)
        setattr(member.parameter, REFERENCE_ATTRIBUTE, ParameterReference(source))


def seal_units(runtime: Runtime, init_fn: InitFunction | None) -> None:
    """Materialise and seal every unit, the root unit last because it may own shared parameters."""
    visited: set[int] = set()
    for unit in [*runtime.units[1:], *runtime.units[:1]]:
        materialize_modules(unit.module, visited, init_fn)
        for segment in unit.segments:
            seal_segment(segment, runtime.store, runtime.communicator)
            refer(runtime, unit, segment)
    with torch.no_grad():
        for buffer in runtime.units[0].module.buffers():
            if runtime.communicator.world_size > 1:
                values = buffer.contiguous()
                runtime.communicator.broadcast(values, 0)
                buffer.copy_(values)


def _materialize_own(module: nn.Module) -> list[torch.Tensor]:
    """Replace the module's own meta tensors, filled with NaN so that a forgotten one is found."""
    fresh: list[torch.Tensor] = []
    for parameter in module.parameters(recurse=False):
        if parameter.is_meta:
            real = torch.empty_like(parameter, device="cpu")
            _poison(real)
            replacement = nn.Parameter(real, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, replacement)  # type: ignore[no-untyped-call]
            fresh.append(parameter)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            real = torch.empty_like(buffer, device="cpu")
            _poison(real)
            module._buffers[name] = real
            fresh.append(real)
    return fresh


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))


def _initialise(name: str, module: nn.Module, init_fn: InitFunction | None) -> None:
    with torch.no_grad():
        if init_fn is not None:
            init_fn(module)
            return
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
            return
    raise ConfigError(
        f"module {name} ({type(module).__name__}) is on meta and has no reset_parameters; pass"
        " init_fn to zero.initialize, which sets the parameters and buffers of one module"
    )


def _check_set(name: str, module: nn.Module, fresh: Sequence[torch.Tensor]) -> None:
    for tensor in fresh:
        if tensor.is_floating_point() and torch.isnan(tensor).any():
            raise ConfigError(
                f"module {name} ({type(module).__name__}) has a tensor of shape"
                f" {tuple(tensor.shape)} that its initialisation left unset (it still holds NaN);"
                " set every parameter and buffer in init_fn"
            )
