"""Plans beside a device with memory of its own."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators import (
    LIVE_LIMIT,
    PREFETCH_LIMIT,
    AheadLimit,
    Budget,
    ElementType,
    MemoryPlan,
    PlacementRequest,
    Section,
    SegmentSpec,
    StateFormat,
    Tier,
    plan_placement,
)
from estimators.placement import PlanError
from estimators.records import DEVICE_BUFFER_COUNT, STAGED_BYTES, WHOLE_BYTES, section_bytes

MILLION = 1_000_000
GB = 1_000_000_000


def request(
    parameters: Tier = Tier.DEVICE, optimizer: Tier = Tier.HOST, *, update_on_device: bool = True
) -> PlacementRequest:
    segments = tuple(
        SegmentSpec(
            unit=f"unit{index}",
            unit_index=index,
            names=(f"unit{index}.weight",),
            numels=(numel,),
            element=ElementType.BF16,
            trainable=True,
            param_group=0,
        )
        for index, numel in enumerate((2 * MILLION, 20 * MILLION, 20 * MILLION, 20 * MILLION))
    )
    return PlacementRequest(
        segments,
        1,
        parameters,
        optimizer,
        StateFormat.EXACT,
        GB,
        4096,
        device_is_host=False,
        update_on_device=update_on_device,
    )


def tiers(plan: MemoryPlan, section: Section) -> list[Tier | None]:
    return [plan.segment_tier(index, section) for index in range(len(plan.request.segments))]


@pytest.mark.parametrize("parameters", [Tier.DEVICE, Tier.HOST])
def test_what_a_device_updates_fits_a_buffer_and_fills_it(parameters: Tier) -> None:
    plan = plan_placement(request(parameters), Budget(GB))
    assert len(plan.by_segment[1]) > 1
    assert 0.7 * STAGED_BYTES < plan.device_buffer_bytes <= STAGED_BYTES
    largest = max(group.numel for group in plan.sub_groups)
    line_bytes = 2 + 10 + (2 if parameters is Tier.HOST else 0)  # gradient, state, parameter
    assert largest * line_bytes <= STAGED_BYTES < 2 * largest * line_bytes


def test_what_the_host_updates_for_a_device_fits_its_staging() -> None:
    plan = plan_placement(request(update_on_device=False), Budget(GB))
    assert 0 < plan.staging_bytes <= STAGED_BYTES


@pytest.mark.parametrize(
    ("tier", "update_on_device"), [(Tier.DEVICE, True), (Tier.HOST, False), (Tier.NVME, False)]
)
def test_what_does_not_pass_is_cut_for_those_who_copy_it_whole(
    *, tier: Tier, update_on_device: bool
) -> None:
    """A save has a copy of one sub-group in host memory, which no plan counts."""
    asked = request(tier, tier, update_on_device=update_on_device)
    segments = (asked.segments[0], dataclasses.replace(asked.segments[1], numels=(GB,)))
    plan = plan_placement(dataclasses.replace(asked, segments=segments), Budget(20 * GB))
    sizes = [
        sum(section_bytes(plan.request, segments[each.segment], each.numel).values())
        for each in plan.sub_groups
    ]
    assert len(plan.by_segment[0]) == 1
    assert STAGED_BYTES < max(sizes) <= WHOLE_BYTES


def test_what_rests_on_the_host_is_not_used_in_place() -> None:
    there, elsewhere = request(Tier.DEVICE), request(Tier.HOST)
    assert all(plan_placement(there, Budget(GB)).is_in_place(index) for index in range(4))
    plan = plan_placement(elsewhere, Budget(GB))
    assert not any(plan.is_in_place(index) for index in range(4))
    # The root, the unit that computes, the one before and the one that is copied in.
    assert plan.live_parameter_bytes == pytest.approx(2 * 62 * MILLION, rel=0.001)
    written = dataclasses.replace(elsewhere, prefetch_limit=AheadLimit(19 * MILLION))
    none_ahead = plan_placement(written, Budget(GB)).live_parameter_bytes
    assert none_ahead == pytest.approx(2 * 42 * MILLION, rel=0.001)
    on_host = dataclasses.replace(elsewhere, device_is_host=True, update_on_device=False)
    assert plan_placement(on_host, Budget(GB)).live_parameter_bytes == 0


def test_a_limit_that_nobody_wrote_lets_one_unit_come_ahead() -> None:
    """A model of 8 B: its blocks and its root are larger than the defaults."""
    sizes = (1_050 * MILLION, *[218 * MILLION] * 4)
    segments = tuple(
        dataclasses.replace(each, unit_index=index, numels=(numel,), unit=f"unit{index}")
        for index, (each, numel) in enumerate(zip(request().segments * 2, sizes, strict=False))
    )
    asked = dataclasses.replace(request(Tier.HOST), segments=segments)
    ahead = 2 * (1_050 + 3 * 218) * MILLION
    for limits, units in (
        ((PREFETCH_LIMIT, LIVE_LIMIT), 3),
        ((AheadLimit(PREFETCH_LIMIT.numel), LIVE_LIMIT), 2),
        ((PREFETCH_LIMIT, AheadLimit(LIVE_LIMIT.numel)), 2),
    ):
        given = dataclasses.replace(asked, prefetch_limit=limits[0], live_limit=limits[1])
        plan = plan_placement(given, Budget(100 * GB))
        expected = ahead - 2 * (3 - units) * 218 * MILLION
        assert plan.live_parameter_bytes == pytest.approx(expected, rel=0.001)
        raised = tuple(not limit.is_written for limit in limits)
        assert plan.ahead_limits == (
            218 * MILLION if raised[0] else 50 * MILLION,
            (1_050 + 3 * 218) * MILLION if raised[1] else GB,
        )
    small = plan_placement(
        dataclasses.replace(request(Tier.HOST), prefetch_limit=PREFETCH_LIMIT), Budget(GB)
    )
    assert small.ahead_limits[0] == 50 * MILLION


def test_an_update_by_the_processor_is_staged_in_the_host_budget() -> None:
    by_processor = request(Tier.DEVICE, Tier.DEVICE, update_on_device=False)
    plan = plan_placement(by_processor, Budget(GB))
    assert plan.host_bytes == plan.staging_bytes > 0
    assert plan.device_buffer_bytes == 0
    with pytest.raises(PlanError, match="host_memory gives this rank 1000 bytes"):
        plan_placement(by_processor, Budget(1000))
    assert plan_placement(request(Tier.DEVICE, Tier.DEVICE), Budget(1000)).host_bytes == 0


@pytest.mark.parametrize("spare", [0, 100 * MILLION, 200 * MILLION, GB])
def test_spare_device_memory_is_spent_and_never_exceeded(spare: int) -> None:
    asked = request(Tier.HOST, Tier.NVME)
    least = plan_placement(asked, Budget(300 * MILLION)).device_bytes
    plan = plan_placement(asked, Budget(300 * MILLION, least + spare))
    assert plan.device_bytes <= least + spare
    found = [tier for section in Section for tier in tiers(plan, section)]
    assert (Tier.DEVICE in found) == (spare > 0)
    if spare == GB:
        assert set(found) == {Tier.DEVICE}
        assert plan.swap_file_bytes == 0
    unknown = plan_placement(asked, Budget(300 * MILLION))
    assert Tier.DEVICE not in [tier for section in Section for tier in tiers(unknown, section)]


@given(
    st.sampled_from([(Tier.DEVICE, Tier.HOST), (Tier.DEVICE, Tier.NVME), (Tier.HOST, Tier.NVME)]),
    st.sampled_from(list(StateFormat)),
    st.integers(0, 900 * MILLION),
    st.integers(200 * MILLION, GB),
)
@settings(max_examples=60, deadline=None)
def test_what_is_left_of_a_device_holds_no_state_of_a_sub_group(
    lowest: tuple[Tier, Tier], state_format: StateFormat, spare: int, host: int
) -> None:
    """Parameters and gradients move up by whole segments, state by sub-groups."""
    asked = dataclasses.replace(request(*lowest), state_format=state_format)
    least = plan_placement(asked, Budget(GB)).device_bytes
    plan = plan_placement(asked, Budget(GB if lowest[1] is Tier.HOST else host, least + spare))
    left = least + spare - plan.device_bytes
    assert left >= 0
    for index in range(len(asked.segments)):
        for section in (Section.GRADIENT, Section.PARAMETER):
            found = {group.tier(section) for group in plan.by_segment[index]}
            assert Tier.DEVICE not in found or found == {Tier.DEVICE}
        on_device = [group.tier(Section.STATE) is Tier.DEVICE for group in plan.by_segment[index]]
        assert on_device == sorted(on_device, reverse=True)
    elsewhere = [each for each in plan.sub_groups if each.tier(Section.STATE) is not Tier.DEVICE]
    sections = [
        section_bytes(asked, asked.segments[group.segment], group.numel)[section]
        for group in elsewhere
        for section in Section
        if group.tier(section) is not Tier.DEVICE
    ]
    if lowest[0] is Tier.DEVICE and elsewhere:
        assert left < max(2 * max(sections), (least + spare) / 100)


def test_buffers_of_the_update_count_where_they_are_the_peak() -> None:
    small = request(Tier.DEVICE, Tier.HOST)
    plan = plan_placement(small, Budget(GB))
    resident = plan.resident_section_bytes(Tier.DEVICE, Section.PARAMETER)
    passing = max(plan.gradient_scratch_bytes, DEVICE_BUFFER_COUNT * plan.device_buffer_bytes)
    assert plan.device_bytes == resident + passing


@pytest.mark.parametrize("spare", [10 * MILLION, 20 * MILLION, 30 * MILLION])
def test_what_moves_up_leaves_copies_of_a_durable_run_room_on_a_drive(spare: int) -> None:
    asked = request(Tier.DEVICE, Tier.NVME)
    asked = dataclasses.replace(asked, durable=True, sub_group_numel=MILLION)
    least = plan_placement(asked, Budget(GB))
    budget = Budget(GB, least.device_bytes + spare, least.swap_file_bytes)
    plan = plan_placement(asked, budget)
    assert plan.swap_file_bytes <= least.swap_file_bytes
    assert Tier.DEVICE in {group.tier(Section.GRADIENT) for group in plan.sub_groups}
