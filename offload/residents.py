"""The memory of everything that rests on the device or the host.

Where each rank has parameters in full, this store's shard is the part at `position` of them.
"""

from __future__ import annotations

import torch

from aio_ops import HostArena, Span
from estimators import MemoryPlan, Section, SubGroup, Tier
from offload.device import Device, DeviceMemory, Memory

_MEMORY_TIERS = (Tier.DEVICE, Tier.HOST)


class Residents:
    """One span for each section of a segment: its resident sub-groups, contiguous and in order."""

    def __init__(self, plan: MemoryPlan, device: Device, position: int = 0) -> None:
        self._plan = plan
        self._position = position
        # Only slots take part in transfers; a forked DataLoader worker may read what is resident.
        # An arena each for parameters, gradients and state: what outlives the store keeps its own.
        self._arenas = {
            (tier, section): _Arena(size_bytes, tier, device)
            for tier in _MEMORY_TIERS
            for section in Section
            if (size_bytes := plan.resident_section_bytes(tier, section))
        }
        self._spans: dict[tuple[Section, int], Memory] = {}
        self._parts: dict[tuple[Section, int], Memory] = {}
        for tier in _MEMORY_TIERS:
            for section in Section:
                for segment in range(len(plan.request.segments)):
                    self._carve(tier, section, segment)

    def part(self, section: Section, group: SubGroup) -> Memory:
        """Return the memory of one section of a sub-group that rests in memory."""
        return self._parts[section, group.index]

    def whole(self, section: Section, segment: int) -> Memory | None:
        """Return the memory of a section of a whole segment, or None if some of it is on NVMe.

        It is this rank's shard, or everything where each rank has that in full.
        """
        groups = self._plan.by_segment[segment]
        if not groups:
            return Span(0, 0, None)  # only parameters without elements
        if any((section, group.index) not in self._parts for group in groups):
            return None
        return self._spans[section, segment]

    def spans(self, tier: Tier, section: Section) -> list[Memory]:
        """Return all memory of a class on a tier."""
        return [
            span
            for (kind, segment), span in self._spans.items()
            if kind is section and self._plan.resident_parts(tier, section, segment)
        ]

    def memory(self, section: Section, segment: int) -> Memory:
        """Return the memory of what of a segment's section rests here, whole pages."""
        return self._spans[section, segment]

    def arena_bytes(self, tier: Tier) -> int:
        """Return the bytes that were carved on a tier."""
        return sum(arena.used_bytes for (on, _), arena in self._arenas.items() if on is tier)

    def close(self) -> None:
        """Give the memory up: it goes with the last tensor that still views it."""
        self._spans.clear()
        self._parts.clear()
        for arena in self._arenas.values():
            arena.close()

    def _carve(self, tier: Tier, section: Section, segment: int) -> None:
        parts = self._plan.resident_parts(tier, section, segment)
        if not parts:
            return
        span = self._arenas[tier, section].carve(
            self._plan.resident_segment_bytes(tier, section, segment)
        )
        self._spans[section, segment] = span
        own_bytes = sum(size for _, size in parts)
        offset = self._position * own_bytes if self._plan.is_full(section) else 0
        for group, size in parts:
            self._parts[section, group.index] = span.sub(offset, size)
            offset += size


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
