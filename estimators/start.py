"""What setting the parameters at the start takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartTensor:
    """A parameter before it is sharded."""

    numel: int
    size_bytes: int
    """In the model's own type."""
    is_meta: bool
    """Whether it gets its values only then."""


def start_bytes(
    units: Sequence[Sequence[StartTensor]], shard_numels: Sequence[int], world_size: int
) -> int:
    """Return the most bytes that setting the parameters takes: see `zero/materialize.py`.

    Of a model on `meta` the root unit and one other have their values at once, in the model's own
    type, and one tensor is checked at a time. A segment's shard passes through fp32 as a whole;
    with several ranks a tensor is copied to be broadcast.

    Args:
        units: the parameters of each unit, the root unit first.
        shard_numels: elements of each segment's shard.
        world_size: number of ranks.
    """
    own = [sum(each.size_bytes for each in unit if each.is_meta) for unit in units]
    checked = max((each.numel for unit in units for each in unit if each.is_meta), default=0)
    sent = max((each.size_bytes for unit in units for each in unit), default=0)
    fresh = own[0] + max(own[1:], default=0) if own else 0
    passing = 4 * max(shard_numels, default=0) + (sent if world_size > 1 else 0)
    return fresh + max(checked, passing)
