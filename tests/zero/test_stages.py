"""Stages 0, 1 and 2: unsharded parameters, and the same bits as stage 3 and as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import run_worker
from tests.support.stages import STEPS, run_all

RUNS = [(1, True), (2, True)]
RUNS += [pytest.param((size, False), marks=pytest.mark.full) for size in (1, 2, 3)]
_RUNS: dict[tuple[int, bool], list[dict[str, Any]]] = {}


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, scratch: Path
) -> list[dict[str, Any]]:
    """Return what every rank of one world size reported, run once."""
    world_size, few = request.param
    if (world_size, few) not in _RUNS:
        if world_size == 1:
            _RUNS[1, few] = [run_all(str(scratch), few=few)]
        else:
            out = tmp_path_factory.mktemp(f"stages{world_size}")
            arguments = (str(out), str(scratch), "few" if few else "all")
            done = run_worker("stages.py", *arguments, world_size=world_size)
            assert done.returncode == 0, done.stderr[-4000:]
            _RUNS[world_size, few] = [
                json.loads(Path(out / f"rank{rank}.json").read_text(encoding="utf-8"))
                for rank in range(world_size)
            ]
        assert list(scratch.iterdir()) == []
    return _RUNS[world_size, few]


on_worlds = pytest.mark.parametrize(
    "ranks", RUNS, indirect=True, ids=lambda run: f"world{run[0]}-{'few' if run[1] else 'all'}"
)


@on_worlds
@pytest.mark.nvme
def test_every_stage_gives_the_bits_of_stage_3_and_of_the_reference(ranks: Any) -> None:
    for rank in ranks:
        for outcome in rank["cells"]:
            cell = outcome["cell"]
            assert outcome["problems"] == []
            assert outcome["stage"] == cell["stage"]
            assert outcome["world_size"] == len(ranks)
            assert len(outcome["losses"]) == 2 * STEPS
            assert all(
                (moved > 0) is (cell["device"] == "nvme") for moved in outcome["moved_bytes"]
            )
            like = {"stage": 3, "device": "none", "dtype": cell["dtype"]}
            third = next(other for other in rank["cells"] if other["cell"] == like)
            assert outcome["digest"] == third["digest"]
            assert outcome["losses"] == third["losses"]
    for outcomes in zip(*(rank["cells"] for rank in ranks), strict=True):
        assert len({outcome["digest"] for outcome in outcomes}) == 1, outcomes[0]["cell"]


@on_worlds
def test_parameters_stay_plain_and_alike_on_every_rank(ranks: Any) -> None:
    for rank in ranks:
        outcomes = [each for each in rank["cells"] if each["cell"]["stage"] < 3]
        assert len(outcomes) >= 4
        for outcome in outcomes:
            assert outcome["is_plain"]
            assert outcome["local"] == outcome["digest"]
            assert "parameters unsharded (peak)" not in outcome["plan"]


@on_worlds
def test_every_change_between_steps_is_seen_by_every_rank(ranks: Any) -> None:
    for rank in ranks:
        for name, found in rank["changes"].items():
            third = rank["changes"][f"3 {name.split()[1]}"]
            assert len(set(third)) == len(third) - 1  # averages applied and taken back
            assert found == third
        assert {name.split()[0] for name in rank["changes"]} > {"3"}
    assert all(rank["changes"] == ranks[0]["changes"] for rank in ranks)


@pytest.mark.parametrize("ranks", [(2, True)], indirect=True)
def test_a_piece_of_what_every_rank_has_cannot_be_set_by_one(ranks: Any) -> None:
    for rank in ranks:
        assert "each rank has all values of parameter norm.weight" in rank["refusal"]
        assert "safe_set_full_fp32_param" in rank["refusal"]
