"""Give every parameter its values, unit by unit, and hand them to the store.

Only one unit of a model on `meta` is in memory at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import nn

from offload import Store, write_parameters, write_parameters_on_device
from zero.comm import Communicator
from zero.errors import ConfigError
from zero.nursery import NurserySource
from zero.parameter import REFERENCE_ATTRIBUTE, ParameterReference, reference_of
from zero.runtime import Runtime
from zero.source import StoreSource
from zero.starting import StartProgress
from zero.unit import Segment, Unit

InitFunction = Callable[[nn.Module], object]


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Let what is made be trained later, also where it is made in torch's inference mode."""
    has_gradients = torch.is_grad_enabled()
    with torch.inference_mode(mode=False), torch.set_grad_enabled(mode=has_gradients):
        yield


def initialise_module(
    name: str, module: nn.Module, on_meta: Collection[int], init_fn: InitFunction | None
) -> None:
    """Replace what one module owns on `meta` by initialised tensors on the CPU.

    Args:
        name: the module's name, for messages.
        module: the module; its children are not touched.
        on_meta: ids of the parameters that were on `meta` at first. A parameter that two modules
            share is initialised by both, the last one counts, as `model.apply(init_fn)` does.
        init_fn: sets parameters and buffers of the one module it is given, and may reach into its
            children, which come first; without it the module's own `reset_parameters` is called.

    Raises:
        ConfigError: if a module cannot be initialised, or leaves something unset.
    """
    own = [id(each) in on_meta for each in module.parameters(recurse=False)]
    below = [id(each) in on_meta for each in module.parameters()]
    was_on_meta = any(own) or (bool(below) and all(below))
    fresh = _materialize_own(module)
    if fresh or (was_on_meta and init_fn is not None):
        _initialise(name or type(module).__name__, module, init_fn)
        _check_set(name or type(module).__name__, module, fresh)


def seal_segment(segment: Segment, store: Store, communicator: Communicator) -> None:
    """Move the values of a segment's parameters into this rank's shard; rank 0's values count.

    Where the store holds those of a durable run, they stay.
    """
    target = store.device.zeros(segment.layout.shard_numel, torch.float32)
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    for piece in segment.pieces:
        pieces.setdefault(piece.index, []).append((piece.first, piece.start, piece.numel))
    with torch.no_grad():
        for index, member in enumerate(segment.members):
            values = _full_values(member.parameter, communicator, store.device.torch_device)
            for first, start, numel in pieces.get(index, []):
                own = values[first : first + numel].to(target.device)
                target[start : start + numel] = own.float()
    if not store.is_restored:
        if store.device.is_host:
            write_parameters(store, segment.index, target.numpy())
        else:
            write_parameters_on_device(store, segment.index, target)
    del target
    segment.attach(store)


def _full_values(
    parameter: nn.Parameter, communicator: Communicator, device: torch.device
) -> torch.Tensor:
    """Return the values of a parameter, flat: rank 0's, or those that `zero.Init` has sharded.

    Rank 0's pass through the device, wherever each rank has built its model.
    """
    reference = reference_of(parameter)
    if reference is not None and isinstance(reference.source, NurserySource):
        return reference.source.read().reshape(-1)
    values = parameter.detach().contiguous().reshape(-1)
    if communicator.world_size > 1:
        values = values.to(device, copy=True)
        communicator.broadcast(values, 0)
    return values


def refer(runtime: Runtime, unit: Unit, segment: Segment) -> None:
    """Hang on the parameters of a segment where their values come from."""
    for position, member in enumerate(segment.members):
        source = StoreSource(runtime, segment, position, unit)
        setattr(member.parameter, REFERENCE_ATTRIBUTE, ParameterReference(source))


def seal_units(runtime: Runtime, init_fn: InitFunction | None, progress: StartProgress) -> None:
    """Materialise every module and seal every unit once its module is done, the root unit last.

    Children come before their parents, in the order in which a constructor builds them and
    `model.apply` visits them, so random initialisation gives the bits of an unsharded model.
    """
    model = runtime.units[0].module
    on_meta = {id(parameter) for parameter in model.parameters() if parameter.is_meta}
    units = {id(unit.module): unit for unit in runtime.units}
    done: set[int] = set()

    def walk(module: nn.Module, name: str) -> None:
        if id(module) in done:
            return
        done.add(id(module))
        for key, child in module.named_children():
            walk(child, f"{name}.{key}" if name else key)
        initialise_module(name, module, on_meta, init_fn)
        if id(module) in units:
            _seal_unit(runtime, units[id(module)])
            progress.placed(units[id(module)].numel)

    walk(model, "")
    with torch.no_grad():
        for buffer in model.buffers():
            if runtime.communicator.world_size > 1:
                values = buffer.to(runtime.store.device.torch_device).contiguous()
                runtime.communicator.broadcast(values, 0)
                buffer.copy_(values)


def _seal_unit(runtime: Runtime, unit: Unit) -> None:
    for segment in unit.segments:
        seal_segment(segment, runtime.store, runtime.communicator)
        refer(runtime, unit, segment)
        # The values in fp32, and in the model's own type before; see offload/heap.py.
        runtime.store.heap.freed(2 * 4 * segment.layout.shard_numel)


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
