"""The tier does not change the result, bit for bit.

Each world size is started once and runs the whole grid; the tests look at what it reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import direct_io_directory
from tests.support.grid import CLIP, STEPS, cells
from tests.support.launch import run_worker

WORLD_SIZES = (1, 2)
CELLS = range(len(cells()))


def cell_name(index: int) -> str:
    cell = cells()[index]
    what = "all" if cell["with_parameters"] else "optimizer"
    clip = "clip" if cell["clip"] else "noclip"
    return f"{cell['device']}-{what}-x{cell['accumulation']}-{clip}-{cell['dtype']}"


_RUNS: dict[int, list[list[dict[str, Any]]]] = {}


@pytest.fixture
def grid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the outcomes of every rank of one world size, run once."""
    world_size = request.param
    if world_size not in _RUNS:
        parent, reason = direct_io_directory()
        if parent is None:
            pytest.skip(reason)
        out = tmp_path_factory.mktemp(f"grid{world_size}")
        done = run_worker("grid.py", str(out), str(parent), world_size=world_size)
        assert done.returncode == 0, done.stderr[-4000:]
        _RUNS[world_size] = [
            json.loads(Path(out / f"rank{rank}.json").read_text(encoding="utf-8"))
            for rank in range(world_size)
        ]
    return _RUNS[world_size]


@pytest.mark.nvme
@pytest.mark.parametrize("index", CELLS, ids=cell_name)
@pytest.mark.parametrize("grid", WORLD_SIZES, indirect=True, ids=lambda size: f"world{size}")
def test_bits_equal_the_reference_and_every_other_tier(grid: Any, index: int) -> None:
    cell = cells()[index]
    for outcomes in grid:
        outcome = outcomes[index]
        assert outcome["cell"] == cell
        assert outcome["world_size"] == len(grid)
        assert len(outcome["losses"]) == STEPS * cell["accumulation"]
        assert outcome["mismatches"] == []
        for reference, ours in outcome["norms"]:
            assert ours == reference > 0
        resident = next(
            other
            for other in outcomes
            if other["cell"] == {**cell, "device": "none", "with_parameters": False}
        )
        assert outcome["digest"] == resident["digest"]
        assert outcome["losses"] == resident["losses"]
        if cell["dtype"] == "fp32":
            assert 0 < outcome["torch_difference"] < 1e-6
    assert len({outcomes[index]["digest"] for outcomes in grid}) == 1


@pytest.mark.nvme
@pytest.mark.parametrize("index", CELLS, ids=cell_name)
@pytest.mark.parametrize("grid", WORLD_SIZES, indirect=True, ids=lambda size: f"world{size}")
def test_the_planned_bytes_and_no_others_moved(grid: Any, index: int) -> None:
    cell = cells()[index]
    for outcomes in grid:
        outcome = outcomes[index]
        for step, kernel in zip(outcome["ledger"], outcome["process_io"], strict=True):
            assert step["read"] == step["planned_read"]
            assert step["written"] == step["planned_written"]
            if cell["device"] == "nvme":
                assert outcome["slots"] == 2
                assert outcome["swap_file_bytes"] > 0
                assert step["read"] > 0
                assert step["written"] > 0
                assert kernel["read"] >= 0, "the kernel saw less than the ledger"
                assert kernel["written"] >= 0, "the kernel saw less than the ledger"
            else:
                assert step["read"] == step["written"] == 0


@pytest.mark.parametrize("grid", WORLD_SIZES, indirect=True, ids=lambda size: f"world{size}")
def test_clipping_and_accumulation_change_the_result(grid: Any) -> None:
    digests = {
        (
            outcome["cell"]["dtype"],
            outcome["cell"]["accumulation"],
            outcome["cell"]["clip"],
        ): outcome["digest"]
        for outcome in grid[0]
    }
    assert len(set(digests.values())) == len(digests) == 8
    clipped = [outcome for outcome in grid[0] if outcome["cell"]["clip"] == CLIP]
    assert all(norm > CLIP for outcome in clipped for norm, _ in outcome["norms"])
