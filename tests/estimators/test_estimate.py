"""Properties of the whole answer: it adds up, grows with what is asked, and shrinks with ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators import (
    DriveRates,
    ElementType,
    PlanError,
    Section,
    StateFormat,
    Tier,
    shard_bounds,
)
from estimators.activations import Batch
from estimators.estimate import CUDA_WORKSPACE_BYTES, Estimate, estimate
from estimators.fit import with_layers
from estimators.hardware import bandwidths_of, parse_gpu
from estimators.inputs import DeviceKind, Node, PlanInputs, placement_request
from estimators.models import ModelShape, model_of_config, preset
from estimators.moments import GRADIENTS
from estimators.step_time import operations
from estimators.summary import GRADIENT_SCRATCH, LIVE_PARAMETERS
from tests.support.transformers_models import VARIATIONS

TIERS = [
    (Tier.DEVICE, Tier.DEVICE),
    (Tier.HOST, Tier.HOST),
    (Tier.DEVICE, Tier.NVME),
    (Tier.NVME, Tier.NVME),
]
MODELS = sorted(VARIATIONS)


def make(name: str, tiers: tuple[Tier, Tier], **changes: Any) -> PlanInputs:
    """Return inputs with a host budget of a quarter of what may rest there."""
    model = model_of_config(VARIATIONS[name])
    node = Node(gpus=changes.pop("gpus", 1), count=changes.pop("nodes", 1))
    inputs = PlanInputs(model, node, parameter_tier=tiers[0], optimizer_tier=tiers[1], **changes)
    budget = 200_000 * node.gpus if Tier.NVME in tiers else None
    return replace(inputs, node=replace(node, host_bytes=budget))


def all_tiers_bytes(found: Estimate) -> dict[Section, int]:
    """Return the bytes of each section of one rank, wherever it rests."""
    memory = found.memory
    return {
        section: sum(
            memory.resident_section_bytes(tier, section) for tier in (Tier.DEVICE, Tier.HOST)
        )
        + memory.nvme_section_bytes(section)
        for section in Section
    }


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(TIERS),
    st.sampled_from(StateFormat),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_shards_tile_and_every_byte_rests_somewhere(
    name: str, tiers: tuple[Tier, Tier], state_format: StateFormat, gpus: int, nodes: int
) -> None:
    inputs = make(name, tiers, state_format=state_format, gpus=gpus, nodes=nodes)
    found = estimate(inputs)
    world_size = gpus * nodes
    assert sum(sum(spec.numels) for spec in found.memory.request.segments) == inputs.model.numel
    for index, spec in enumerate(found.memory.request.segments):
        layout = spec.layout(world_size)
        bounds = [shard_bounds(layout, rank) for rank in range(world_size)]
        assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
        assert (bounds[0][0], bounds[-1][1]) == (0, layout.padded_numel)
        groups = found.memory.by_segment[index]
        assert [group.stop for group in groups[:-1]] == [group.start for group in groups[1:]]
        assert (groups[0].start, groups[-1].stop) == (0, layout.shard_numel)
    sizes = all_tiers_bytes(found)
    assert sizes[Section.PARAMETER] * world_size >= 2 * inputs.model.numel
    assert sizes[Section.GRADIENT] * world_size >= 2 * inputs.model.numel


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    tiers=st.sampled_from(TIERS),
    gpus=st.integers(1, 4),
    samples=st.integers(1, 4),
    sequence=st.integers(1, 300),
    checkpointing=st.booleans(),
)
def test_a_longer_batch_and_a_deeper_model_take_no_less(
    name: str,
    tiers: tuple[Tier, Tier],
    gpus: int,
    samples: int,
    sequence: int,
    *,
    checkpointing: bool,
) -> None:
    batch = Batch(samples, sequence, checkpointing=checkpointing)
    inputs = make(name, tiers, gpus=gpus, batch=batch)
    here = estimate(inputs)
    for changed in (
        replace(inputs, batch=replace(batch, samples=samples + 1)),
        replace(inputs, batch=replace(batch, sequence=sequence + 1)),
        replace(inputs, model=with_layers(inputs.model, 2.0)),
        replace(inputs, accumulation_steps=2),
    ):
        more = estimate(changed)
        assert more.tensor_bytes >= here.tensor_bytes
        assert more.nvme_bytes >= here.nvme_bytes
        assert more.time.lower_bound >= here.time.lower_bound
        assert more.time.expected >= here.time.expected
        assert more.traffic.total_written_bytes >= here.traffic.total_written_bytes


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(TIERS[:2]), st.integers(1, 6))
def test_more_ranks_take_no_more_each(name: str, tiers: tuple[Tier, Tier], gpus: int) -> None:
    """A shard is padded to whole cache lines for each rank, so it may grow by that."""
    one = all_tiers_bytes(estimate(make(name, tiers, gpus=gpus)))
    two = all_tiers_bytes(estimate(make(name, tiers, gpus=gpus + 1)))
    segments = len(placement_request(make(name, tiers)).segments)
    for section, size in two.items():
        assert size <= one[section] + segments * (64 * 12 + 4096)


@pytest.mark.parametrize("name", MODELS)
def test_with_enough_host_memory_nothing_is_read(name: str) -> None:
    inputs = make(name, TIERS[3])
    paged = estimate(inputs)
    node = replace(inputs.node, host_bytes=50 * inputs.model.numel)
    resident = estimate(replace(inputs, node=node))
    assert paged.traffic.total_read_bytes > 0
    assert resident.traffic.total_read_bytes == resident.nvme_bytes == resident.time.drive == 0


def ten_trillion() -> ModelShape:
    """Return a Llama of ten trillion parameters."""
    config = {
        "model_type": "llama", "hidden_size": 65536, "intermediate_size": 262144,
        "num_hidden_layers": 146, "num_attention_heads": 512, "num_key_value_heads": 512,
        "vocab_size": 256000,
    }  # fmt: skip
    return model_of_config(config)


@pytest.mark.parametrize("tiers", TIERS)
def test_ten_trillion_parameters_on_ten_thousand_gpus(tiers: tuple[Tier, Tier]) -> None:
    model = ten_trillion()
    assert model.numel > 10**13
    node = Node(gpus=8, count=1250, host_bytes=2 * 10**12, nvme_bytes=10**14)
    inputs = PlanInputs(
        model, node, Batch(64, 1 << 20), parameter_tier=tiers[0], optimizer_tier=tiers[1]
    )
    found = estimate(inputs)
    sizes = all_tiers_bytes(found)
    assert sizes[Section.PARAMETER] == pytest.approx(2 * model.numel / 10_000, rel=0.01)
    assert sizes[Section.STATE] == pytest.approx(10 * model.numel / 10_000, rel=0.01)
    assert found.tensor_bytes > 10**13  # 64 samples of a million tokens
    assert found.tokens_per_step == 64 * (1 << 20) * 10_000
    assert all(isinstance(line.size_bytes, int) and line.size_bytes > 0 for line in found.lines())
    assert 0 < found.time.lower_bound < float("inf")


def test_lines_of_a_tier_add_up_to_what_it_holds_at_its_peak() -> None:
    gpu = parse_gpu("24GB")
    node = Node(
        device_bytes=gpu.memory_bytes,
        host_bytes=50 * 10**9,
        nvme_bytes=10**12,
        bandwidths=bandwidths_of(gpu),
    )
    for checkpointing, accumulation in ((False, 1), (True, 1), (True, 4)):
        for tiers in TIERS:
            batch = Batch(2, 1024, checkpointing=checkpointing)
            found = estimate(
                PlanInputs(
                    preset("llama-3.2-3b"),
                    node,
                    batch,
                    accumulation,
                    parameter_tier=tiers[0],
                    optimizer_tier=tiers[1],
                )
            )
            sums = dict.fromkeys(Tier, 0)
            for line in found.lines():
                sums[line.tier] += line.size_bytes if line.at_peak else 0
            assert sums[Tier.DEVICE] == found.device_bytes
            assert sums[Tier.HOST] == found.host_bytes
            assert sums[Tier.NVME] == found.nvme_bytes


def test_on_the_cpu_the_device_is_host_memory() -> None:
    inputs = make("mistral", TIERS[1])
    cuda = estimate(inputs)
    cpu = estimate(replace(inputs, node=replace(inputs.node, device=DeviceKind.CPU)))
    assert cpu.host_bytes == cpu.memory.host_bytes + cpu.device_bytes + (420 << 20)
    assert cpu.device_bytes < cuda.device_bytes
    assert {line.what for line in cuda.lines()} - {line.what for line in cpu.lines()} >= {
        "CUDA context",
        "allocator slack (5%)",
    }


@pytest.mark.parametrize("device", DeviceKind)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation_steps": 2},
        {"gradient_element": ElementType.FP32},
        {"gpus": 2, "stage": 2},
    ],
    ids=["autograd's own", "of earlier micro-batches", "another type", "two ranks"],
)
def test_gradients_are_there_at_the_loss_unless_autograd_is_yet_to_make_them(
    changes: dict[str, Any], device: DeviceKind
) -> None:
    inputs = make("mistral", (Tier.DEVICE, Tier.DEVICE), **changes)
    found = estimate(replace(inputs, node=replace(inputs.node, device=device)))
    gradients = found.memory.resident_section_bytes(Tier.DEVICE, Section.GRADIENT)
    others = found.moved.device_resident_bytes - gradients
    passing = {what for parts in found.passing.values() for what in parts}
    stays = "gradient_element" not in changes and "gpus" not in changes
    assert found.keeps_gradients is stays
    assert (GRADIENT_SCRATCH in passing) is not stays
    workspace = CUDA_WORKSPACE_BYTES if device is DeviceKind.CUDA else 0
    always = found.tensor_bytes - max(found.moments.values()) - workspace
    assert gradients > 0
    at_the_loss = found.passing["loss"].get(GRADIENTS, 0)
    assert always + at_the_loss == others + (gradients if changes else 0)


@pytest.mark.parametrize("pages", [False, True])
def test_blocks_that_are_kept_count_until_their_backward(*, pages: bool) -> None:
    """Three are there at the loss and when the last one's backward begins, if a drive has them."""
    tiers = (Tier.NVME, Tier.NVME) if pages else (Tier.HOST, Tier.HOST)
    inputs = make("mistral", tiers, max_host_parameter_numel=0 if pages else None)
    inputs = replace(inputs, model=with_layers(inputs.model, 5))
    found = estimate(replace(inputs, node=replace(inputs.node, device=DeviceKind.CUDA)))
    live = {moment: parts.get(LIVE_PARAMETERS) for moment, parts in found.passing.items()}
    root, two, three = (found.memory.live_bytes(each, with_ahead=False) for each in (0, 2, 3))
    assert 0 < root < two < three
    assert live["loss"] == (three if pages else root)
    assert live["backward"] == (three if pages else two)
    assert live["backward between blocks"] == three


def test_what_does_not_fit_is_said_with_numbers() -> None:
    inputs = make("mistral", TIERS[3])
    node = replace(inputs.node, device_bytes=1 << 20, nvme_bytes=4096)
    found = estimate(replace(inputs, node=node))
    device, nvme = found.problems()
    assert f"each GPU needs {found.device_bytes} bytes at its peak" in device
    assert f"need {found.nvme_bytes} bytes, its drives have 4096" in nvme
    with pytest.raises(PlanError, match=r"set tiers\.host_memory to at least"):
        estimate(replace(inputs, node=replace(node, host_bytes=1000)))


def test_operations_are_six_for_each_parameter_and_token() -> None:
    model = preset("llama-3-8b")
    found = operations(PlanInputs(model, batch=Batch(2, 1024)))
    assert found is not None
    table = 128256 * 4096
    assert found.matmul == pytest.approx(6 * 2048 * (model.numel - table), rel=1e-4)
    assert found.attention == 3 * 2048 * 32 * 4 * 4096 * 1025 / 2
    assert found.recomputed == 0
    again = operations(PlanInputs(model, batch=Batch(2, 1024, checkpointing=True)))
    assert again is not None
    assert again.recomputed == pytest.approx(
        2 * 2048 * (model.numel - 2 * table) + found.attention / 3, rel=1e-4
    )
    routed = operations(PlanInputs(preset("mixtral-8x7b"), batch=Batch(2, 1024)))
    assert routed is not None
    assert routed.matmul < 6 * 2048 * preset("mixtral-8x7b").numel / 3


def test_the_binding_resource_is_named() -> None:
    inputs = make("mistral", TIERS[3], batch=Batch(1, 8))
    slow = replace(bandwidths_of(None), drive=DriveRates(1e6, 5e5, "given"))
    found = estimate(replace(inputs, node=replace(inputs.node, bandwidths=slow)))
    read, written = found.traffic.total_read_bytes, found.traffic.total_written_bytes
    assert read > 0
    assert found.time.binding == "drive"
    kept = read + round(written * 2 - found.time.lower_bound * 1e6)  # from one use to the next
    assert 0 < kept <= found.traffic.read_bytes[Section.PARAMETER] // 2
    read -= kept
    assert found.time.lower_bound == pytest.approx(read / 1e6 + written / 5e5)
    assert found.time.expected >= found.time.lower_bound
    mixed = replace(slow, mixed_bytes_per_s=2e6)
    faster = estimate(replace(inputs, node=replace(inputs.node, bandwidths=mixed))).time.drive
    both = min(read, written)
    assert faster == pytest.approx(2 * both / 2e6 + (read - both) / 1e6 + (written - both) / 5e5)
    wide = replace(inputs, batch=Batch(512, 2048))
    assert estimate(wide).time.binding == "compute"


def test_wear_is_what_is_written_a_day() -> None:
    inputs = make("mistral", TIERS[3])
    node = replace(inputs.node, nvme_bytes=10**9, rated_written_bytes=6e11)
    found = estimate(replace(inputs, node=node))
    written = found.traffic.total_written_bytes
    assert found.wear.written_bytes_per_step == written > 0
    per_day = written * 86_400 / found.time.expected
    assert found.wear.drive_writes_per_day == pytest.approx(per_day / 1e9)
    assert found.wear.steps_until_worn == pytest.approx(6e11 / written)
    assert found.wear.days_until_worn == pytest.approx(6e11 / per_day)
    resident = estimate(replace(inputs, node=replace(node, host_bytes=10**9))).wear
    assert resident.written_bytes_per_step == 0
    assert resident.steps_until_worn is None


def test_fp32_parameters_are_their_own_master() -> None:
    wide = all_tiers_bytes(estimate(make("mistral", TIERS[1], element=ElementType.FP32)))
    numel = model_of_config(VARIATIONS["mistral"]).numel
    assert wide[Section.STATE] == pytest.approx(8 * numel, rel=0.1)
    assert wide[Section.PARAMETER] == pytest.approx(4 * numel, rel=0.1)
