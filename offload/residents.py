"""The memory of everything that rests on the device or the host.

Where each rank has parameters in full, this store's shard is the part at `position` of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from aio_ops import HostArena, Span
from estimators import MemoryPlan, Section, SubGroup, Tier
from estimators.summary import is_full, resident_bytes
from offload.device import Device, DeviceMemory, Memory

_MEMORY_TIERS = (Tier.DEVICE, Tier.HOST)


class Residents:
    """One span for what of a section of a segment rests on a tier: contiguous and in order."""

    def __init__(self, plan: MemoryPlan, device: Device, position: int = 0) -> None:
        self._plan = plan
        self._position = position
        self._device = device
        # Only slots take part in transfers; a forked DataLoader worker may read what is resident.
        # An arena each for parameters, gradients and state: what outlives the store keeps its own.
        self._arenas = {
            (tier, section): _Arena(size_bytes, tier, device)
            for tier in _MEMORY_TIERS
            for section in Section
            if not self._is_fleeting(tier, section)
            and (size_bytes := plan.resident_section_bytes(tier, section))
        }
        self._gradients: dict[int, tuple[int, DeviceMemory]] = {}
        """Gradients on a device, by segment: there from their first use until they are dropped.

        With the element at which they begin."""
        self._spans: dict[tuple[Tier, Section, int], Memory] = {}
        self._parts: dict[tuple[Section, int], tuple[int, Memory]] = {}
        """Of each sub-group where it begins in the span of its segment, and its memory."""
        for tier in _MEMORY_TIERS:
            for section in Section:
                for segment in range(len(plan.request.segments)):
                    self._carve(tier, section, segment)

    def part(self, section: Section, group: SubGroup) -> Memory:
        """Return the memory of one section of a sub-group that rests in memory."""
        if group.tier(section) is Tier.DEVICE and self._is_fleeting(Tier.DEVICE, section):
            return self._gradient_part(group)
        return self._parts[section, group.index][1]

    def stretch(self, section: Section, groups: Sequence[SubGroup]) -> Memory:
        """Return the memory of a section of sub-groups that follow each other and rest together.

        It has the sections one after another, as `part` returns them.
        """
        first, last = groups[0], groups[-1]
        if first.tier(section) is Tier.DEVICE and self._is_fleeting(Tier.DEVICE, section):
            return self._gradient_part(first, last.stop)
        start, part = self._parts[section, first.index]
        if first is last:
            return part
        last_start, last_part = self._parts[section, last.index]
        whole = self._spans[_tier_of(first, section), section, first.segment]
        return whole.sub(start, last_start + last_part.size_bytes - start)

    def drop_gradients(self) -> None:
        """Free what is only there while gradients are."""
        self._gradients.clear()

    def _is_fleeting(self, tier: Tier, section: Section) -> bool:
        """Tell whether a section has memory only while it is used.

        When a backward begins, activations fill a GPU; they go as gradients come.
        """
        is_device = tier is Tier.DEVICE and not self._device.is_host
        return is_device and section is Section.GRADIENT

    def _gradient_part(self, group: SubGroup, stop: int | None = None) -> Memory:
        """Return the gradient of a sub-group, or of those up to an element, made if it must be."""
        element_bytes = self._plan.request.segments[group.segment].gradient.size_bytes
        if group.segment not in self._gradients:
            parts = self._plan.resident_parts(Tier.DEVICE, Section.GRADIENT, group.segment)
            size_bytes = resident_bytes(sum(size for _, size in parts))
            memory = self._device.memory_of(self._device.zeros(size_bytes, torch.uint8))
            if not isinstance(memory, DeviceMemory):
                raise TypeError("gradients on the processor are resident")
            self._gradients[group.segment] = parts[0][0].start, memory
        first, whole = self._gradients[group.segment]
        numel = (group.stop if stop is None else stop) - group.start
        return whole.sub((group.start - first) * element_bytes, numel * element_bytes)

    def whole(self, section: Section, segment: int) -> Memory | None:
        """Return the memory of a section of a whole segment, or None if it is not in one place.

        It is this rank's shard, or everything where each rank has that in full.
        """
        groups = self._plan.by_segment[segment]
        if not groups:
            return Span(0, 0, None)  # only parameters without elements
        tiers = {group.tier(section) for group in groups}
        if len(tiers) > 1 or (section, groups[0].index) not in self._parts:
            return None
        return self._spans[_tier_of(groups[0], section), section, segment]

    def spans(self, tier: Tier, section: Section) -> list[Memory]:
        """Return all memory of a class on a tier."""
        if self._is_fleeting(tier, section):
            return [memory for _, memory in self._gradients.values()]
        return [
            span
            for (there, kind, _), span in self._spans.items()
            if there is tier and kind is section
        ]

    def memory(self, tier: Tier, section: Section, segment: int) -> Memory:
        """Return the memory of what of a segment's section rests on a tier, whole pages."""
        return self._spans[tier, section, segment]

    def arena_bytes(self, tier: Tier) -> int:
        """Return the bytes that were carved on a tier."""
        return sum(arena.used_bytes for (on, _), arena in self._arenas.items() if on is tier)

    def close(self) -> None:
        """Give the memory up: it goes with the last tensor that still views it."""
        self._spans.clear()
        self._parts.clear()
        self._gradients.clear()
        for arena in self._arenas.values():
            arena.close()

    def _carve(self, tier: Tier, section: Section, segment: int) -> None:
        parts = self._plan.resident_parts(tier, section, segment)
        if not parts or self._is_fleeting(tier, section):
            return
        span = self._arenas[tier, section].carve(
            self._plan.resident_segment_bytes(tier, section, segment)
        )
        self._spans[tier, section, segment] = span
        own_bytes = sum(size for _, size in parts)
        offset = self._position * own_bytes if is_full(self._plan.request, section, segment) else 0
        for group, size in parts:
            self._parts[section, group.index] = offset, span.sub(offset, size)
            offset += size


def _tier_of(group: SubGroup, section: Section) -> Tier:
    tier = group.tier(section)
    if tier is None:
        raise RuntimeError(f"a sub-group of segment {group.segment} has no {section.name.lower()}")
    return tier


class _Arena:
    """All memory of one section on one tier."""

    def __init__(self, size_bytes: int, tier: Tier, device: Device) -> None:
        self.used_bytes = 0
        self._host: HostArena | None = None
        self._tensor: torch.Tensor | None = None
        if tier is Tier.DEVICE and not device.is_host:
            self._tensor = device.zeros(size_bytes, torch.uint8)
        else:
            self._host = device.arena(size_bytes)

    def carve(self, size_bytes: int) -> Memory:
        """Return the next bytes; sizes are whole pages."""
        if self._host is not None:
            span = self._host.carve(size_bytes)
            self.used_bytes = self._host.used_bytes
            return span
        if self._tensor is None:
            raise RuntimeError("the arena is closed; nothing can be carved from it")
        start, self.used_bytes = self.used_bytes, self.used_bytes + size_bytes
        return DeviceMemory(self._tensor).sub(start, size_bytes)

    def close(self) -> None:
        """Give the memory up: it goes with the last that views it."""
        self._tensor = None
        if self._host is not None:
            self._host.close()


def runs(
    groups: Sequence[SubGroup], section: Section, *, joins: bool
) -> Iterator[tuple[Sequence[SubGroup], int]]:
    """Divide the sub-groups of a segment into those that move at once, each with where it stops.

    Those on NVMe move one by one; of the others all that follow each other on one tier, if they
    are to be joined.
    """
    at = 0
    for tier, found in itertools.groupby(groups, key=lambda group: group.tier(section)):
        length = len(list(found))
        step = length if joins and tier is not Tier.NVME else 1
        for start in range(at, at + length, step):
            yield groups[start : start + step], start + step
        at += length
