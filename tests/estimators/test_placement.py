"""Placement obeys its budgets, and its plan adds up."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators import (
    Budget,
    DriveRates,
    ElementType,
    PlacementRequest,
    PlanError,
    Section,
    SegmentSpec,
    StateFormat,
    Tier,
    minimum_host_bytes,
    plan_placement,
    step_traffic,
)
from estimators.placement import in_play_bytes

PATIENT = settings(deadline=None, max_examples=50)
RATE = st.floats(1e8, 1e10)
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
        max_host_parameter_numel=draw(st.none() | st.integers(0, 200_000)),
        micro_batches=draw(st.integers(1, 4)),
        rates=draw(st.none() | st.builds(DriveRates, RATE, RATE, st.just("given"))),
    )


@PATIENT
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
            assert plan.slots.count > 0
            assert group.extent.offset == end
            assert group.extent.size_bytes <= plan.slots.size_bytes
            end += group.extent.size_bytes
    assert end == plan.swap_file_bytes
    for index, segment in enumerate(request.segments):
        numel = sum(group.numel for group in plan.by_segment[index])
        assert numel == segment.layout(request.world_size).shard_numel


@PATIENT
@given(requests())
def test_a_budget_for_everything_pages_nothing(request: PlacementRequest) -> None:
    """Records in codes are not as large as a multiple of the smallest one."""
    request = dataclasses.replace(request, max_host_parameter_numel=None)
    plan = plan_placement(request, Budget(in_play_bytes(request)))
    assert plan.swap_file_bytes == plan.slots.count == 0
    if Tier.DEVICE not in (request.parameter_tier, request.optimizer_tier):
        assert plan.host_bytes == in_play_bytes(request)


@PATIENT
@given(requests(), st.integers(0, 4_000_000), st.integers(1, 4))
def test_a_refusal_names_the_smallest_budget_that_works(
    request: PlacementRequest, host: int, ranks: int
) -> None:
    """The named budget works, one byte less does not; a node's number is a multiple of a rank's."""
    try:
        plan = plan_placement(request, Budget(host, ranks=ranks))
    except PlanError as error:
        assert error.needed_bytes == minimum_host_bytes(request) > host
        node = int(str(error).split("at least ")[1].split(",")[0].split()[0])
        assert node == error.needed_bytes * ranks
    else:
        assert minimum_host_bytes(request) <= plan.host_budget_bytes
    needed = minimum_host_bytes(request)
    assert plan_placement(request, Budget(needed)).host_bytes <= needed
    if needed:
        with pytest.raises(PlanError):
            plan_placement(request, Budget(needed - 1))


@PATIENT
@given(requests(), st.integers(0, 4_000_000))
def test_capacities_named_in_a_refusal_are_exact(request: PlacementRequest, more: int) -> None:
    host = minimum_host_bytes(request) + more
    plan = plan_placement(request, Budget(host))
    for size, budget in (
        (plan.swap_file_bytes, lambda each: Budget(host, nvme_bytes=each)),
        (plan.device_bytes, lambda each: Budget(host, device_bytes=each)),
    ):
        assert plan_placement(request, budget(size)).host_bytes == plan.host_bytes
        if size:
            with pytest.raises(PlanError, match=f"at least {size}") as caught:
                plan_placement(request, budget(size - 1))
            assert caught.value.needed_bytes == size


@PATIENT
@given(requests(), st.integers(0, 4_000_000))
def test_the_budget_is_used_to_the_page(request: PlacementRequest, more: int) -> None:
    """What is left, where something pages, is less than the next 64 elements of anything."""
    request = dataclasses.replace(request, max_host_parameter_numel=None)
    plan = plan_placement(request, Budget(minimum_host_bytes(request) + more))
    if not plan.swap_file_bytes:
        return
    left = plan.host_budget_bytes - plan.host_bytes
    assert left < 64 * 12 + 2 * 4096, (left, plan.slots)


@PATIENT
@given(requests(), st.integers(0, 2_000_000), st.integers(1, 2_000_000))
def test_more_host_memory_never_rests_less_in_it(
    request: PlacementRequest, host: int, more: int
) -> None:
    host += minimum_host_bytes(request)
    less, rich = (plan_placement(request, Budget(each)) for each in (host, host + more))
    in_less, in_rich = (plan.host_bytes - plan.slots.total_bytes for plan in (less, rich))
    assert in_rich >= in_less - rich.slots.total_bytes - 3 * 4096 * len(request.segments)
    everything = plan_placement(request, Budget(host + (1 << 30)))
    if request.max_host_parameter_numel is None:
        assert everything.swap_file_bytes == step_traffic(everything, 2).total_read_bytes == 0


def test_traffic_falls_linearly_with_what_is_not_resident() -> None:
    """180 MB of state and gradients in budgets from a quarter to all of it: no cliff anywhere."""
    request = PlacementRequest(
        tuple(
            SegmentSpec(f"u{i}", i, ("w",), (1 << 18,), ElementType.FP32, trainable=True,
                        param_group=0)
            for i in range(60)
        ),
        1, Tier.DEVICE, Tier.NVME, StateFormat.EXACT, 1 << 30, 4096,
    )  # fmt: skip
    whole = in_play_bytes(request)
    points = []
    for quarter in range(4, 17):
        plan = plan_placement(request, Budget(whole * quarter // 16))
        traffic = step_traffic(plan, 1)
        moved = traffic.total_read_bytes + traffic.total_written_bytes
        points.append((plan.swap_file_bytes, moved))
    assert points[-1] == (0, 0)
    for (swap, moved), (next_swap, next_moved) in itertools.pairwise(points):
        assert next_swap < swap
        assert moved - next_moved == 2 * (swap - next_swap)
    steps = [a - b for (a, _), (b, _) in itertools.pairwise(points[:-1])]
    assert max(steps) <= 1.35 * min(steps)
    assert points[-2][0] <= 3 * whole // 16  # the last step: slots are a small share of what pages


def test_what_saves_most_time_per_byte_is_pinned_first() -> None:
    def resident(rates: DriveRates, micro_batches: int) -> dict[Section, float]:
        request = PlacementRequest(
            one_segment(1 << 20), 1, Tier.NVME, Tier.NVME, StateFormat.EXACT, 1 << 16, 4096,
            micro_batches=micro_batches, rates=rates,
        )  # fmt: skip
        plan = plan_placement(request, Budget(9 << 20))
        whole = {Section.PARAMETER: 4 << 20, Section.GRADIENT: 4 << 20, Section.STATE: 8 << 20}
        return {
            section: plan.resident_section_bytes(Tier.HOST, section) / size
            for section, size in whole.items()
        }

    even = resident(DriveRates(1e9, 1e9, "given"), 1)
    assert even[Section.PARAMETER] == 1.0  # three reads and a write, others one of each
    slow_writes = resident(DriveRates(4e9, 0.2e9, "given"), 4)
    assert slow_writes[Section.GRADIENT] == 1.0  # four writes a step, a parameter has one
    assert slow_writes[Section.PARAMETER] < 1.0
    assert slow_writes[Section.PARAMETER] + slow_writes[Section.STATE] > 0


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
    with pytest.raises(PlanError, match=r"gives this rank 1000 bytes.*needs \d+"):
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
    assert resident == {0: 0, 10_000: 9_984, 130_000: 129_984, None: 192_000}[cap]
    assert (plan.swap_file_bytes > 0) == (cap is not None)
    assert plan.resident_section_bytes(Tier.HOST, Section.STATE) > 0
