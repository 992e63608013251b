"""What fits, fastest first; the largest model; what more would buy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators import StateFormat, Tier
from estimators.estimate import estimate
from estimators.fit import (
    EXACT_FORMATS,
    Wanted,
    budget_of,
    choices,
    deepest,
    fits,
    largest_preset,
    nearest_problem,
    purchases,
    with_layers,
)
from estimators.hardware import bandwidths_of, parse_gpu
from estimators.inputs import DeviceKind, Node, PlanInputs
from estimators.models import model_of_config, preset
from tests.support.transformers_models import VARIATIONS

GB = 10**9


def machine(gpu: str = "24GB", host: int = 64, nvme: int = 1000, gpus: int = 1) -> Node:
    found = parse_gpu(gpu)
    return Node(
        gpus=gpus,
        device_bytes=found.memory_bytes,
        host_bytes=budget_of(host * GB, gpus),
        nvme_bytes=nvme * GB,
        bandwidths=bandwidths_of(found),
    )


def test_an_8b_model_on_a_24_gb_gpu() -> None:
    found = choices(preset("llama-3-8b"), machine(), Wanted(2048))
    assert found
    paces = [choice.tokens_per_second for choice in found]
    assert paces == sorted(paces, reverse=True)
    for choice in found:
        assert choice.estimate.problems() == []
        assert choice.estimate.device_bytes <= 24 * GB
        assert choice.estimate.memory.host_bytes <= budget_of(64 * GB, 1)
        assert choice.inputs.optimizer_tier is Tier.NVME  # 80 GB of state do not fit into RAM
        assert choice.inputs.state_format in EXACT_FORMATS


def test_enough_memory_needs_no_offload() -> None:
    best = choices(preset("gpt2"), machine("h100", host=256), Wanted(1024))[0].inputs
    assert (best.parameter_tier, best.optimizer_tier) == (Tier.DEVICE, Tier.DEVICE)


def test_without_drives_nothing_pages() -> None:
    found = choices(preset("llama-3.2-3b"), machine(nvme=0), Wanted(1024))
    assert found
    assert all(Tier.NVME not in (each.inputs.parameter_tier, each.inputs.optimizer_tier)
               for each in found)  # fmt: skip


def test_what_is_asked_for_is_kept() -> None:
    wanted = Wanted(512, samples=3, train_batch_size=12, formats=(StateFormat.FP32,))
    found = choices(preset("llama-3.2-1b"), machine(gpus=2, host=256), wanted)
    assert found
    for choice in found:
        inputs = choice.inputs
        assert (inputs.batch.samples, inputs.accumulation_steps) == (3, 2)
        assert inputs.state_format is StateFormat.FP32
        assert choice.estimate.tokens_per_step == 12 * 512
    uneven = replace(wanted, train_batch_size=13)
    assert choices(preset("llama-3.2-1b"), machine(gpus=2, host=256), uneven) == []
    assert "do not divide" in nearest_problem(preset("gpt2"), machine(host=256), uneven)


def test_what_does_not_fit_says_what_it_lacks() -> None:
    model, wanted = preset("gpt2-xl"), Wanted(1024)
    small = machine("8GB", host=4, nvme=5)
    assert choices(model, small, wanted) == []
    assert "its drives have 5000000000" in nearest_problem(model, small, wanted)
    narrow = machine("1GB", host=8, nvme=100)
    assert choices(model, narrow, wanted) == []
    assert "each GPU needs" in nearest_problem(model, narrow, wanted)
    tiny = replace(small, host_bytes=1000)
    assert "set tiers.host_memory to at least" in nearest_problem(model, tiny, wanted)


def test_on_the_cpu_all_of_it_is_in_the_budget() -> None:
    node = replace(machine(), device=DeviceKind.CPU, device_bytes=None)
    found = choices(preset("gpt2"), node, Wanted(256))
    assert found
    assert all(Tier.DEVICE not in (each.inputs.parameter_tier, each.inputs.optimizer_tier)
               for each in found)  # fmt: skip


@pytest.mark.parametrize("gigabytes", [4, 8, 16])
def test_on_the_cpu_what_a_device_would_hold_is_in_the_memory(gigabytes: int) -> None:
    memory = gigabytes * 10**9
    budget = budget_of(memory, 1)
    node = replace(
        machine(host=1, nvme=1000),
        device=DeviceKind.CPU,
        device_bytes=None,
        host_bytes=budget,
        host_memory_bytes=memory,
    )
    model = preset("gpt2-xl")
    found = choices(model, node, Wanted(1024))
    assert found and fits(model, node, Wanted(1024))
    assert all(0 < each.estimate.host_bytes <= memory for each in found)
    without = choices(model, replace(node, host_memory_bytes=None), Wanted(1024))
    assert any(each.estimate.host_bytes > memory for each in without)
    small = replace(node, host_bytes=budget_of(10**9, 1), host_memory_bytes=10**9)
    assert not choices(model, small, Wanted(1024)) and not fits(model, small, Wanted(1024))
    assert "bytes of host memory, it has 1000000000" in nearest_problem(model, small, Wanted(1024))


def test_a_budget_above_the_memory_of_a_node_does_not_fit() -> None:
    node = replace(machine(host=60, nvme=1000), host_memory_bytes=8 * 10**9)
    inputs = PlanInputs(preset("gpt2-xl"), node, parameter_tier=Tier.HOST, optimizer_tier=Tier.HOST)
    (problem,) = estimate(inputs).problems()
    assert "it has 8000000000" in problem and problem.endswith("lower tiers.host_memory")


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(VARIATIONS)), st.floats(0.2, 8))
def test_a_model_made_deeper_has_as_many_blocks(name: str, factor: float) -> None:
    model = model_of_config(VARIATIONS[name])
    changed = with_layers(model, factor)
    per_block = {block: sum(p.numel for p in model.parameters if p.block == block)
                 for block in model.blocks}  # fmt: skip
    assert len({each.name for each in changed.parameters}) == len(changed.parameters)
    if len(set(per_block.values())) == 1 and "t5" not in name:
        count = max(round(len(model.blocks) * factor), 1)
        assert len(changed.blocks) == count
        one = next(iter(per_block.values()))
        assert changed.numel == model.numel + (count - len(model.blocks)) * one
        assert sum(stack.count for stack in changed.stacks) == count


def test_the_deepest_model_fits_and_a_deeper_one_does_not() -> None:
    model = preset("gpt2")
    node = machine("8GB", host=2, nvme=12)
    wanted = Wanted(512)
    found = deepest(model, node, wanted)
    assert found is not None
    assert found.numel > 0
    assert fits(found, node, wanted)
    assert not fits(with_layers(found, 1.1), node, wanted)
    assert deepest(preset("llama-3.1-405b"), machine("12GB", host=1, nvme=1), wanted) is None


@pytest.mark.full
def test_the_largest_model_by_name() -> None:
    node = machine("12GB", host=3, nvme=10)
    found = largest_preset(node, Wanted(512))
    assert found is not None
    assert fits(found, node, Wanted(512))
    more = largest_preset(machine("24GB", host=8, nvme=30), Wanted(512))
    assert more is not None
    assert more.numel > found.numel


def test_what_more_would_buy() -> None:
    model, node, wanted = preset("llama-3.2-1b"), machine("10GB", host=12, nvme=100), Wanted(1024)
    best = choices(model, node, wanted)[0].tokens_per_second
    found = {each.what: each.best for each in purchases(model, node, wanted)}
    assert len(found) == 5
    assert best > 0
    assert all(each is not None for each in found.values())
    memory, faster = found["twice the host memory"], found["drives twice as fast"]
    larger = found["drives twice as large"]
    assert memory is not None
    assert faster is not None
    assert larger is not None
    assert memory.tokens_per_second > 1.2 * best
    assert faster.tokens_per_second > 1.2 * best
    assert larger.tokens_per_second == pytest.approx(best)
