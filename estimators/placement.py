"""Decide once, from sizes, budgets and rates, what rests on which tier.

[Note: placement] The scan over sub-groups is cyclic, so residency is pinned, not recently-used:
whatever is resident saves its traffic at every step. What saves most drive time per byte is pinned
first, reads and writes both: a byte of a parameter is read for the forward and the backward of each
micro-batch and for the update, and written once; a byte of a gradient is read and written once a
micro-batch; a byte of state once a step. The last section that does not fit as a whole is cut in
two, so the budget is used to the page and NVMe traffic falls linearly with it. Spare memory of a
device that updates is spent first, in the same order: parameters and gradients by whole segments,
state by sub-groups. Slots are sized before anything is pinned, because without them nothing moves;
they stay a small part of what pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from estimators.layout import SHARD_ALIGNMENT_NUMEL, align_down, align_up, split_evenly_bounded
from estimators.pinning import Part, Pinning, fitting_numel
from estimators.records import (
    Extent,
    Section,
    SubGroup,
    host_fixed_bytes,
    host_staging_bytes,
    lowest_tiers,
    section_bytes,
    staged_bytes,
    sub_group_cap,
)
from estimators.segments import PlacementRequest, SegmentSpec, Tier
from estimators.summary import (
    MemoryPlan,
    SlotPlan,
    place_whole_tensors,
    resident_bytes,
    resident_copies,
)

SLOT_TARGET_BYTES = 64 << 20
"""Slots do not grow beyond this: larger transfers are no faster and pin memory."""

SLOT_COMFORTABLE_BYTES = 12 << 20
"""Slots reach this, where the budget allows: six keep a disk busy (docs/measurements.md)."""

SLOT_EFFICIENT_BYTES = 1 << 20
"""Below this a disk loses rate, so slots become fewer before they become smaller."""

SLOT_COUNTS = (6, 5, 4, 3, 2)
"""One being updated, the others read ahead or written behind."""

MOST_SUB_GROUPS = 1 << 18
"""So many took 7 s and 400 MB to plan; more come of a mistake in budgets or sizes."""

_FILLING_ROUNDS = 8
"""How often more of a device is tried to be spent, at most."""

_SPENT_SHARE = 128
"""Less than this part of a device's budget is left unspent rather than planned again."""

PAGED_SHARE = 16
"""Slots take up to this part of what pages: more would push out what they carry."""


class PlanError(ValueError):
    """The model, the configuration and the budgets do not fit together."""

    def __init__(self, message: str, *, needed_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        """The smallest budget of one rank, on the tier that the message names, that does fit."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that one rank may use on each tier; None means no limit is known."""

    host_bytes: int
    device_bytes: int | None = None
    nvme_bytes: int | None = None
    ranks: int = 1
    """Ranks that share what the configuration gives a node; refusals name the node's number."""


def largest_fitting_numel(
    request: PlacementRequest, segment: SegmentSpec, slot_bytes: int, cap: int
) -> int:
    """Return the most elements of `segment` whose staged sections fit `slot_bytes` (0 if none)."""
    return fitting_numel(
        lambda numel: staged_bytes(request, segment, numel) <= slot_bytes,
        align_down(cap, SHARD_ALIGNMENT_NUMEL),
    )


def _full_slot_bytes(request: PlacementRequest) -> int:
    """Return the slot that the configured sub-group size alone would ask for."""
    largest = 0
    for segment in request.segments:
        numel = min(sub_group_cap(request, segment), segment.layout(request.world_size).shard_numel)
        largest = max(largest, staged_bytes(request, segment, numel))
    return min(largest, max(SLOT_TARGET_BYTES, _smallest_slot_bytes(request)))


def _smallest_slot_bytes(request: PlacementRequest) -> int:
    """Return the bytes of a slot that holds the smallest sub-group of any segment."""
    return max(
        (
            staged_bytes(request, segment, SHARD_ALIGNMENT_NUMEL)
            for segment in request.segments
            if segment.layout(request.world_size).shard_numel
        ),
        default=0,
    )


def in_play_bytes(request: PlacementRequest) -> int:
    """Return the host bytes that hold everything which may leave the device, and staging."""
    paged = request.whole.state_bytes if request.pages_whole_tensors else 0
    sections = _whole_bytes(request, (Tier.HOST, Tier.NVME))
    return sections + host_fixed_bytes(request) + paged


def minimum_host_bytes(request: PlacementRequest) -> int:
    """Return the smallest host budget of one rank that `plan_placement` takes."""
    must_stay = _must_stay_bytes(request)
    if not _may_page(request):
        return must_stay
    paging = must_stay + _smallest_slot_bytes(request)
    return paging if _is_capped(request) else min(paging, in_play_bytes(request))


def _must_stay_bytes(request: PlacementRequest) -> int:
    """Return the host bytes that no slot can replace: what may not page, and staging."""
    return _whole_bytes(request, (Tier.HOST,)) + host_fixed_bytes(request)


def plan_slots(request: PlacementRequest, host_bytes: int) -> SlotPlan:
    """Choose how many slots of which size stage the traffic within `host_bytes`.

    Args:
        request: what is placed.
        host_bytes: what is left for slots and everything that may also rest on NVMe; holds at
            least the smallest slot.
    """
    full = _full_slot_bytes(request)
    smallest = _smallest_slot_bytes(request)
    efficient = max(min(full, SLOT_EFFICIENT_BYTES), smallest)
    most = request.slot_count or SLOT_COUNTS[0]
    fewer = [count for count in SLOT_COUNTS if count < most]
    paged = max(_whole_bytes(request, (Tier.NVME,)) - host_bytes, 0)
    few = min(most * SLOT_COMFORTABLE_BYTES, host_bytes // 8)
    wanted = min(max(paged // PAGED_SHARE, few), host_bytes // 2)
    shares = (wanted, host_bytes // 4, host_bytes // 2, host_bytes)
    attempts = [(share, count, efficient) for share in shares for count in (most, *fewer)]
    if request.slot_count is not None:  # what was asked for counts more than the size of a slot
        halves = (host_bytes // 2, host_bytes)
        asked = [(share, most, least) for least in (efficient, smallest) for share in halves]
        attempts = [*asked, *attempts]
    for share, count, least in attempts:
        size = min(full, align_down(share // count, request.alignment_bytes))
        if size >= least:
            return SlotPlan(count, size)
    return SlotPlan(1, min(full, align_down(host_bytes, request.alignment_bytes)))


def plan_placement(request: PlacementRequest, budget: Budget) -> MemoryPlan:
    """Decide what rests where for one rank.

    Raises:
        PlanError: if the budgets cannot hold what must rest on their tier; it names the smallest
            budget that can.
    """
    _check_request(request)
    _check_host(request, budget)
    slots = SlotPlan(0, 0)
    if _pages(request, budget):
        slots = plan_slots(request, budget.host_bytes - _must_stay_bytes(request))
    _check_count(request, budget, slots)
    plan = _fill(request, budget, slots)
    _check_other_tiers(plan, budget)
    return plan


def _fill(request: PlacementRequest, budget: Budget, slots: SlotPlan) -> MemoryPlan:
    """Return a plan that spends the budgets.

    What rests on a device need not come there any more: the memory that this spares is spent on
    more of it, until nothing changes.
    """
    host_bytes = budget.host_bytes - slots.total_bytes - host_fixed_bytes(request)
    plan = _place(request, budget, slots, (host_bytes, 0))
    if budget.device_bytes is None or not request.update_on_device:
        return plan
    spare, too_much = 0, None
    for _ in range(_FILLING_ROUNDS):
        extra = budget.device_bytes - plan.device_bytes
        if too_much is not None:
            extra = min(extra, (too_much - spare) // 2)
        if extra * _SPENT_SHARE < budget.device_bytes:
            break
        fuller = _place(request, budget, slots, (host_bytes, spare + extra))
        if not _fits_other_tiers(fuller, budget):
            too_much = spare + extra
            continue
        is_the_same = fuller.sub_groups == plan.sub_groups
        plan, spare = fuller, spare + extra
        if is_the_same and too_much is None:
            break
    return plan


def _place(
    request: PlacementRequest, budget: Budget, slots: SlotPlan, spend: tuple[int, int]
) -> MemoryPlan:
    """Return the plan that spends so many bytes of the host and of the device."""
    cuts = _cut(request, slots if slots.count else None)
    parts = [
        [Part(index, start, stop) for start, stop in bounds] for index, bounds in enumerate(cuts)
    ]
    pinning = Pinning(request, *spend)
    pinning.run(parts)
    sub_groups, swap_bytes = _build_sub_groups(request, parts)
    whole = place_whole_tensors(request, pinning.left_bytes, swap_bytes)
    swap_bytes += whole.area_bytes
    plan = MemoryPlan(request, sub_groups, slots, swap_bytes, budget.host_bytes, whole=whole)
    if not request.durable:
        return plan
    copies = resident_copies(plan)
    swap_bytes += 2 * sum(copy.size_bytes for copy in copies)
    return replace(plan, resident_copies=copies, swap_file_bytes=swap_bytes)


def _check_request(request: PlacementRequest) -> None:
    if request.sub_group_numel < SHARD_ALIGNMENT_NUMEL:
        raise PlanError(
            f"sub_group_size must be at least {SHARD_ALIGNMENT_NUMEL} elements,"
            f" got {request.sub_group_numel}"
        )
    if request.replicates and request.parameter_tier is not Tier.DEVICE:
        raise PlanError(
            "parameters that each rank has in full rest on the device, not on"
            f" {request.parameter_tier.value}; shard them (stage 3)"
        )


def _check_host(request: PlacementRequest, budget: Budget) -> None:
    needed = minimum_host_bytes(request)
    if budget.host_bytes >= needed:
        return
    must_stay = _must_stay_bytes(request)
    what = f"{must_stay} bytes of state offloaded to cpu" if must_stay else ""
    if request.whole.state_bytes:
        taken = host_fixed_bytes(request) - host_staging_bytes(request)
        what = f"{must_stay} bytes, of them {taken} of an optimizer of whole tensors"
    if needed > must_stay:
        slot = f"{needed - must_stay} bytes for the smallest staging slot of this model"
        what = f"{what} and {slot}" if what else slot
    advice = f"set tiers.host_memory to at least {needed * budget.ranks}"
    if must_stay:
        advice += ", or set device to nvme"
    raise PlanError(
        f"host_memory gives this rank {budget.host_bytes} bytes, but it needs {needed}: {what};"
        f" {advice}",
        needed_bytes=needed,
    )


def _fits_other_tiers(plan: MemoryPlan, budget: Budget) -> bool:
    """Tell whether a plan is within the budgets of drive and device.

    What moves up may take more of a drive: a durable run has copies of what rests on a device, and
    state that is divided between tiers is padded on each.
    """
    return (budget.nvme_bytes is None or plan.swap_file_bytes <= budget.nvme_bytes) and (
        budget.device_bytes is None or plan.device_bytes <= budget.device_bytes
    )


def _check_other_tiers(plan: MemoryPlan, budget: Budget) -> None:
    if budget.nvme_bytes is not None and plan.swap_file_bytes > budget.nvme_bytes:
        twice = plan.twin_bytes + plan.commit_bytes
        advice = (
            f"do without tiers.durable, whose second copies take {twice} of them"
            if plan.request.durable
            else "raise tiers.host_memory"
        )
        raise PlanError(
            f"the plan needs {plan.swap_file_bytes} bytes of NVMe a rank, its capacity is"
            f" {budget.nvme_bytes}; set the capacity in tiers.nvme to at least"
            f" {plan.swap_file_bytes * budget.ranks}, or {advice}",
            needed_bytes=plan.swap_file_bytes,
        )
    if budget.device_bytes is not None and plan.device_bytes > budget.device_bytes:
        kept_bytes = plan.persistent_bytes
        stay = (
            f"; small parameters that stay take {kept_bytes} of them, fewer with a lower"
            " stage3_param_persistence_threshold"
            if kept_bytes
            else ""
        )
        raise PlanError(
            f"the plan needs {plan.device_bytes} bytes of device memory a rank, device_memory"
            f" gives {budget.device_bytes}; set tiers.device_memory to at least"
            f" {plan.device_bytes * budget.ranks}, or offload more{stay}",
            needed_bytes=plan.device_bytes,
        )


def _pages(request: PlacementRequest, budget: Budget) -> bool:
    """Tell whether anything must rest on NVMe."""
    if not _may_page(request):
        return False
    return _is_capped(request) or in_play_bytes(request) > budget.host_bytes


def _may_page(request: PlacementRequest) -> bool:
    """Tell whether anything may rest on NVMe."""
    return any(Tier.NVME in lowest_tiers(request, each).values() for each in request.segments)


def _is_capped(request: PlacementRequest) -> bool:
    """Tell whether the cap on resident parameters keeps some of them on NVMe."""
    cap = request.max_host_parameter_numel
    if cap is None or request.parameter_tier is not Tier.NVME:
        return False
    return cap < sum(
        each.layout(request.world_size).shard_numel
        for each in request.segments
        if not each.persistent
    )


def _whole_bytes(request: PlacementRequest, tiers: tuple[Tier, ...]) -> int:
    """Return the resident bytes of all sections whose lowest tier is one of `tiers`.

    Each sub-group has the padding of its own record.
    """
    return sum(
        resident_bytes(size)
        for segment, bounds in zip(request.segments, _cut(request, None), strict=True)
        for section, size in _bytes_of(request, segment, bounds).items()
        if lowest_tiers(request, segment)[section] in tiers
    )


def _bytes_of(
    request: PlacementRequest, segment: SegmentSpec, bounds: Sequence[tuple[int, int]]
) -> dict[Section, int]:
    """Return the bytes of each section of some sub-groups of a segment.

    Records in codes are larger than those of all elements as one: each has bases of its own.
    """
    sizes = dict.fromkeys(section_bytes(request, segment, 0), 0)
    for numel, count in Counter(stop - start for start, stop in bounds).items():
        for section, size in section_bytes(request, segment, numel).items():
            sizes[section] += count * size
    return sizes


def _cut(request: PlacementRequest, slots: SlotPlan | None) -> list[list[tuple[int, int]]]:
    """Return the sub-group bounds of each segment."""
    return [split_evenly_bounded(numel, cap) for numel, cap in _caps(request, slots)]


def _caps(request: PlacementRequest, slots: SlotPlan | None) -> Iterator[tuple[int, int]]:
    """Yield the elements of each segment's shard, and the most of a sub-group of it."""
    for segment in request.segments:
        cap = sub_group_cap(request, segment)
        if slots is not None and staged_bytes(request, segment, SHARD_ALIGNMENT_NUMEL):
            cap = largest_fitting_numel(request, segment, slots.size_bytes, cap)
        yield segment.layout(request.world_size).shard_numel, cap


def _sub_group_count(request: PlacementRequest, slots: SlotPlan | None) -> int:
    """Return how many sub-groups `_cut` makes."""
    return sum(-(-numel // cap) for numel, cap in _caps(request, slots))


def _check_count(request: PlacementRequest, budget: Budget, slots: SlotPlan) -> None:
    """Refuse what would be cut into more sub-groups than can be planned."""
    count = _sub_group_count(request, slots if slots.count else None)
    if count <= MOST_SUB_GROUPS:
        return
    problem = f"{count} sub-groups, of at most {MOST_SUB_GROUPS} that there may be"
    if _sub_group_count(request, None) > MOST_SUB_GROUPS:
        twice = 2 * sum(numel for numel, _ in _caps(request, None))
        raise PlanError(
            f"sub_group_size {request.sub_group_numel} cuts what is updated into {problem}: set it"
            f" to at least {align_up(-(-twice // MOST_SUB_GROUPS), SHARD_ALIGNMENT_NUMEL)}"
        )
    kept_bytes = _must_stay_bytes(request)
    room_bytes = budget.host_bytes - kept_bytes
    while _sub_group_count(request, plan_slots(request, room_bytes)) > MOST_SUB_GROUPS:
        room_bytes *= 2
    needed = kept_bytes + room_bytes
    raise PlanError(
        f"host_memory gives this rank {budget.host_bytes} bytes, whose slots are so small that what"
        f" is paged is cut into {problem}; set tiers.host_memory to at least"
        f" {needed * budget.ranks}",
        needed_bytes=needed,
    )


def _build_sub_groups(
    request: PlacementRequest, parts: list[list[Part]]
) -> tuple[tuple[SubGroup, ...], int]:
    """Return the sub-groups with their extents, and the bytes of the swap file."""
    sub_groups: list[SubGroup] = []
    end = 0
    for index, segment in enumerate(request.segments):
        for position, part in enumerate(parts[index]):
            sections = []
            inner = 0
            for section, size in section_bytes(request, segment, part.numel).items():
                if part.tiers[section] is Tier.NVME:
                    stored = align_up(size, request.alignment_bytes)
                    sections.append((section, inner, stored))
                    inner += stored
            extent = None
            if sections:
                extent = Extent(f"{segment.name} {position}", end, tuple(sections))
                end += inner
                if request.durable:
                    extent = replace(extent, twin_offset=end)
                    end += extent.twin_bytes
            tiers = tuple(sorted(part.tiers.items()))
            sub_groups.append(
                SubGroup(len(sub_groups), index, part.start, part.stop, tiers, extent)
            )
    return tuple(sub_groups), end
