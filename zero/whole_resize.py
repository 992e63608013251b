"""What an optimizer keeps of a whole tensor, when the tensor gets another shape.

[Note: whole resize] Elements that both shapes have keep their state, and new ones have zeros, as in
every optimizer. Which elements of the state are which follows from a trial on the new shape: each
length of a state tensor must be a length of the parameter, in the order that the parameter has
them, or stay as it is; so moments, factors of rows or columns and numbers are cut. A tensor that
mixes elements (a basis, a preconditioner) has no such form. Its optimizer says what becomes of it:

    def resize_state(self, state, old_shape, new_shape):  # returns the new state
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.whole_records import record_bytes
from zero.whole_trial import Kept

HOOK = "resize_state"
"""A method of optimizers that know better."""


@dataclass(frozen=True, slots=True)
class Recut:
    """A parameter that gets another shape, and what is kept of it then."""

    name: str
    old: torch.Size
    new: torch.Size
    kept: Kept


def recut_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], recut: Recut
) -> dict[str, Any]:
    """Return the state of a parameter for its new shape.

    Raises:
        ValueError: naming what cannot be cut, and what to do.
    """
    if not state:
        return {}
    given: Callable[..., Any] | None = getattr(optimizer, HOOK, None)
    if given is not None:
        found = dict(given(dict(state), recut.old, recut.new))
    else:
        shapes = {name: shape for name, _, shape in recut.kept.forms}
        found = dict(state)
        for name, value in state.items():
            if isinstance(value, Tensor):
                found[name] = _cut(optimizer, name, value, shapes.get(name), recut)
    size = record_bytes({name: each for name, each in found.items() if isinstance(each, Tensor)})
    if size > recut.kept.size_bytes:
        raise ValueError(
            f"{type(optimizer).__name__} keeps {size} bytes of {recut.name} in its new shape"
            f" {tuple(recut.new)}, and its first steps on that shape keep at most"
            f" {recut.kept.size_bytes}; let {HOOK} return no more"
        )
    return found


def _cut(
    optimizer: torch.optim.Optimizer,
    name: str,
    value: Tensor,
    wanted: tuple[int, ...] | None,
    recut: Recut,
) -> Tensor:
    if wanted is None:  # made in a later step than those of the trial
        wanted = tuple(recut.new) if value.shape == recut.old else tuple(value.shape)
    if wanted == tuple(value.shape):
        return value
    if not _follows(value.shape, wanted, recut):
        raise ValueError(
            f"{type(optimizer).__name__} keeps {name!r} of shape {tuple(value.shape)} of"
            f" {recut.name}, which cannot be cut as the parameter, from {tuple(recut.old)} to"
            f" {tuple(recut.new)}: it would have shape {wanted}. Say what becomes of it in a method"
            f" {HOOK}(self, state, old_shape, new_shape) of the class, or resize before"
            " zero.initialize"
        )
    new = torch.zeros(wanted, dtype=value.dtype, device=value.device)
    common = tuple(slice(0, min(pair)) for pair in zip(value.shape, wanted, strict=True))
    new[common] = value[common]
    return new


def _follows(old: Sequence[int], new: Sequence[int], recut: Recut) -> bool:
    """Tell whether the lengths of a tensor change with some of the parameter's, in their order."""
    if len(old) != len(new):
        return False
    lengths = iter(zip(recut.old, recut.new, strict=True))
    return all(pair[0] == pair[1] or pair in lengths for pair in zip(old, new, strict=True))
