"""The plan: what rests where, and the bytes that a step moves because of it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from estimators.layout import align_up
from estimators.records import (
    DEVICE_BUFFER_COUNT,
    HOST_BUFFER_COUNT,
    ResidentCopy,
    Section,
    SubGroup,
    host_staging_bytes,
    section_bytes,
    shared_buffer_bytes,
    staged_offsets,
)
from estimators.segments import PlacementRequest, Tier
from estimators.unsharded import UnshardedBytes

LIVE_PARAMETERS = "parameters unsharded (peak)"
GRADIENT_SCRATCH = "gradients unsharded (peak)"
COLLECTIVE_SCRATCH = "collectives (peak)"
STAGING = "staging of the update"
WHOLE = "optimizer of whole tensors: state, a master, a gradient"
START_EXCESS = "setting parameters at the start (peak beyond a step's)"

HEAP_KEPT_BYTES = 32 << 20
"""Larger blocks go back to the system as soon as they are freed (glibc's largest threshold)."""

RESIDENT_ALIGNMENT_BYTES = 4096
"""Everything resident starts at a page of its arena."""


def resident_bytes(size_bytes: int) -> int:
    """Return the arena bytes of one resident allocation."""
    return align_up(size_bytes, RESIDENT_ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The staging buffers in host memory."""

    count: int
    size_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.count * self.size_bytes


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of the plan: a class of bytes on a tier."""

    tier: Tier
    what: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """NVMe bytes of one optimizer step of one rank, by section."""

    read_bytes: dict[Section, int]
    written_bytes: dict[Section, int]

    @property
    def total_read_bytes(self) -> int:
        """Bytes read in the step."""
        return sum(self.read_bytes.values())

    @property
    def total_written_bytes(self) -> int:
        """Bytes written in the step."""
        return sum(self.written_bytes.values())


@dataclass(frozen=True, slots=True)
class WholePlacement:
    """Where the records of an optimizer of whole tensors rest."""

    resident_bytes: int = 0
    """Most bytes of them in host memory."""
    area_offset: int = 0
    area_bytes: int = 0
    """The part of the swap file that has the others; in a durable run each has two places."""

    def host_bytes(self, request: PlacementRequest) -> int:
        """Return the host memory for whole tensors: what is gathered, staged and resident."""
        return request.whole.working_bytes + self.resident_bytes


def place_whole_tensors(
    request: PlacementRequest, left_bytes: int, swap_bytes: int
) -> WholePlacement:
    """Decide how much of the records of whole tensors rests on the host: what is left there.

    Records rest as a whole, and other ranks have others: so one more has room in the file.
    """
    state_bytes = request.whole.state_bytes
    if not request.pages_whole_tensors:
        return WholePlacement(resident_bytes=state_bytes)
    resident = 0 if request.durable else min(state_bytes, max(left_bytes, 0))
    if resident == state_bytes:
        return WholePlacement(resident_bytes=resident)
    paged = min(state_bytes, state_bytes - resident + request.whole.record_bytes)
    return WholePlacement(resident, swap_bytes, paged * (2 if request.durable else 1))


class DurableBytes:
    """What a durable run takes beside what others take."""

    sub_groups: tuple[SubGroup, ...]
    resident_copies: tuple[ResidentCopy, ...]

    @property
    def twin_bytes(self) -> int:
        """Swap-file bytes of the second copies of what rests on NVMe."""
        return sum(group.extent.twin_bytes for group in self.sub_groups if group.extent is not None)

    @property
    def commit_bytes(self) -> int:
        """Bytes that a commit writes from memory, if all of it has changed."""
        return sum(copy.size_bytes for copy in self.resident_copies)


@dataclass(frozen=True)
class MemoryPlan(DurableBytes, UnshardedBytes):
    """What rests where for one rank; the runtime allocates exactly this."""

    request: PlacementRequest
    sub_groups: tuple[SubGroup, ...]
    slots: SlotPlan
    swap_file_bytes: int
    host_budget_bytes: int
    resident_copies: tuple[ResidentCopy, ...] = ()
    """What a commit of a durable run writes beside what rests on NVMe."""
    whole: WholePlacement = WholePlacement()
    """Where an optimizer of whole tensors keeps its records."""

    @cached_property
    def by_segment(self) -> tuple[tuple[SubGroup, ...], ...]:
        """The sub-groups of each segment, in order."""
        groups: list[list[SubGroup]] = [[] for _ in self.request.segments]
        for sub_group in self.sub_groups:
            groups[sub_group.segment].append(sub_group)
        return tuple(tuple(group) for group in groups)

    def segment_tier(self, segment: int, section: Section) -> Tier | None:
        """Return the lowest tier on which some of a segment's section rests (None: has none)."""
        tiers = {group.tier(section) for group in self.by_segment[segment]}
        return next((tier for tier in (Tier.NVME, Tier.HOST, Tier.DEVICE) if tier in tiers), None)

    def resident_parts(
        self, tier: Tier, section: Section, segment: int
    ) -> list[tuple[SubGroup, int]]:
        """Return `(sub-group, bytes)` of a segment's section that rests on device or host."""
        spec = self.request.segments[segment]
        return [
            (group, section_bytes(self.request, spec, group.numel)[section])
            for group in self.by_segment[segment]
            if group.tier(section) is tier
        ]

    def resident_section_bytes(self, tier: Tier, section: Section) -> int:
        """Return the arena bytes of a class on the device or host tier.

        Each segment has one allocation for a section: the parts are contiguous, in order, and
        their bytes add up whatever the cuts, because every sub-group holds whole cache lines.
        """
        return sum(
            self.resident_segment_bytes(tier, section, index)
            for index in range(len(self.request.segments))
        )

    def resident_segment_bytes(self, tier: Tier, section: Section, segment: int) -> int:
        """Return the arena bytes of one segment's section on the device or host tier.

        Where parameters are kept in full, those of the other ranks lie around this rank's.
        """
        own_bytes = sum(size for _, size in self.resident_parts(tier, section, segment))
        copies = self.request.world_size if is_full(self.request, section, segment) else 1
        return resident_bytes(own_bytes * copies)

    def is_in_place(self, segment: int) -> bool:
        """Tell whether the flat buffer of a segment rests as it is: nothing is ever freed."""
        usable = (Tier.DEVICE, Tier.HOST) if self.request.device_is_host else (Tier.DEVICE,)
        is_whole = is_full(self.request, Section.PARAMETER, segment)
        return (self.request.world_size == 1 or is_whole) and all(
            group.tier(Section.PARAMETER) in usable for group in self.by_segment[segment]
        )

    @property
    def persistent_bytes(self) -> int:
        """Device bytes of parameters that stay unsharded, see [Note: persistent parameters]."""
        return sum(
            self.resident_segment_bytes(Tier.DEVICE, Section.PARAMETER, index)
            for index, segment in enumerate(self.request.segments)
            if segment.persistent
        )

    @cached_property
    def live_parameter_bytes(self) -> int:
        """Peak bytes of unsharded parameters (a backward holds the root and two units).

        A device that is not the host gets those of the next unit meanwhile.
        """
        return self.live_bytes(2, with_ahead=True)

    def keeps_gradients(self, segment: int) -> bool:
        """Tell whether a segment's gradients stay the tensors that autograd made.

        Those are there from its backward on until the update, see `zero/kept.py`.
        """
        request, spec = self.request, self.request.segments[segment]
        return (
            request.trains
            and spec.trainable
            and spec.gradient is spec.element
            and request.world_size == 1
            and (request.device_is_host or request.update_on_device)
            and self.is_in_place(segment)
            and self.segment_tier(segment, Section.GRADIENT) is Tier.DEVICE
        )

    def kept_gradient_bytes(self, segment: int) -> int:
        """Return the bytes of a segment's gradients if they stay as autograd made them, else 0."""
        if not self.keeps_gradients(segment):
            return 0
        return self.resident_segment_bytes(Tier.DEVICE, Section.GRADIENT, segment)

    @cached_property
    def gradient_scratch_bytes(self) -> int:
        """Peak bytes of unsharded gradients on their way to their shards.

        Several ranks reduce those of a unit when its backward ends, which hooks of units that move
        tell. In stages 0 to 2 none moves, and all gradients wait for the end of the whole backward.
        """
        request = self.request
        waits = request.replicates and request.world_size > 1
        return self.gradient_bytes(len(request.segments) if waits else 2)

    @property
    def collective_scratch_bytes(self) -> int:
        """Peak bytes that a collective of several ranks takes beside the gradients themselves.

        Gradients that are added up in another type than their own are cast into a copy. gloo
        reduces in one more copy; it gathers parameters in place. A copy that the heap keeps rather
        than the system gets back may still be there when the next one is made. On GPUs two ranks
        exchange in place, and more receive what they add up. NCCL's own buffers do not depend on
        the model.
        """
        request = self.request
        if request.world_size == 1 or not request.trains:
            return 0
        most = kept = 0
        for segment in request.segments:
            if not segment.trainable:
                continue
            reduction = request.reduction_of(segment)
            receives = request.device_is_host or request.world_size > 2
            count = receives + (reduction is not segment.gradient)
            copy = segment.layout(request.world_size).padded_numel * reduction.size_bytes
            most = max(most, count * copy)
            if request.device_is_host and copy <= HEAP_KEPT_BYTES:
                kept = max(kept, count * copy)
        return most + kept

    @cached_property
    def device_buffer_bytes(self) -> int:
        """Bytes of one of the buffers through which a device updates what rests elsewhere."""
        request = self.request
        if not request.update_on_device:
            return 0
        ends = [0]
        for group in self.sub_groups:
            if group.tier(Section.STATE) is not None:
                segment = request.segments[group.segment]
                sizes = section_bytes(request, segment, group.numel)
                offsets = staged_offsets(request, segment, group)
                ends += [offset + sizes[section] for section, offset in offsets.items()]
        return resident_bytes(max(ends))

    @property
    def start_excess_bytes(self) -> int:
        """Bytes that setting the parameters at the start takes beyond what a step does."""
        return max(self.request.start_bytes - self._step_bytes, 0)

    @property
    def _step_bytes(self) -> int:
        """Peak bytes of what comes and goes in a step."""
        passing = (
            self.live_parameter_bytes + self.gradient_scratch_bytes + self.collective_scratch_bytes
        )
        return max(passing, DEVICE_BUFFER_COUNT * self.device_buffer_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes that the host takes: slots, staging, everything resident, whole tensors."""
        resident = sum(self.resident_section_bytes(Tier.HOST, section) for section in Section)
        fixed = self.staging_bytes + self.whole.host_bytes(self.request)
        return self.slots.total_bytes + fixed + resident

    @cached_property
    def staging_bytes(self) -> int:
        """Bytes of host memory in which the processor updates what rests on a device.

        Where it shares the update that is known once it is known what was moved up.
        """
        request = self.request
        if not request.shares_update:
            return host_staging_bytes(request)
        return HOST_BUFFER_COUNT * max(
            (
                shared_buffer_bytes(request, request.segments[group.segment], group)
                for group in self.sub_groups
            ),
            default=0,
        )

    @property
    def device_bytes(self) -> int:
        """Bytes on the device: what rests there, and what comes and goes in a step or at first."""
        resident = sum(self.resident_section_bytes(Tier.DEVICE, section) for section in Section)
        return resident + self._step_bytes + self.start_excess_bytes

    def rows(self) -> list[PlanRow]:
        """Return the plan line by line, empty lines left out."""
        rows = [
            PlanRow(
                tier,
                f"{section.name.lower()}s resident",
                self.resident_section_bytes(tier, section),
            )
            for tier in (Tier.DEVICE, Tier.HOST)
            for section in (Section.PARAMETER, Section.GRADIENT, Section.STATE)
        ]
        rows.append(PlanRow(Tier.DEVICE, LIVE_PARAMETERS, self.live_parameter_bytes))
        rows.append(PlanRow(Tier.DEVICE, GRADIENT_SCRATCH, self.gradient_scratch_bytes))
        rows.append(PlanRow(Tier.DEVICE, COLLECTIVE_SCRATCH, self.collective_scratch_bytes))
        rows.append(PlanRow(Tier.DEVICE, START_EXCESS, self.start_excess_bytes))
        rows.append(PlanRow(Tier.HOST, f"slots ({self.slots.count})", self.slots.total_bytes))
        rows.append(PlanRow(Tier.HOST, STAGING, self.staging_bytes))
        rows.append(PlanRow(Tier.HOST, WHOLE, self.whole.host_bytes(self.request)))
        rows.extend(
            PlanRow(Tier.NVME, f"{section.name.lower()}s", self.nvme_section_bytes(section))
            for section in (Section.PARAMETER, Section.GRADIENT, Section.STATE)
        )
        rows.append(PlanRow(Tier.NVME, WHOLE, self.whole.area_bytes))
        rows.append(PlanRow(Tier.NVME, "second copies (durable)", self.twin_bytes))
        rows.append(PlanRow(Tier.NVME, "resident state, twice (durable)", 2 * self.commit_bytes))
        order = list(Tier)
        return sorted(
            (row for row in rows if row.size_bytes), key=lambda row: order.index(row.tier)
        )

    def nvme_section_bytes(self, section: Section) -> int:
        """Return the swap-file bytes of a class."""
        return sum(
            group.extent.bytes_of(frozenset({section})).get(section, 0)
            for group in self.sub_groups
            if group.extent is not None
        )


def is_full(request: PlacementRequest, section: Section, segment: int) -> bool:
    """Tell whether each rank has all of a segment's section, not just its shard."""
    stays = request.replicates or request.segments[segment].persistent
    return section is Section.PARAMETER and stays


def resident_copies(plan: MemoryPlan) -> tuple[ResidentCopy, ...]:
    """Return where a durable run keeps what rests in memory, behind the extents of the plan.

    Gradients are left out: a commit is at a step boundary.
    """
    end = plan.swap_file_bytes
    copies = []
    for tier in (Tier.DEVICE, Tier.HOST):
        for section in (Section.PARAMETER, Section.STATE):
            for index, segment in enumerate(plan.request.segments):
                size = plan.resident_segment_bytes(tier, section, index)
                if size:
                    name = f"{segment.name} ({section.name.lower()}, {tier.value})"
                    places = (end, end + size)
                    copies.append(ResidentCopy(name, tier, section, index, size, places))
                    end += 2 * size
    return tuple(copies)


def moves_per_step(section: Section, micro_batches: int, *, updated: bool) -> tuple[int, int]:
    """Return how often a step reads and writes each byte of a section that rests on NVMe.

    Each micro-batch reads parameters for its forward and its backward, and adds to the gradients
    (the first one only writes); the update reads everything and writes parameters and state.

    Args:
        section: which section.
        micro_batches: micro-batches of the step.
        updated: False for frozen parameters, which are clean pages and never written back.
    """
    match section:
        case Section.PARAMETER:
            return 2 * micro_batches + updated, int(updated)
        case Section.GRADIENT:
            return micro_batches, micro_batches
        case Section.STATE:
            return 1, 1
        case _:
            assert_never(section)


def step_traffic(
    plan: MemoryPlan, micro_batches: int, *, written_states: Container[int] | None = None
) -> StepTraffic:
    """Return the NVMe bytes that one optimizer step of `micro_batches` moves on this rank.

    See `moves_per_step`. State that was never written is zero and is not read, and
    parameters that are kept from one use to the next are read once for both.

    Args:
        plan: the plan of this rank.
        micro_batches: micro-batches of the step.
        written_states: indices of the sub-groups whose state was written before; None is all.
    """
    read = dict.fromkeys(Section, 0)
    written = dict.fromkeys(Section, 0)
    for group in plan.sub_groups:
        if group.extent is None:
            continue
        updated = group.tier(Section.STATE) is not None
        for section, size in group.extent.bytes_of(frozenset(Section)).items():
            reads, writes = moves_per_step(section, micro_batches, updated=updated)
            if section is Section.STATE and not (
                written_states is None or group.index in written_states
            ):
                reads = 0
            read[section] += reads * size
            written[section] += writes * size
    return StepTraffic(read, written)


def spares_nvme(plan: MemoryPlan) -> bool:
    """Tell whether memory holds all that might have rested on NVMe: no swap file is made."""
    may_page = Tier.NVME in (plan.request.parameter_tier, plan.request.optimizer_tier)
    return may_page and not plan.swap_file_bytes
