"""Placement obeys its budgets, and its plan adds up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators import (
    Budget,
    ElementType,
    PlacementRequest,
    PlanError,
    Section,
    SegmentSpec,
    StateFormat,
    Tier,
    plan_placement,
    step_traffic,
)

TIERS = st.sampled_from(list(Tier))


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    count = draw(st.integers(1, 4))
    segments = []
    for index in range(count):
        numels = tuple(draw(st.lists(st.integers(0, 60_000), min_size=1, max_size=3)))
        segments.append(
            SegmentSpec(
                unit=f"unit{index}",
                unit_index=index,
                names=tuple(map(str, range(len(numels)))),
                numels=numels,
                element=draw(st.sampled_from([ElementType.FP32, ElementType.BF16])),
                trainable=draw(st.booleans()),
                param_group=0,
            )
        )
    return PlacementRequest(
        segments=tuple(segments),
        world_size=draw(st.sampled_from([1, 2, 3])),
        parameter_tier=draw(TIERS),
        optimizer_tier=draw(TIERS),
        state_format=draw(st.sampled_from(list(StateFormat))),
        sub_group_numel=draw(st.integers(64, 100_000)),
        alignment_bytes=4096,
        trains=draw(st.booleans()),
    )


@given(requests(), st.integers(0, 4_000_000))
def test_a_plan_stays_within_its_budget_and_tiers(request: PlacementRequest, host: int) -> None:
    try:
        plan = plan_placement(request, Budget(host))
    except PlanError:
        return
    assert plan.host_bytes <= host
    allowed = {
        Section.PARAMETER: request.parameter_tier,
        Section.GRADIENT: request.optimizer_tier,
        Section.STATE: request.optimizer_tier,
    }
    order = [Tier.DEVICE, Tier.HOST, Tier.NVME]
    end = 0
    for group in plan.sub_groups:
        assert 0 < group.numel <= max(request.sub_group_numel, 64)
        for section, tier in group.tiers:
            assert order.index(tier) <= order.index(allowed[section])
            assert (tier is Tier.DEVICE) == (allowed[section] is Tier.DEVICE)
        if group.extent is not None:
            assert group.extent.offset == end
            assert group.extent.size_bytes <= plan.slots.size_bytes
            end += group.extent.size_bytes
    assert end == plan.swap_file_bytes
    for index, segment in enumerate(request.segments):
        numel = sum(group.numel for group in plan.by_segment[index])
        assert numel == segment.layout(request.world_size).shard_numel


@given(requests(), st.integers(0, 2_000_000), st.integers(0, 2_000_000))
def test_more_host_memory_never_moves_more_bytes(
    request: PlacementRequest, host: int, more: int
) -> None:
    try:
        plan = plan_placement(request, Budget(host))
    except PlanError:
        return
    everything = plan_placement(request, Budget(host + more + (1 << 30)))
    assert everything.swap_file_bytes == 0
    assert step_traffic(everything, 2).total_read_bytes == 0
    assert step_traffic(plan, 2).total_read_bytes >= 0


def one_segment(numel: int = 100_000) -> tuple[SegmentSpec, ...]:
    return (
        SegmentSpec("unit", 0, ("w",), (numel,), ElementType.FP32, trainable=True, param_group=0),
    )


def test_too_little_host_memory_is_refused_with_numbers() -> None:
    request = PlacementRequest(
        one_segment(), 1, Tier.NVME, Tier.NVME, StateFormat.EXACT, 1 << 20, 4096
    )
    with pytest.raises(PlanError, match=r"host_memory gives this rank 8000 bytes.*at least 1"):
        plan_placement(request, Budget(8000))


def test_cpu_offload_beyond_the_budget_is_refused_with_numbers() -> None:
    request = PlacementRequest(
        one_segment(), 1, Tier.DEVICE, Tier.HOST, StateFormat.EXACT, 1 << 20, 4096
    )
    with pytest.raises(PlanError, match=r"needs \d+ bytes.*leaves 1000"):
        plan_placement(request, Budget(1000))


def test_nvme_and_device_capacities_are_limits() -> None:
    request = PlacementRequest(
        one_segment(), 1, Tier.NVME, Tier.NVME, StateFormat.EXACT, 1 << 20, 4096
    )
    with pytest.raises(PlanError, match="bytes of NVMe a rank"):
        plan_placement(request, Budget(1 << 18, nvme_bytes=4096))
    with pytest.raises(PlanError, match="bytes of device memory a rank"):
        plan_placement(request, Budget(1 << 18, device_bytes=4096))
    with pytest.raises(PlanError, match="sub_group_size must be at least 64"):
        plan_placement(
            PlacementRequest(one_segment(), 1, Tier.NVME, Tier.NVME, StateFormat.EXACT, 1, 4096),
            Budget(1 << 18),
        )


def test_a_parameter_larger_than_a_slot_is_cut() -> None:
    request = PlacementRequest(
        one_segment(1_000_000), 1, Tier.NVME, Tier.NVME, StateFormat.EXACT, 1 << 30, 4096
    )
    plan = plan_placement(request, Budget(100_000))
    assert plan.slots.count >= 1
    assert len(plan.sub_groups) > 10
    assert max(group.numel for group in plan.sub_groups) * 16 <= plan.slots.size_bytes


@pytest.mark.parametrize("cap", [0, 10_000, 130_000, None])
def test_a_cap_on_resident_parameters_wins_over_the_budget(cap: int | None) -> None:
    segments = tuple(
        SegmentSpec(f"u{i}", i, ("w",), (64_000,), ElementType.FP32, trainable=True, param_group=0)
        for i in range(3)
    )
    request = PlacementRequest(
        segments,
        1,
        Tier.NVME,
        Tier.NVME,
        StateFormat.EXACT,
        1 << 20,
        4096,
        max_host_parameter_numel=cap,
    )
    plan = plan_placement(request, Budget(1 << 30))
    resident = sum(
        group.numel for group in plan.sub_groups if group.tier(Section.PARAMETER) is Tier.HOST
    )
    assert resident == {0: 0, 10_000: 0, 130_000: 128_000, None: 192_000}[cap]
    assert (plan.swap_file_bytes > 0) == (cap is not None)
    assert plan.resident_section_bytes(Tier.HOST, Section.STATE) > 0
