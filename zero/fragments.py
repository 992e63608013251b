"""Read and set values, gradients and optimizer state of single parameters: the field's functions.

The `full` forms are collectives and give or take whole tensors; the `local` ones see this rank's
piece, flat, and no other rank. All are right on every tier; what is asked of a parameter that has
no such thing (frozen, or no gradient yet) is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from offload import Field, ShardReader
from zero.errors import ShardedAccessError
from zero.named_states import find_kept_state, find_state
from zero.parameter import reference_of
from zero.source import ShardSource, StoreSource


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master of a parameter, or None if nothing trains it; a collective."""
    return _get_full(param, Field.MASTER)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the averaged gradient of the window so far, or None; a collective.

    Under fp16 it has the loss scale in it.
    """
    return _get_full(param, Field.GRADIENT)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return "fp32_param" of a parameter, or a state by its name in torch, or None; a collective.

    What an optimizer of whole tensors keeps has the shape that it gave it; a number is a tensor of
    one element. None of it is there before the first step. "exp_avg" and "exp_avg_sq" are None
    where the optimizer keeps no such moment.

    Raises:
        KeyError: naming the states that there are, if it is another name.
    """
    found = find_kept_state(_source(param), optim_state_key)
    if found is None:
        return None
    return _get_full(param, found) if isinstance(found, Field) else found.get_full()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master of a parameter, and the parameter with it; a collective."""
    _set_full(param, Field.MASTER, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the gradient that the next step will use; a collective."""
    _set_full(param, Field.GRADIENT, value)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set "fp32_param" of a parameter, or a state by its name in torch; a collective.

    Raises:
        KeyError: naming the states that there are.
        ShardedAccessError: if the parameter has none, or none yet.
        ValueError: if the shape is another.
    """
    found = find_state(_source(param), optim_state_key)
    if isinstance(found, Field):
        _set_full(param, found, value)
    else:
        found.set_full(value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's piece of the fp32 master, flat, or None."""
    return _get_local(param, Field.MASTER)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's piece of the averaged gradient, flat, or None."""
    return _get_local(param, Field.GRADIENT)


def safe_get_local_optimizer_state(
    param: nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """Return this rank's piece of a state, flat, or None.

    What an optimizer of whole tensors keeps is the piece of the owner, and of nobody else.
    """
    found = find_kept_state(_source(param), optim_state_key)
    if found is None:
        return None
    return _get_local(param, found) if isinstance(found, Field) else found.get_local()


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's piece of the fp32 master, and of the parameter with it."""
    _set_local(param, Field.MASTER, value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's piece of the gradient."""
    _set_local(param, Field.GRADIENT, value)


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set this rank's piece of a state."""
    found = find_state(_source(param), optim_state_key)
    if isinstance(found, Field):
        _set_local(param, found, value)
    else:
        found.set_local(value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor | None],
) -> None:
    """Replace gradients by `update_func(gradient, parameter)`; a collective.

    A function that returns None has changed the gradient in place.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            changed = update_func(gradient, param)
            safe_set_full_grad(param, gradient if changed is None else changed)


@dataclass(frozen=True, slots=True)
class ParameterState:
    """Everything that is kept of one parameter, as whole private tensors, or None."""

    name: str
    parameter: nn.Parameter
    value: torch.Tensor
    fp32_param: torch.Tensor | None
    grad: torch.Tensor | None
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    states: Mapping[str, torch.Tensor]
    """All that the optimizer keeps of each element, by its names for it."""


def iterate_states(model: nn.Module) -> Iterator[ParameterState]:
    """Yield what is kept of every managed parameter, paging each extent once; a collective.

    One sub-group and one parameter are in memory at a time. Nothing may change meanwhile.
    """
    by_segment: dict[int, list[tuple[StoreSource, str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        reference = reference_of(parameter)
        if reference is not None and isinstance(reference.source, StoreSource):
            by_segment.setdefault(reference.source.segment_index, []).append(
                (reference.source, name, parameter)
            )
    for index in sorted(by_segment):
        chosen = sorted(by_segment[index], key=lambda item: item[0].position)
        runtime = chosen[0][0].runtime
        runtime.communicator.join(f"iterating over the states of segment {index}")
        runtime.segments[index].commit(runtime.store)
        for source, _, _ in chosen:
            source.refresh_gradient()
        reader = ShardReader(runtime.store, index, tuple(Field))
        for source, name, parameter in chosen:
            own = reader.read(*source.own_range())
            found: dict[Field, torch.Tensor] = {}
            for field in Field:
                if source.has(field):
                    full = torch.empty(
                        source.shape, dtype=source.dtype(field), device=source.device
                    )
                    is_kept = field is Field.GRADIENT and runtime.is_kept(index)
                    source.assemble(full, source.read_own(field) if is_kept else own[field])
                    found[field] = full
            states = {key: found[field] for key, field in runtime.states.items() if field in found}
            yield ParameterState(
                name,
                parameter,
                found[Field.PARAMETER],
                found.get(Field.MASTER),
                found.get(Field.GRADIENT),
                states.get("exp_avg"),
                states.get("exp_avg_sq"),
                states,
            )


def _source(param: nn.Parameter) -> ShardSource:
    reference = reference_of(param)
    if reference is None:
        raise ShardedAccessError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine; pass a parameter of"
            " the model that was given to zero.initialize"
        )
    return reference.source


def _get_full(param: nn.Parameter, field: Field) -> torch.Tensor | None:
    source = _source(param)
    source.communicator.join(f"reading {field.value} of {source.name}")
    return source.read(field) if source.has(field) else None


def _get_local(param: nn.Parameter, field: Field) -> torch.Tensor | None:
    source = _source(param)
    return source.read_own(field) if source.has(field) else None


def _require(source: ShardSource, field: Field) -> None:
    if field is Field.GRADIENT and isinstance(source, StoreSource) and source.is_trained:
        return
    if not source.has(field):
        raise ShardedAccessError(
            f"parameter {source.name} has no {field.value}: it is frozen, or its engine has no"
            " optimizer"
        )


def _set_full(param: nn.Parameter, field: Field, value: torch.Tensor) -> None:
    source = _source(param)
    _require(source, field)
    if value.shape != source.shape:
        raise ValueError(
            f"parameter {source.name} has shape {tuple(source.shape)}, the {field.value} given has"
            f" {tuple(value.shape)}"
        )
    source.communicator.join(f"setting {field.value} of {source.name}")
    with torch.no_grad():
        source.store_full(value.detach().to(source.dtype(field)), field)


def _set_local(param: nn.Parameter, field: Field, value: torch.Tensor) -> None:
    source = _source(param)
    _require(source, field)
    numel = sum(piece[2] for piece in source.pieces() if piece[0] == source.communicator.rank)
    if value.numel() != numel:
        raise ValueError(
            f"this rank has {numel} elements of parameter {source.name}, the {field.value} given"
            f" has {value.numel()}"
        )
    is_value = field in (Field.PARAMETER, Field.MASTER)
    if is_value and isinstance(source, StoreSource) and source.segment.is_replicated:
        raise ShardedAccessError(
            f"each rank has all values of parameter {source.name} (stages 0 to 2), so a piece of"
            " them cannot be set by one rank; set the whole with zero.safe_set_full_fp32_param"
        )
    if numel:
        source.write_own(field, value.detach().to(source.dtype(field)).reshape(-1))
    source.after_write(field)
