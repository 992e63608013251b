"""Decide once, from sizes and budgets, what rests on which tier.

[Note: placement] The scan over sub-groups is cyclic, so residency is pinned, not recently-used:
whatever is resident saves its traffic at every step. Each byte of a parameter moves four times a
step on NVMe (read for forward, backward and update, written once), each byte of a gradient or of
optimizer state twice, so parameters are pinned first, then gradients, then state, until the host
budget is used. Slots are sized before anything is pinned, because without them nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from estimators.layout import SHARD_ALIGNMENT_NUMEL, align_up, split_evenly_bounded
from estimators.records import (
    Extent,
    Section,
    SubGroup,
    lowest_tiers,
    section_bytes,
    staged_bytes,
)
from estimators.segments import PlacementRequest, SegmentSpec, Tier
from estimators.summary import MemoryPlan, SlotPlan, resident_bytes

SLOT_TARGET_BYTES = 64 << 20
"""Slots do not grow beyond this: larger transfers are no faster and pin memory."""

SLOT_EFFICIENT_BYTES = 1 << 20
"""Below this a disk loses rate, so slots become fewer before they become smaller."""

SLOT_COUNTS = (6, 5, 4, 3, 2)
"""One being updated, the others read ahead or written behind."""


class PlanError(ValueError):
    """The model, the configuration and the budgets do not fit together."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that one rank may use on each tier; None means no limit is known."""

    host_bytes: int
    device_bytes: int | None = None
    nvme_bytes: int | None = None


def largest_fitting_numel(
    request: PlacementRequest, segment: SegmentSpec, slot_bytes: int, cap: int
) -> int:
    """Return the most elements of `segment` whose staged sections fit `slot_bytes` (0 if none)."""
    low, high = 0, cap // SHARD_ALIGNMENT_NUMEL
    while low < high:
        middle = (low + high + 1) // 2
        if staged_bytes(request, segment, middle * SHARD_ALIGNMENT_NUMEL) <= slot_bytes:
            low = middle
        else:
            high = middle - 1
    return low * SHARD_ALIGNMENT_NUMEL


def _full_slot_bytes(request: PlacementRequest) -> int:
    """Return the slot that the configured sub-group size alone would ask for."""
    largest = 0
    for segment in request.segments:
        numel = min(request.sub_group_numel, segment.layout(request.world_size).shard_numel)
        largest = max(largest, staged_bytes(request, segment, numel))
    return min(largest, max(SLOT_TARGET_BYTES, _smallest_slot_bytes(request)))


def _smallest_slot_bytes(request: PlacementRequest) -> int:
    """Return the bytes of a slot that holds the smallest sub-group of any segment."""
    return max(
        (staged_bytes(request, segment, SHARD_ALIGNMENT_NUMEL) for segment in request.segments),
        default=0,
    )


def plan_slots(request: PlacementRequest, host_bytes: int) -> SlotPlan:
    """Choose how many slots of which size stage the traffic within `host_bytes`.

    Raises:
        PlanError: if not even one slot of the smallest sub-group fits.
    """
    full = _full_slot_bytes(request)
    smallest = _smallest_slot_bytes(request)
    efficient = max(min(full, SLOT_EFFICIENT_BYTES), smallest)
    for share in (host_bytes // 2, host_bytes):
        for count in SLOT_COUNTS:
            size = min(full, share // count // request.alignment_bytes * request.alignment_bytes)
            if size >= efficient:
                return SlotPlan(count, size)
    size = min(full, host_bytes // request.alignment_bytes * request.alignment_bytes)
    if size < smallest:
        raise PlanError(
            f"host_memory gives this rank {host_bytes} bytes, but the smallest staging slot of this"
            f" model needs {smallest}; set tiers.host_memory to at least {smallest} bytes a rank,"
            " better several times that"
        )
    return SlotPlan(1, size)


def _cut(request: PlacementRequest, slots: SlotPlan | None) -> list[list[tuple[int, int]]]:
    """Return the sub-group bounds of each segment."""
    cuts = []
    for segment in request.segments:
        shard_numel = segment.layout(request.world_size).shard_numel
        cap = max(min(request.sub_group_numel, shard_numel), SHARD_ALIGNMENT_NUMEL)
        if slots is not None and staged_bytes(request, segment, SHARD_ALIGNMENT_NUMEL):
            cap = largest_fitting_numel(request, segment, slots.size_bytes, cap)
        cuts.append(split_evenly_bounded(shard_numel, cap))
    return cuts


def _candidates(
    request: PlacementRequest, cuts: list[list[tuple[int, int]]]
) -> Iterator[tuple[Section, int, int | None, int]]:
    """Yield `(section, segment, sub-group or None for the whole segment, bytes)` by value."""
    for section in (Section.PARAMETER, Section.GRADIENT):
        for index, segment in enumerate(request.segments):
            numel = segment.layout(request.world_size).shard_numel
            size = section_bytes(request, segment, numel).get(section, 0)
            if size:
                yield section, index, None, size
    for index, segment in enumerate(request.segments):
        for position, (start, stop) in enumerate(cuts[index]):
            size = section_bytes(request, segment, stop - start).get(Section.STATE, 0)
            if size:
                yield Section.STATE, index, position, size


def _choose_tiers(
    request: PlacementRequest, cuts: list[list[tuple[int, int]]], host_bytes: int
) -> dict[tuple[Section, int, int], Tier]:
    """Return the tier of every section of every sub-group within `host_bytes`."""
    lowest = lowest_tiers(request)
    tiers: dict[tuple[Section, int, int], Tier] = {}
    left = host_bytes
    ordered = sorted(
        _candidates(request, cuts), key=lambda item: lowest[item[0]] is not Tier.HOST
    )  # what must rest on the host takes its share first
    for section, segment, position, size in ordered:
        tier = lowest[section]
        stored = resident_bytes(size)
        if tier is not Tier.DEVICE:
            if stored <= left and _may_be_resident(request, section, segment, tiers):
                tier = Tier.HOST
                left -= stored
            elif tier is Tier.HOST:
                needed = sum(
                    resident_bytes(item[3]) for item in ordered if lowest[item[0]] is Tier.HOST
                )
                raise PlanError(
                    f"offload to cpu needs {needed} bytes of host memory a rank, host_memory"
                    f" leaves {host_bytes}; raise tiers.host_memory or set device to nvme"
                )
        positions = range(len(cuts[segment])) if position is None else (position,)
        for each in positions:
            tiers[section, segment, each] = tier
    return tiers


def _may_be_resident(
    request: PlacementRequest,
    section: Section,
    segment: int,
    tiers: dict[tuple[Section, int, int], Tier],
) -> bool:
    """Tell whether a segment's parameters stay within the cap on resident ones."""
    cap = request.max_host_parameter_numel
    if cap is None or section is not Section.PARAMETER or request.parameter_tier is not Tier.NVME:
        return True
    resident = {
        index
        for (kind, index, _), tier in tiers.items()
        if kind is Section.PARAMETER and tier is Tier.HOST
    }
    numels = [
        request.segments[index].layout(request.world_size).shard_numel
        for index in resident | {segment}
    ]
    return sum(numels) <= cap


def _build_sub_groups(
    request: PlacementRequest,
    cuts: list[list[tuple[int, int]]],
    tiers: dict[tuple[Section, int, int], Tier],
) -> tuple[tuple[SubGroup, ...], int]:
    """Return the sub-groups with their extents, and the bytes of the swap file."""
    sub_groups: list[SubGroup] = []
    end = 0
    for index, segment in enumerate(request.segments):
        for position, (start, stop) in enumerate(cuts[index]):
            sections = []
            inner = 0
            own_tiers = []
            for section, size in section_bytes(request, segment, stop - start).items():
                tier = tiers[section, index, position]
                own_tiers.append((section, tier))
                if tier is Tier.NVME:
                    stored = align_up(size, request.alignment_bytes)
                    sections.append((section, inner, stored))
                    inner += stored
            extent = None
            if sections:
                extent = Extent(f"{segment.name} {position}", end, tuple(sections))
                end += inner
            sub_groups.append(
                SubGroup(len(sub_groups), index, start, stop, tuple(own_tiers), extent)
            )
    return tuple(sub_groups), end


def plan_placement(request: PlacementRequest, budget: Budget) -> MemoryPlan:
    """Decide what rests where for one rank.

    Raises:
        PlanError: if the budgets cannot hold what must rest on their tier.
    """
    if request.sub_group_numel < SHARD_ALIGNMENT_NUMEL:
        raise PlanError(
            f"sub_group_size must be at least {SHARD_ALIGNMENT_NUMEL} elements,"
            f" got {request.sub_group_numel}"
        )
    cuts = _cut(request, None)
    lowest = lowest_tiers(request)
    in_play = sum(
        resident_bytes(size)
        for section, _, _, size in _candidates(request, cuts)
        if lowest[section] is not Tier.DEVICE
    )
    must_stay = sum(
        resident_bytes(size)
        for section, _, _, size in _candidates(request, cuts)
        if lowest[section] is Tier.HOST
    )
    numel = sum(segment.layout(request.world_size).shard_numel for segment in request.segments)
    capped = (
        request.max_host_parameter_numel is not None and numel > request.max_host_parameter_numel
    )
    pages = (Tier.NVME in lowest.values() and in_play > budget.host_bytes) or (
        capped and request.parameter_tier is Tier.NVME
    )
    slots = None
    left = budget.host_bytes
    if pages:
        slots = plan_slots(request, max(budget.host_bytes - must_stay, 0))
        cuts = _cut(request, slots)
        left -= slots.total_bytes
    tiers = _choose_tiers(request, cuts, left)
    sub_groups, swap_bytes = _build_sub_groups(request, cuts, tiers)
    plan = MemoryPlan(request, sub_groups, slots or SlotPlan(0, 0), swap_bytes, budget.host_bytes)
    if budget.nvme_bytes is not None and swap_bytes > budget.nvme_bytes:
        raise PlanError(
            f"the plan needs {swap_bytes} bytes of NVMe a rank, its capacity is"
            f" {budget.nvme_bytes}; raise tiers.nvme capacity or tiers.host_memory"
        )
    if budget.device_bytes is not None and plan.device_bytes > budget.device_bytes:
        raise PlanError(
            f"the plan needs {plan.device_bytes} bytes of device memory a rank, device_memory"
            f" gives {budget.device_bytes}; raise it, or offload more"
        )
    return plan
