"""What was planned from a configuration is what training takes: pools, swap file, process.

`scripts/plan_check.py` trains each case in a process of its own. The full suite runs all shapes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import zero
from estimators.estimate import estimate
from estimators.models import model_of_config
from scripts import plan_models
from scripts.plan_check import (
    CPU_SHAPES,
    GPU_SHAPES,
    PLACEMENTS,
    Case,
    Outcome,
    cases,
    compare_pools,
    run_apart,
    warm_up,
)
from tests.support.configs import make_config
from tests.support.tiny import TinyTransformer, make_batch
from zero.model_functions import shape_of
from zero.plan_command import _parser
from zero.plan_inputs import ask, plan_inputs

FILE_TABLES_BYTES = 64 << 10
"""What a file system may add to a file for its own tables."""


def check(case: Case, outcome: Outcome) -> None:
    for pool in outcome.pools:
        if (pool["tier"], pool["what"]) == ("device", "gradient"):
            # At world size 1 they are the tensors that autograd made: the pool is not touched.
            assert pool["present"] in (0, pool["planned"]), pool
        else:
            assert pool["present"] == pool["planned"], pool
    assert sum(pool["planned"] for pool in outcome.pools) > 0
    pages = "nvme" in case.placement
    assert (outcome.planned_swap_bytes > 0) == pages
    if pages:
        assert outcome.swap_blocks_bytes is not None
        beside = outcome.swap_blocks_bytes - outcome.planned_swap_bytes
        assert 0 <= beside <= FILE_TABLES_BYTES
        assert outcome.planned_nvme_bytes > 0
        if case.checkpointing:  # a block that runs again may be read once more
            assert 1 <= outcome.nvme_bytes_moved / outcome.planned_nvme_bytes <= 1.02
        else:
            assert outcome.nvme_bytes_moved == outcome.planned_nvme_bytes
    assert 0.9 <= outcome.ratio <= 1.1, row_of(outcome)
    # The process would hardly notice a small model: what the plan adds must count itself.
    added = outcome.peak_bytes - outcome.baseline_bytes
    assert added > 0.25 * outcome.peak_bytes, row_of(outcome)


def row_of(outcome: Outcome) -> str:
    megabytes = {
        name: round(value / 1e6)
        for name, value in dataclasses.asdict(outcome).items()
        if name.endswith("_bytes") and value
    }
    return f"{outcome.name}, {outcome.placement}: {megabytes}"


def case_of(name: str, placement: str, directory: str = "/tmp") -> Case:
    (found,) = [
        case
        for case in cases("cpu", directory, quick=True)
        if (case.name, case.placement) == (name, placement)
    ]
    return found


@pytest.mark.nvme
def test_one_shape_takes_what_was_planned(scratch: Path) -> None:
    case = case_of("shared keys, tied", "all on nvme", str(scratch))
    check(case, run_apart(dataclasses.replace(case, samples=1, sequence=128)))


@pytest.mark.full
@pytest.mark.nvme
@pytest.mark.timeout(600)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", CPU_SHAPES)
def test_every_shape_takes_what_was_planned(name: str, placement: str, scratch: Path) -> None:
    case = case_of(name, placement, str(scratch))
    check(case, run_apart(case))


@pytest.mark.parametrize("name", [*CPU_SHAPES, *GPU_SHAPES])
def test_the_models_that_are_trained_are_those_of_their_configurations(name: str) -> None:
    config = {**CPU_SHAPES, **GPU_SHAPES}[name]["config"]
    with torch.device("meta"):
        built = shape_of(plan_models.build(config), name)
    found = model_of_config(config)
    plain = [dataclasses.replace(each, element=None) for each in built.parameters]
    assert plain == list(found.parameters)
    assert found.stacks


def test_twelve_shapes_and_four_placements() -> None:
    assert (len(CPU_SHAPES), len(GPU_SHAPES), len(PLACEMENTS)) == (12, 5, 4)


@pytest.mark.full
@pytest.mark.nvme
def test_a_case_warms_up(scratch: Path) -> None:
    for name in ("experts", "encoder"):
        warm_up(case_of(name, "all on nvme", str(scratch)))


@pytest.mark.nvme
@pytest.mark.parametrize("name", ["Adafactor", "Lamb", "Muon"])
def test_whole_tensors_take_what_was_planned(scratch: Path, tmp_path: Path, name: str) -> None:
    """Of an optimizer by name, with its parameter groups, from the configuration alone."""
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=str(scratch), dtype="bf16",
        host_memory="160KB", sub_group_size=4096,
    )  # fmt: skip
    config["optimizer"] = {"type": name, "params": {"lr": 1e-3}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    options = _parser().parse_args(["plan", "gpt2", "--gpu", "cpu", "--config", str(file)])
    with torch.device("meta"):
        model = TinyTransformer(layers=3, extra=(5000,))
    shape = shape_of(model, "tiny")
    planned = estimate(plan_inputs(options, dataclasses.replace(ask(options), model=shape)))
    engine = zero.initialize(model=model, config=config, init_fn=plan_models.initialise)[0]
    assert len(engine.optimizer.param_groups) == 1 + (name == "Muon")
    for step in range(2):
        engine.backward(engine(*make_batch(step)))
        engine.step()
    outcome = Outcome(name, "all on nvme")
    compare_pools(outcome, planned, engine, is_cpu=True)
    assert all(pool["present"] == pool["planned"] for pool in outcome.pools)
    assert sum(pool["planned"] for pool in outcome.pools) > 0
    beside = (outcome.swap_blocks_bytes or 0) - outcome.planned_swap_bytes
    assert 0 <= beside <= FILE_TABLES_BYTES
    assert engine.optimizer.fused.records.paged_bytes == planned.memory.whole.area_bytes > 0
    assert planned.memory.rows() == engine.plan.memory.rows()
    engine.destroy()
