"""Sub-groups, their sections and the extents of the swap file that hold them."""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping
from dataclasses import dataclass

from estimators.layout import SHARD_ALIGNMENT_NUMEL, align_up
from estimators.segments import PlacementRequest, SegmentSpec, Tier

STAGED_BYTES = 64 << 20
"""Most bytes of a sub-group that passes between host and device: larger copies are no faster."""

WHOLE_BYTES = 512 << 20
"""Most bytes of one of which nothing passes in a step: whoever saves or reads it copies it whole
to the host, and an update of as many bytes takes a device longer than the host to issue."""

_STAGED_ALIGNMENT_BYTES = 4096

DEVICE_BUFFER_COUNT = 3
"""Buffers on a device that updates: one is copied in, one updated, one copied out."""


HOST_BUFFER_COUNT = 4
"""Buffers of a host that updates for a device: one is updated in, others come and go meanwhile."""


class Section(enum.IntEnum):
    """A part of a sub-group that rests and moves on its own, in the order that an extent has them.

    The order lets one update be one read (gradient, parameter, state) and one write (parameter,
    state), a forward read the parameter alone, and a backward write the gradient alone.
    """

    GRADIENT = 0
    PARAMETER = 1
    STATE = 2


@dataclass(frozen=True, slots=True)
class Extent:
    """An aligned byte range of the swap file, with the sections of one sub-group that it holds."""

    name: str
    offset: int
    sections: tuple[tuple[Section, int, int], ...]
    """(section, offset in the extent, stored bytes), contiguous, each a multiple of the
    alignment."""
    twin_offset: int | None = None
    """Where the file has the second copy of what a durable run keeps; None without one."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole extent."""
        return sum(size for _, _, size in self.sections)

    def holds(self, section: Section) -> bool:
        """Tell whether a section rests in this extent."""
        return any(kind is section for kind, _, _ in self.sections)

    def offset_of(self, section: Section) -> int:
        """Return where a section starts in the extent."""
        for kind, offset, _ in self.sections:
            if kind is section:
                return offset
        raise KeyError(f"{self.name} holds no {section.name}")

    def span(self, sections: frozenset[Section]) -> tuple[int, int]:
        """Return `(offset in the extent, bytes)` of the given sections that rest here.

        Raises:
            ValueError: if other sections lie between them.
        """
        chosen = [(offset, size) for kind, offset, size in self.sections if kind in sections]
        if not chosen:
            return 0, 0
        start = chosen[0][0]
        size = sum(size for _, size in chosen)
        last_offset, last_size = chosen[-1]
        if last_offset + last_size - start != size:
            raise ValueError(f"{self.name}: {sorted(sections)} are not contiguous")
        return start, size

    def bytes_of(self, sections: frozenset[Section]) -> dict[Section, int]:
        """Return the stored bytes of each of the given sections that rest here."""
        return {kind: size for kind, _, size in self.sections if kind in sections}

    @property
    def twin_bytes(self) -> int:
        """Bytes of the second copy; gradients have none, for a commit is at a step boundary."""
        if self.twin_offset is None:
            return 0
        return sum(size for kind, _, size in self.sections if kind is not Section.GRADIENT)

    def copy_offset(self, section: Section, copy: int) -> int:
        """Return where the file has a copy (0 or 1) of a section.

        Raises:
            ValueError: if there is no such copy.
        """
        if copy == 0:
            return self.offset + self.offset_of(section)
        if self.twin_offset is None or section is Section.GRADIENT or copy != 1:
            raise ValueError(f"{self.name} has no copy {copy} of its {section.name}")
        first = next(offset for kind, offset, _ in self.sections if kind is not Section.GRADIENT)
        return self.twin_offset + self.offset_of(section) - first

    def pieces(
        self, sections: frozenset[Section], second: Container[Section] = ()
    ) -> list[tuple[int, int, int]]:
        """Return `(offset in the file, offset in the extent, bytes)` of sections, in order.

        What lies together in both is one piece.

        Args:
            sections: which of them; those that do not rest here have no bytes.
            second: those of which the second copy is meant.
        """
        found: list[tuple[int, int, int]] = []
        for kind, inner, size in self.sections:
            if kind not in sections:
                continue
            place = self.copy_offset(kind, 1 if kind in second else 0)
            if found:
                last_place, last_inner, last_size = found[-1]
                if (last_place + last_size, last_inner + last_size) == (place, inner):
                    found[-1] = (last_place, last_inner, last_size + size)
                    continue
            found.append((place, inner, size))
        return found


@dataclass(frozen=True, slots=True)
class ResidentCopy:
    """Where a durable run keeps two copies of what rests in memory: one section of a segment."""

    name: str
    tier: Tier
    section: Section
    segment: int
    size_bytes: int
    offsets: tuple[int, int]
    """Where the file has the first and the second copy."""


@dataclass(frozen=True, slots=True)
class SubGroup:
    """The slice of this rank's shards that one pass of the optimizer step updates."""

    index: int
    segment: int
    start: int
    stop: int
    tiers: tuple[tuple[Section, Tier], ...]
    extent: Extent | None

    @property
    def numel(self) -> int:
        """Elements of the sub-group."""
        return self.stop - self.start

    def tier(self, section: Section) -> Tier | None:
        """Return where a section rests, or None if the sub-group has none."""
        for kind, tier in self.tiers:
            if kind is section:
                return tier
        return None

    def on_nvme(self, section: Section) -> bool:
        """Tell whether a section rests on NVMe."""
        return self.tier(section) is Tier.NVME


def section_bytes(
    request: PlacementRequest, segment: SegmentSpec, numel: int
) -> dict[Section, int]:
    """Return the bytes of each section of a sub-group of `numel` elements, unpadded, in order."""
    parameter_bytes = numel * segment.element.size_bytes
    if not (segment.trainable and request.trains):
        return {Section.PARAMETER: parameter_bytes}
    return {
        Section.GRADIENT: numel * segment.gradient.size_bytes,
        Section.PARAMETER: parameter_bytes,
        Section.STATE: request.record_of(segment, numel).size_bytes,
    }


def lowest_tiers(request: PlacementRequest, segment: SegmentSpec) -> dict[Section, Tier]:
    """Return the lowest tier that each section of a segment may rest on."""
    return {
        Section.GRADIENT: request.optimizer_tier,
        Section.PARAMETER: Tier.DEVICE if segment.persistent else request.parameter_tier,
        Section.STATE: request.optimizer_tier,
    }


def staged_bytes(request: PlacementRequest, segment: SegmentSpec, numel: int) -> int:
    """Return the bytes that a slot needs for a sub-group if all that may rest on NVMe does."""
    lowest = lowest_tiers(request, segment)
    return sum(
        align_up(size, request.alignment_bytes)
        for section, size in section_bytes(request, segment, numel).items()
        if lowest[section] is Tier.NVME
    )


def sub_group_cap(request: PlacementRequest, segment: SegmentSpec) -> int:
    """Return the most elements of a sub-group of a segment, whatever slots there are.

    Beside a device, sub-groups pass through staging buffers, so what is staged of one is no larger
    than those: what may rest elsewhere if the device updates, what may rest on it if the host does.
    Where that is nothing, all of it is no larger than `WHOLE_BYTES`.
    """
    shard_numel = segment.layout(request.world_size).shard_numel
    cap = min(request.sub_group_numel, shard_numel)
    if not request.device_is_host and segment.trainable and request.trains:
        # Of many elements, beside which the padding of a record's fields is nothing.
        sizes = section_bytes(request, segment, STAGED_BYTES)
        lowest = lowest_tiers(request, segment)
        staged = sum(
            size
            for section, size in sizes.items()
            if (lowest[section] is Tier.DEVICE) is not request.update_on_device
        )
        most_bytes = STAGED_BYTES if request.update_on_device else STAGED_BYTES // HOST_BUFFER_COUNT
        if not staged:
            most_bytes, staged = WHOLE_BYTES, sum(sizes.values())
        most = most_bytes * STAGED_BYTES // staged
        if request.shares_update:
            passed = sizes[Section.GRADIENT] + sizes[Section.PARAMETER]
            most = min(most, STAGED_BYTES**2 // passed)
        cap = min(cap, most // SHARD_ALIGNMENT_NUMEL * SHARD_ALIGNMENT_NUMEL)
    return max(cap, SHARD_ALIGNMENT_NUMEL)


def host_fixed_bytes(request: PlacementRequest) -> int:
    """Return the host memory that nothing which is placed may take."""
    whole = request.whole
    resting = 0 if request.pages_whole_tensors else whole.state_bytes
    return host_staging_bytes(request) + whole.working_bytes + resting


def host_staging_bytes(request: PlacementRequest) -> int:
    """Return the most host memory that the processor needs to update what rests on a device."""
    if request.device_is_host or not request.trains:
        return 0
    if request.update_on_device and not request.shares_update:
        return 0
    return HOST_BUFFER_COUNT * max(
        (
            _host_buffer_bytes(request, segment)
            for segment in request.segments
            if segment.trainable and segment.layout(request.world_size).shard_numel
        ),
        default=0,
    )


def shared_buffer_bytes(request: PlacementRequest, segment: SegmentSpec, group: SubGroup) -> int:
    """Return the bytes of what rests on the device of a sub-group that the host may update."""
    if group.tier(Section.STATE) is not Tier.HOST:
        return 0
    return sum(
        align_up(size, _STAGED_ALIGNMENT_BYTES)
        for section, size in section_bytes(request, segment, group.numel).items()
        if group.tier(section) is Tier.DEVICE
    )


def _host_buffer_bytes(request: PlacementRequest, segment: SegmentSpec) -> int:
    """Return the bytes of what may rest on the device of a sub-group that the host updates.

    Of one that is shared the state is on the host, and the rest may have been moved up.
    """
    sizes = section_bytes(request, segment, sub_group_cap(request, segment))
    lowest = lowest_tiers(request, segment)
    return sum(
        align_up(size, _STAGED_ALIGNMENT_BYTES)
        for section, size in sizes.items()
        if (
            section is not Section.STATE
            if request.shares_update
            else lowest[section] is Tier.DEVICE
        )
    )


def staged_offsets(
    request: PlacementRequest, segment: SegmentSpec, group: SubGroup
) -> dict[Section, int]:
    """Return where the sections of a sub-group that do not rest on the device lie in a buffer."""
    sizes = section_bytes(request, segment, group.numel)
    return aligned_offsets(
        {section: size for section, size in sizes.items() if group.tier(section) is not Tier.DEVICE}
    )


def aligned_offsets(sizes: Mapping[Section, int]) -> dict[Section, int]:
    """Return where sections of these sizes lie in a buffer that has them one after the other."""
    offsets = {}
    end = 0
    for section, size in sizes.items():
        offsets[section] = end
        end = align_up(end + size, _STAGED_ALIGNMENT_BYTES)
    return offsets
