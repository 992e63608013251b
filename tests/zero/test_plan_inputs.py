"""The estimate is the allocator's own plan: the same request, placement and bytes."""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from estimators import DriveRates, ElementType, Tier
from estimators.estimate import estimate, place
from estimators.inputs import DeviceKind, Node, PlanInputs, placement_request
from estimators.models import model_of_config
from tests.support.configs import make_config
from tests.support.tiny import TinyTransformer
from tests.support.transformers_models import VARIATIONS, build
from zero.model_functions import shape_of
from zero.plan_command import _parser
from zero.plan_inputs import ask, plan_inputs

TIERS = [("none", "none"), ("cpu", "cpu"), ("none", "nvme"), ("nvme", "nvme")]


def options(*arguments: str) -> argparse.Namespace:
    return _parser().parse_args(["plan", "--gpu", "cpu", *arguments])


def inputs_of(config: dict[str, Any], model: Any, tmp_path: Path, *arguments: str) -> PlanInputs:
    """Return what the command line makes of a configuration, for a model that is built already."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    given = options("gpt2", "--config", str(file), *arguments)
    return plan_inputs(given, replace(ask(given), model=model))


def expected(model: torch.nn.Module, config: dict[str, Any], ranks: int) -> Any:
    return zero.plan_memory(model, config, world_size=ranks).memory


@pytest.mark.nvme
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("parameters", "optimizer"), TIERS)
def test_a_plan_of_a_shape_is_the_plan_of_the_built_model(
    parameters: str, optimizer: str, ranks: int, scratch: Path, tmp_path: Path
) -> None:
    config = make_config(
        parameters=parameters,
        optimizer=optimizer,
        nvme_path=str(scratch),
        dtype="bf16",
        accumulation=2,
        grad_accum_dtype="fp32",
        host_memory="150KB" if "nvme" in (parameters, optimizer) else "50MB",
        sub_group_size=4096,
    )
    config["communication_data_type"] = "fp16"
    with torch.device("meta"):
        model = TinyTransformer(layers=3, extra=(5000,))
    shape = shape_of(model, "tiny")
    inputs = inputs_of(config, shape, tmp_path, "--gpus", str(ranks))
    plan = expected(model, config, ranks)
    assert placement_request(inputs) == plan.request
    found = estimate(inputs).memory
    assert found.sub_groups == plan.sub_groups
    assert (found.slots, found.swap_file_bytes) == (plan.slots, plan.swap_file_bytes)
    assert found.rows() == plan.rows()
    assert (found.host_bytes, found.device_bytes) == (plan.host_bytes, plan.device_bytes)
    assert plan.swap_file_bytes > 0 or "nvme" not in (parameters, optimizer)


@pytest.mark.nvme
def test_a_built_model_is_planned_in_its_own_types_and_frozen_where_it_is(
    scratch: Path, tmp_path: Path
) -> None:
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=str(scratch), host_memory="150KB",
        sub_group_size=4096,
    )  # fmt: skip
    with torch.device("meta"):
        model = TinyTransformer(layers=3, extra=(5000,))
    model.blocks[1].bfloat16()
    model.embedding.requires_grad_(requires_grad=False)
    model.blocks[2].up.requires_grad_(requires_grad=False)
    inputs = inputs_of(config, shape_of(model, "mixed"), tmp_path, "--gpus", "2")
    assert (inputs.element, inputs.keeps_elements) == (ElementType.FP32, True)
    plan = expected(model, config, 2)
    assert len({spec.element for spec in plan.request.segments}) == 2
    assert len({spec.trainable for spec in plan.request.segments}) == 2
    assert placement_request(inputs) == plan.request
    assert estimate(inputs).memory.rows() == plan.rows()
    forced = inputs_of(config, shape_of(model, "mixed"), tmp_path, "--dtype", "bf16")
    assert {spec.element for spec in placement_request(forced).segments} == {ElementType.BF16}


@pytest.mark.full
@pytest.mark.nvme
@pytest.mark.parametrize("name", VARIATIONS)
def test_a_plan_of_a_configuration_is_the_plan_of_what_transformers_builds(
    name: str, scratch: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; names and shapes are compared with the golden")
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        dtype="bf16",
        host_memory="400KB",
        sub_group_size=4096,
    )
    plan = expected(build(VARIATIONS[name]), config, 2)
    inputs = inputs_of(config, model_of_config(VARIATIONS[name]), tmp_path, "--gpus", "2")
    assert placement_request(inputs) == plan.request
    assert estimate(inputs).memory.sub_groups == plan.sub_groups


def test_options_come_before_the_configuration(tmp_path: Path) -> None:
    config = make_config(parameters="cpu", optimizer="cpu", dtype="bf16", host_memory="1GB")
    config["tiers"]["nvme"] = [
        {"path": "/a", "capacity": "3GB", "read_bandwidth": "2GB", "write_bandwidth": "1GB"},
        {"path": "/b", "capacity": "2GB", "read_bandwidth": "3GB"},
    ]
    config["tiers"]["slot_count"] = 4
    shape = model_of_config(VARIATIONS["mistral"])
    found = inputs_of(config, shape, tmp_path)
    assert found.batch.samples == 2
    assert found.element is ElementType.BF16
    assert (found.parameter_tier, found.optimizer_tier) == (Tier.HOST, Tier.HOST)
    assert (found.node.host_bytes, found.node.nvme_bytes) == (10**9, 4_999_995_392)  # whole sectors
    assert found.slot_count == 4
    assert found.node.bandwidths.drive == DriveRates(5e9, 4e9, "given")
    changed = inputs_of(
        config, shape, tmp_path, "--batch", "7e0", "--accumulation", "3", "--dtype", "fp32",
        "--offload-param", "nvme", "--format", "fp32", "--nvme", "9TB", "--nvme-read", "7GB",
        "--seq", "33", "--checkpointing", "--attention", "eager",
    )  # fmt: skip
    assert (changed.batch.samples, changed.accumulation_steps) == (7, 3)
    assert changed.element is ElementType.FP32
    assert (changed.parameter_tier, changed.optimizer_tier) == (Tier.NVME, Tier.HOST)
    assert changed.state_format.value == "fp32"
    assert changed.node.nvme_bytes == 9 * 10**12
    assert changed.node.bandwidths.drive == DriveRates(7e9, 7e9, "given")
    assert (changed.batch.sequence, changed.batch.checkpointing) == (33, True)
    assert changed.batch.attention.value == "eager"


@pytest.mark.parametrize("name", ["--batch", "--seq", "--accumulation", "--gpus", "--nodes"])
def test_counts_are_whole_numbers_however_they_are_written(name: str, capsys: Any) -> None:
    given = vars(options("gpt2", name, "1e9"))[name.removeprefix("--")]
    assert given == 10**9
    assert type(given) is int
    with pytest.raises(SystemExit):
        options("gpt2", name, "1.5")
    said = capsys.readouterr().err
    assert f"argument {name}: '1.5' is not a whole number; 2 is the next one" in said


def test_a_budget_that_is_auto_follows_from_the_node_s_memory(tmp_path: Path) -> None:
    config = make_config(parameters="cpu", optimizer="cpu", host_memory="auto")
    shape = model_of_config(VARIATIONS["mistral"])
    found = inputs_of(config, shape, tmp_path, "--host", "64GB", "--gpus", "2")
    assert found.node.host_bytes == int(0.8 * 64e9) - 2 * (420 << 20)


def test_a_plan_does_not_depend_on_the_batch() -> None:
    node = Node(DeviceKind.CPU, host_bytes=400_000)
    inputs = PlanInputs(
        model_of_config(VARIATIONS["mistral"]),
        node,
        parameter_tier=Tier.NVME,
        optimizer_tier=Tier.NVME,
    )
    wide = replace(inputs, batch=replace(inputs.batch, samples=64, checkpointing=True))
    assert place(inputs) == place(wide)


def changed(config: dict[str, Any], what: str) -> dict[str, Any]:
    """Return a configuration with something that changes what is placed."""
    match what:
        case "stage 2":
            config["zero_optimization"] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        case "Lion" | "RMSprop" | "Adafactor" | "Lamb" | "Muon":
            config["optimizer"] = {"type": what, "params": {"lr": 1e-4}}
        case "double_backward":
            config["tiers"]["double_backward"] = True
        case "durable":
            config["tiers"]["durable"] = {"name": "run", "every_steps": 5}
        case "overrides":
            config["tiers"]["state_format"] = "bf16"
            config["tiers"]["state_formats"] = [
                {"parameters": "blocks.1.*", "state_format": "exact"},
                {"parameters": "embedding*", "state_format": "compact"},
            ]
        case _:
            config["tiers"]["state_format"] = what
    return config


@pytest.mark.nvme
@pytest.mark.parametrize(
    "what",
    [
        "bf16",
        "compact",
        "overrides",
        "Lion",
        "RMSprop",
        "Adafactor",
        "Lamb",
        "Muon",
        "durable",
        "stage 2",
        "double_backward",
    ],
)
def test_formats_optimizers_and_stages_are_planned_as_they_are_placed(
    what: str, scratch: Path, tmp_path: Path
) -> None:
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        dtype="bf16",
        host_memory={"stage 2": "1MB", "Adafactor": "280KB", "Lamb": "320KB", "Muon": "280KB"}.get(
            what, "150KB"
        ),
        sub_group_size=4096,
    )
    with torch.device("meta"):
        model = TinyTransformer(layers=3, extra=(5000,))
    model.blocks[1].down.weight.use_muon = False  # type: ignore[attr-defined]
    usual = expected(model, config, 2)
    config = changed(config, what)
    plan = expected(model, config, 2)
    assert plan != usual
    inputs = inputs_of(config, shape_of(model, "tiny"), tmp_path, "--gpus", "2")
    assert placement_request(inputs) == plan.request
    assert len({each.param_group for each in plan.request.segments}) == 1 + (what == "Muon")
    found = estimate(inputs)
    assert found.memory.sub_groups == plan.sub_groups
    assert found.memory.rows() == plan.rows()
    if what == "durable":
        assert inputs.commit_steps == 5
        assert found.moved.commit_bytes == plan.commit_bytes / 5 > 0


def test_a_gpu_is_not_the_host() -> None:
    model = model_of_config(VARIATIONS["mistral"])
    offloaded = {"parameter_tier": Tier.HOST, "optimizer_tier": Tier.HOST}
    cpu = estimate(PlanInputs(model, Node(DeviceKind.CPU), **offloaded))
    gpu = estimate(PlanInputs(model, Node(DeviceKind.CUDA), **offloaded))
    assert cpu.memory.request.device_is_host
    assert not gpu.memory.request.device_is_host
    assert gpu.memory.request.update_on_device
    assert cpu.memory.live_parameter_bytes == 0 < gpu.memory.live_parameter_bytes
    assert gpu.passing["update"]["buffers of the update"] > 0
    assert gpu.moved.update_link_bytes > 0
    assert cpu.time.link == 0 < gpu.time.link
    assert gpu.memory.request.shares_update
    alone = estimate(PlanInputs(model, Node(DeviceKind.CUDA), shares_update=False, **offloaded))
    assert alone.memory.request == replace(gpu.memory.request, shares_update=False)
    assert 0.0 < gpu.time.host == gpu.time.update_link < alone.time.update_link
    assert gpu.time.lower_bound < alone.time.lower_bound
    by_host = PlanInputs(model, Node(DeviceKind.CUDA), updates_on_device=False, **offloaded)
    assert estimate(by_host).moved.host_update_bytes > 0 == gpu.moved.host_update_bytes
