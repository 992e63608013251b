"""What is unsharded at once, and how much may be read ahead of it.

[Note: one unit ahead] `stage3_prefetch_bucket_size` and `stage3_max_live_parameters` bind where a
user has written them. Where not, their defaults are raised to what one unit ahead needs: the first
to the elements of the largest unit, the second to those of the root unit, two units in use (in a
backward the last one is still there when the next one comes) and the one ahead, of blocks and of
units within blocks. Otherwise nothing would come ahead in a large model, whose blocks and root are
larger than any fixed default. The plan counts what comes ahead by the same limits.

At the loss, between a forward and its backward, nothing is on its way, and what `zero/reuse.py`
keeps is bounded by the same room, see [Note: at the loss] there.
"""

from __future__ import annotations

import abc
from collections.abc import Container, Sequence
from functools import cached_property

from estimators.records import Section
from estimators.segments import PlacementRequest, SegmentSpec, Tier

_ByUnit = tuple[int, tuple[dict[int, int], dict[int, int]]]
"""A sum of the root unit, of each block and of each unit within a block."""


def _by_unit(segments: Sequence[SegmentSpec], sizes: Sequence[int]) -> _ByUnit:
    """Return the sum of the root unit, that of each block and that of each unit within a block."""
    names = {segment.unit for segment in segments}
    root = 0
    kinds: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for segment, size in zip(segments, sizes, strict=True):
        if not segment.unit_index:
            root += size
            continue
        units = kinds[_is_within(segment.unit, names)]
        units[segment.unit_index] = units.get(segment.unit_index, 0) + size
    return root, kinds


class UnshardedBytes(abc.ABC):
    """What is unsharded at once."""

    request: PlacementRequest

    @abc.abstractmethod
    def is_in_place(self, segment: int) -> bool:
        """Tell whether the flat buffer of a segment rests as it is: nothing is ever freed."""

    @abc.abstractmethod
    def segment_tier(self, segment: int, section: Section) -> Tier | None:
        """Return the lowest tier on which some of a segment's section rests (None: has none)."""

    def live_bytes(self, others: int, *, with_ahead: bool) -> int:
        """Return the bytes of unsharded parameters: the root unit, some others, and one ahead.

        Args:
            others: units beside the root unit, the largest ones: blocks, and as many of the units
                within blocks, which are experts.
            with_ahead: whether one more may be on its way to a device that is not the host.
        """
        request = self.request
        (root, kinds), (root_numel, numels), _ = self._unsharded
        prefetch_numel, live_numel = self.ahead_limits
        limit = min(prefetch_numel, live_numel - root_numel)
        held = ahead = 0
        others = len(request.segments) if request.holds_all else others
        for units, unit_numels in zip(kinds, numels, strict=True):
            order = sorted(units, key=units.__getitem__, reverse=True)
            held += sum(units[unit] for unit in order[:others])
            if with_ahead and not request.device_is_host:
                coming = [units[unit] for unit in order[others:] if unit_numels[unit] <= limit]
                ahead = max(ahead, *coming, 0)
        return root + held + ahead

    @property
    def live_bytes_at_loss(self) -> int:
        """Bytes of parameters on a device between a forward and its backward, at most.

        They are the root unit's, and those of the last blocks that are kept for the backward, as
        far as there is room: blocks of which some rests on NVMe, and one where no root unit comes
        between its two uses. See [Note: at the loss] in `zero/reuse.py`.
        """
        request = self.request
        room = self.live_bytes(2, with_ahead=True)
        if request.holds_all:
            return room
        root, kinds = self._unsharded[0]
        reads = {
            each.unit_index
            for at, each in enumerate(request.segments)
            if self.segment_tier(at, Section.PARAMETER) is Tier.NVME
        }
        kept = 0
        for units in kinds if request.reuse_numel else ():
            least = 0 if root else max(units.values(), default=0)
            kept += max(least, sum(size for unit, size in units.items() if unit in reads))
        return min(root + kept, room)

    @cached_property
    def ahead_limits(self) -> tuple[int, int]:
        """Most elements that are read ahead, and most that are unsharded and read ahead at once.

        See [Note: one unit ahead].
        """
        root, kinds = self._unsharded[1]
        largest = max((numel for units in kinds for numel in units.values()), default=0)
        window = root + sum(sum(sorted(units.values())[-3:]) for units in kinds)
        request = self.request
        return request.prefetch_limit.at_least(largest), request.live_limit.at_least(window)

    def gradient_bytes(self, others: int) -> int:
        """Return the bytes of unsharded gradients of the root unit and the largest others."""
        root, kinds = self._unsharded[2]
        others = len(self.request.segments) if self.request.holds_all else others
        return root + sum(sum(sorted(units.values(), reverse=True)[:others]) for units in kinds)

    @cached_property
    def _unsharded(self) -> tuple[_ByUnit, _ByUnit, _ByUnit]:
        """By unit: bytes of parameters that are ever freed, elements if any are, gradient bytes."""
        request = self.request
        padded = [each.layout(request.world_size).padded_numel for each in request.segments]
        moves = [not self.is_in_place(index) for index in range(len(padded))]
        rows = list(zip(request.segments, padded, moves, strict=True))
        sizes = [each.element.size_bytes * numel * moving for each, numel, moving in rows]
        moving_units = {each.unit_index for each, _, moving in rows if moving}
        numels = [sum(each.numels) * (each.unit_index in moving_units) for each, *_ in rows]
        gradients = [
            each.gradient.size_bytes * numel * (each.trainable and request.trains)
            for each, numel, _ in rows
        ]
        by_unit = [_by_unit(request.segments, column) for column in (sizes, numels, gradients)]
        return by_unit[0], by_unit[1], by_unit[2]


def _is_within(unit: str, units: Container[str]) -> bool:
    """Tell whether a unit is a part of another one's module."""
    while unit:
        unit = unit.rpartition(".")[0]
        if unit in units:
            return True
    return False
