"""The equivalence grid for budgets, sizes, orders and settings that hypothesis chooses.

Whatever rests where, and whoever is used when, the bits are those of the reference and of a run
with everything resident, and the planned bytes move. World size 1 runs here; more ranks are started
once an example, with several cells each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.conftest import direct_io_directory
from tests.support.chosen import chosen_cells, run_chosen
from tests.support.launch import run_worker

PATIENT: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
}
# A chosen order may use a block twice or nest nothing at all: what the plan foresees is once each.
pytestmark = [pytest.mark.nvme, pytest.mark.filterwarnings("ignore:the first step took")]


def directory() -> str:
    parent, reason = direct_io_directory()
    if parent is None:
        pytest.skip(reason)
    return str(parent)


REUSED = {
    "parameters": "nvme",
    "optimizer": "none",
    "layers": 2,
    "extra": [],
    "orders": [[0], [0], [0, 0]],  # the gradient of a block used twice arrives once
    "dtype": "fp32",
    "state_format": "exact",
    "accumulation": 2,
    "clip": 0.0,
    "sub_group_size": 64,
    "budget": 0.0,
    "slot_count": None,
    "write_burst": 0,
    "verify": False,
}


@settings(max_examples=6, **PATIENT)
@example(REUSED)
@given(chosen_cells())
def test_a_chosen_cell_on_one_rank(cell: dict[str, Any]) -> None:
    assert run_chosen(cell, directory())["problems"] == []


@pytest.mark.full
@pytest.mark.timeout(1200)
@settings(max_examples=150, **PATIENT)
@given(chosen_cells())
def test_many_chosen_cells_on_one_rank(cell: dict[str, Any]) -> None:
    assert run_chosen(cell, directory())["problems"] == []


def run_ranks(cells: list[dict[str, Any]], world_size: int, out: Path) -> None:
    done = run_worker("chosen.py", str(out), directory(), json.dumps(cells), world_size=world_size)
    assert done.returncode == 0, done.stderr[-4000:]
    by_rank = [
        json.loads((out / f"rank{rank}.json").read_text(encoding="utf-8"))
        for rank in range(world_size)
    ]
    for outcomes in zip(*by_rank, strict=True):
        for outcome in outcomes:
            assert outcome["problems"] == [], outcome["cell"]
        assert len({outcome["digest"] for outcome in outcomes}) == 1
    swap = sum(outcome["swap_file_bytes"] for outcome in by_rank[0])
    assert (sum(outcome["read_bytes"] for outcome in by_rank[0]) > 0) == (swap > 0)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_chosen_cells_on_several_ranks(tmp_path: Path, world_size: int) -> None:
    check_ranks(tmp_path, world_size, cells=12, examples=5)


def check_ranks(tmp_path: Path, world_size: int, *, cells: int, examples: int) -> None:
    @settings(max_examples=examples, phases=[Phase.generate], derandomize=True, **PATIENT)
    @given(st.lists(chosen_cells(), min_size=cells, max_size=cells))
    def check(chosen: list[dict[str, Any]]) -> None:
        run_ranks(chosen, world_size, tmp_path)

    check()
