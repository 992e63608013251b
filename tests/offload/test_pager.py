"""The pager on a hostile disk: the right bytes whatever the order, every failure raised."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from aio_ops import Fault, HostArena, SimulatedDisk
from estimators import (
    Budget,
    ElementType,
    Section,
    SlotPlan,
    StateFormat,
    Tier,
    plan_placement,
    step_traffic,
)
from offload import (
    Ledger,
    PageError,
    Pager,
    PagerFailedError,
    PagerState,
    SlotState,
    Store,
    carve_slots,
    update,
)
from tests.support.stores import (
    contents,
    make_plan,
    make_request,
    make_store,
    read_parameters,
    scalars,
    span_of,
    train,
)

NOWHERE = Path("/nowhere")
STATE = frozenset({Section.STATE})
FORMATS = [
    (ElementType.FP32, StateFormat.EXACT),
    (ElementType.BF16, StateFormat.EXACT),
    (ElementType.BF16, StateFormat.FP32),
]


def resident_contents(
    element: ElementType, state_format: StateFormat, micro_batches: int
) -> list[bytes]:
    request = make_request(
        element, parameter_tier=Tier.DEVICE, optimizer_tier=Tier.DEVICE, state_format=state_format
    )
    store = make_store(plan_placement(request, Budget(0)), SimulatedDisk(0), NOWHERE)
    train(store, steps=3, micro_batches=micro_batches)
    assert store.ledger.snapshot().nvme_read_bytes == 0
    result = contents(store)
    store.close()
    return result


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slots", [1, 2, 3, 6])
@pytest.mark.parametrize(("element", "state_format"), FORMATS)
def test_paged_bits_equal_resident_bits(
    seed: int, slots: int, element: ElementType, state_format: StateFormat
) -> None:
    disk = SimulatedDisk(seed)
    plan = make_plan(make_request(element, state_format=state_format), slots)
    store = make_store(plan, disk, NOWHERE)
    train(store, steps=3, micro_batches=2)
    moved = store.ledger.snapshot()
    assert disk.submitted > 0
    assert moved.nvme_read_bytes > 0
    assert moved.nvme_write_bytes > 0
    assert contents(store) == resident_contents(element, state_format, 2)
    store.close()


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_step_moves_exactly_the_planned_bytes(slots: int) -> None:
    plan = make_plan(make_request(), slots)
    store = make_store(plan, SimulatedDisk(1), NOWHERE)
    train(store, steps=1)
    before = store.ledger.snapshot()
    for index, segment in enumerate(plan.request.segments):
        gradient = np.ones(segment.layout(1).shard_numel, np.float32)
        store.add_gradient(index, span_of(gradient))
    update(store, scalars(2), lambda _: None)
    moved = store.ledger.snapshot().minus(before)
    planned = step_traffic(plan, 1)
    parameter_reads = planned.read_bytes[Section.PARAMETER] // 3  # no forward and backward here
    assert moved.bytes_by_class["nvme read parameter"] == parameter_reads > 0
    assert moved.bytes_by_class["nvme read state"] == planned.read_bytes[Section.STATE] > 0
    assert moved.bytes_by_class["nvme read gradient"] == planned.read_bytes[Section.GRADIENT] > 0
    assert moved.nvme_write_bytes == planned.total_written_bytes > 0
    store.close()


def transfers_of_training() -> int:
    disk = SimulatedDisk(0)
    store = make_store(make_plan(make_request(), 2), disk, NOWHERE)
    train(store, steps=2)
    store.close()
    return disk.submitted


TRANSFERS = transfers_of_training()


@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
@pytest.mark.parametrize("position", range(0, TRANSFERS, 3))
def test_every_failed_transfer_is_raised_with_its_record(kind: str, position: int) -> None:
    disk = SimulatedDisk(position, fault=Fault(position, kind))
    store = make_store(make_plan(make_request(), 2), disk, NOWHERE)
    with pytest.raises(
        PageError, match=r"record \S+\[.*\] \d+: PAGING_(IN|OUT) of Extent\(offset=\d+, size_bytes="
    ) as caught:
        train(store, steps=2)
    assert caught.value.errno is not None
    store.close()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
@pytest.mark.parametrize("position", range(TRANSFERS))
@pytest.mark.parametrize("slots", [1, 3])
def test_every_position_fails_loudly(kind: str, position: int, slots: int) -> None:
    disk = SimulatedDisk(position + 1, fault=Fault(position, kind))
    store = make_store(make_plan(make_request(), slots), disk, NOWHERE)
    try:
        train(store, steps=2)
    except PageError:
        store.close()
        return
    assert disk.submitted <= position, "a failed transfer was not reported"


def leased(disk: SimulatedDisk) -> tuple[Pager, Store]:
    store = make_store(make_plan(make_request(), 2), disk, NOWHERE)
    assert store.pager is not None
    return store.pager, store


def test_a_failed_page_out_refuses_all_further_work() -> None:
    pager, store = leased(SimulatedDisk(0, fault=Fault(0, "enospc")))
    extent = store.plan.sub_groups[0].extent
    assert extent is not None
    slot = pager.blank(extent)
    pager.page_out(slot, STATE)
    with pytest.raises(PageError, match="PAGING_OUT"):
        pager.drain()
    assert pager.state is PagerState.FAILED
    assert slot.state is SlotState.RESIDENT  # its bytes exist nowhere else
    for call in (
        lambda: pager.page_in(extent, STATE),
        lambda: pager.blank(extent),
        lambda: pager.read_ahead(extent, STATE),
        pager.drain,
    ):
        with pytest.raises(PagerFailedError, match="a page-out failed"):
            call()
    store.close()


def test_a_failed_page_in_frees_its_slot_and_can_be_tried_again() -> None:
    pager, store = leased(SimulatedDisk(0, fault=Fault(1, "eio")))
    extent = store.plan.sub_groups[0].extent
    assert extent is not None
    slot = pager.blank(extent)
    slot.section(Section.STATE).view()[:3] = b"abc"
    pager.page_out(slot, STATE)
    with pytest.raises(PageError, match="PAGING_IN"):
        pager.page_in(extent, STATE)
    assert pager.state is PagerState.READY
    again = pager.page_in(extent, STATE)
    assert bytes(again.section(Section.STATE).view()[:3]) == b"abc"
    pager.release(again)
    store.close()


def test_a_step_that_fails_midway_names_what_has_moved() -> None:
    disk = SimulatedDisk(3, fault=Fault(TRANSFERS - 2, "eio"))
    store = make_store(make_plan(make_request(), 2), disk, NOWHERE)
    with pytest.raises(PageError):
        train(store, steps=2)
    with pytest.raises(PagerFailedError, match=r"sub-groups already moved: first\[fp32"):
        read_parameters(store, 0)
    store.close()


def events_of_an_update(store: Store) -> list[tuple[str, str]]:
    train(store, steps=1)
    for index, segment in enumerate(store.plan.request.segments):
        store.add_gradient(index, span_of(np.ones(segment.layout(1).shard_numel, np.float32)))
    assert store.pager is not None
    store.pager.drain()
    store.ledger.events.clear()
    update(store, scalars(2), lambda _: None)
    return list(store.ledger.events)


def test_the_drive_is_busy_through_every_boundary_of_sub_groups() -> None:
    """Something is in flight at each update but the last, at most of them reads and writes."""
    disk = SimulatedDisk(0, reorder=False)
    store = make_store(make_plan(make_request(), 4), disk, NOWHERE)
    in_flight: dict[str, set[str]] = {"read": set(), "write": set()}
    seen = []
    for event, record in events_of_an_update(store):
        match event.split():
            case ["submit", verb]:
                in_flight[verb].add(record)
            case [verb, "done"]:
                in_flight[verb].discard(record)
            case ["update"]:
                seen.append((len(in_flight["read"]), len(in_flight["write"])))
    assert len(seen) == len(store.plan.sub_groups) > 12
    assert all(reads + writes for reads, writes in seen[:-1]), seen
    assert sum(reads > 0 for reads, _ in seen) > len(seen) // 2
    assert sum(writes > 0 for _, writes in seen) > len(seen) // 2
    store.close()


@pytest.mark.parametrize(("slots", "burst"), [(4, 2), (6, 3), (3, 3), (2, 5), (1, 2)])
def test_bursts_alternate_and_change_no_bits(slots: int, burst: int) -> None:
    plan = make_plan(make_request(), slots)
    store = make_store(plan, SimulatedDisk(0, reorder=False), NOWHERE, burst=burst)
    directions = [
        event[7:] for event, _ in events_of_an_update(store) if event.startswith("submit")
    ]
    runs = [(verb, len(list(each))) for verb, each in itertools.groupby(directions)]
    if slots >= 2 * burst:  # reads start only when a whole burst is on the disk
        writes = [count for verb, count in runs[:-1] if verb == "write"]
        assert set(writes) <= {burst, 2 * burst}
        reads = [count for verb, count in runs[1:] if verb == "read"]
        assert max(reads) >= burst
    store.close()
    for seed in range(3):
        store = make_store(plan, SimulatedDisk(seed), NOWHERE, burst=burst)
        train(store, steps=3, micro_batches=2)
        assert contents(store) == resident_contents(ElementType.FP32, StateFormat.EXACT, 2)
        store.close()


def test_a_burst_that_is_held_is_not_lost_by_an_interruption() -> None:
    store = make_store(make_plan(make_request(), 4), SimulatedDisk(0), NOWHERE, burst=3)
    pager = store.pager
    assert pager is not None
    extent = store.plan.sub_groups[0].extent
    assert extent is not None
    slot = pager.blank(extent)
    slot.section(Section.STATE).view()[:3] = b"abc"
    pager.page_out(slot, STATE)
    assert slot.state is SlotState.PAGING_OUT
    pager.reclaim()
    assert bytes(pager.page_in(extent, STATE).section(Section.STATE).view()[:3]) == b"abc"
    store.close()


@pytest.mark.parametrize("position", range(0, 40, 3))
def test_a_failed_write_of_a_burst_is_raised(position: int) -> None:
    disk = SimulatedDisk(position, fault=Fault(position, "eio", repeat=True))
    store = make_store(make_plan(make_request(), 4), disk, NOWHERE, burst=2)
    with pytest.raises(PageError, match=r"record \S+\[.*\] \d+: PAGING_(IN|OUT)"):
        train(store, steps=2)
    store.close()


def test_a_tensor_larger_than_a_slot_streams_in_chunks() -> None:
    request = make_request(sub_group_numel=1 << 30)
    plan = plan_placement(request, Budget(40_000))
    largest = max(numel for segment in request.segments for numel in segment.numels)
    assert largest * 16 > plan.slots.size_bytes
    store = make_store(plan, SimulatedDisk(0), NOWHERE)
    train(store, steps=3, micro_batches=2)
    assert contents(store) == resident_contents(ElementType.FP32, StateFormat.EXACT, 2)
    store.close()


def test_weights_come_before_moments_in_every_extent() -> None:
    """Blocks of a transfer go in order of offset, so a record's weights are there first."""
    for group in make_plan(make_request(ElementType.BF16), 2).sub_groups:
        assert group.extent is not None
        offsets = [group.extent.offset_of(each) for each in (Section.PARAMETER, Section.STATE)]
        assert offsets == sorted(offsets)


def test_a_pool_that_is_all_lent_out_says_so() -> None:
    pager, store = leased(SimulatedDisk(0))
    extents = [group.extent for group in store.plan.sub_groups if group.extent is not None]
    pager.blank(extents[0])
    pager.blank(extents[1])
    with pytest.raises(RuntimeError, match="all 2 slots are lent out"):
        pager.blank(extents[2])
    store.close()


def test_read_ahead_keeps_one_slot_for_demand_and_is_dropped_by_a_write() -> None:
    pager, store = leased(SimulatedDisk(0))
    extents = [group.extent for group in store.plan.sub_groups if group.extent is not None]
    assert pager.read_ahead(extents[0], STATE)
    assert not pager.read_ahead(extents[1], STATE)
    slot = pager.blank(extents[0])
    slot.section(Section.STATE).view()[:2] = b"hi"
    pager.page_out(slot, STATE)
    assert bytes(pager.page_in(extents[0], STATE).section(Section.STATE).view()[:2]) == b"hi"
    store.close()


def test_slots_move_only_as_the_table_allows() -> None:
    with HostArena(1 << 16) as arena:
        slot = carve_slots(arena, SlotPlan(1, 4096))[0]
        with pytest.raises(RuntimeError, match="cannot go from"):
            slot.move_to(SlotState.PAGING_OUT)
        slot.move_to(SlotState.PAGING_IN)
        with pytest.raises(RuntimeError, match="cannot go from"):
            slot.move_to(SlotState.PAGING_OUT)


def test_the_ledger_subtracts_and_names_its_classes() -> None:
    ledger = Ledger()
    before = ledger.snapshot()
    assert set(before.bytes_by_class) == {
        f"nvme {verb} {section}"
        for verb in ("read", "write")
        for section in ("gradient", "parameter", "state")
    }
    assert before.minus(before).nvme_read_bytes == 0


def test_an_interrupted_borrower_gives_its_slots_back() -> None:
    pager, store = leased(SimulatedDisk(0))
    extents = [group.extent for group in store.plan.sub_groups if group.extent is not None]
    pager.blank(extents[0])
    pager.blank(extents[1])
    pager.reclaim()
    pager.release(pager.blank(extents[2]))
    with pytest.raises(RuntimeError, match="not lent out"):
        pager.release(carve_slots(HostArena(4096), SlotPlan(1, 4096))[0])
    store.close()
