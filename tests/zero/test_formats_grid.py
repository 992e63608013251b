"""Every fused optimizer on every exact format has the reference's bits on every tier; lossy formats
have the same bits on every tier, and each moves the bytes of its layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import direct_io_directory
from tests.support.formats_grid import STEPS, cells
from tests.support.launch import run_worker

CELLS = range(len(cells()))
_RUNS: dict[int, list[list[dict[str, Any]]]] = {}


def cell_name(index: int) -> str:
    cell = cells()[index]
    return f"{cell['rule']}-{cell['format']}-{cell['dtype']}-{cell['device']}"


@pytest.fixture
def grid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the outcomes of every rank of one world size, run once."""
    world_size = request.param
    if world_size not in _RUNS:
        parent, reason = direct_io_directory()
        if parent is None:
            pytest.skip(reason)
        out = tmp_path_factory.mktemp(f"formats{world_size}")
        done = run_worker("formats_grid.py", str(out), str(parent), world_size=world_size)
        assert done.returncode == 0, done.stderr[-4000:]
        _RUNS[world_size] = [
            json.loads(Path(out / f"rank{rank}.json").read_text(encoding="utf-8"))
            for rank in range(world_size)
        ]
    return _RUNS[world_size]


def worlds() -> Any:
    sizes = [1, pytest.param(2, marks=pytest.mark.full)]
    return pytest.mark.parametrize("grid", sizes, indirect=True, ids=lambda size: f"world{size}")


@pytest.mark.nvme
@pytest.mark.parametrize("index", CELLS, ids=cell_name)
@worlds()
def test_tiers_and_formats_have_equal_bits(grid: Any, index: int) -> None:
    cell = cells()[index]
    for outcomes in grid:
        outcome = outcomes[index]
        assert outcome["cell"] == cell
        assert len(outcome["losses"]) == 2 * STEPS
        assert outcome["mismatches"] == []
        alike = [
            other for other in outcomes if {**other["cell"], "device": ""} == {**cell, "device": ""}
        ]
        assert len({other["digest"] for other in alike}) == 1
        assert len(alike) > 1
    assert len({outcomes[index]["digest"] for outcomes in grid}) == 1


@pytest.mark.nvme
@pytest.mark.parametrize("index", CELLS, ids=cell_name)
@worlds()
def test_the_bytes_of_the_layout_move(grid: Any, index: int) -> None:
    cell = cells()[index]
    for outcomes in grid:
        for moved in outcomes[index]["moved"]:
            assert moved["read"] == moved["planned_read"]
            assert moved["written"] == moved["planned_written"]
            if cell["device"] != "nvme":
                assert moved["read"] == moved["written"] == 0
                continue
            assert moved["read"] > 0
            assert moved["written"] > 0
            for way in ("read", "written"):
                ours, kernel = moved[way], moved[f"kernel_{way}"]
                assert ours <= kernel <= 1.02 * ours + 65536, f"{way}: the kernel moved {kernel}"


@pytest.mark.nvme
@pytest.mark.parametrize("grid", [1], indirect=True, ids=["world1"])
def test_optimizers_and_formats_differ(grid: Any) -> None:
    resident = [each for each in grid[0] if each["cell"]["device"] == "none"]
    seen = {}
    for outcome in resident:
        cell = outcome["cell"]
        exact = cell["format"] in ("exact", "fp32")
        if cell["rule"] == "lion" and not exact:
            continue  # the sign of a rounded average is seldom another
        key = (cell["rule"], cell["dtype"], "exact" if exact else cell["format"])
        seen.setdefault(key, set()).add(outcome["digest"])
    assert all(len(digests) == 1 for digests in seen.values()), "exact and fp32 differ"
    assert len({digest for digests in seen.values() for digest in digests}) == len(seen)
    paged = {
        each["cell"]["format"]: each["moved"][-1]["written"]
        for each in grid[0]
        if each["cell"]["device"] == "nvme" and each["cell"]["rule"] in ("adamw", "adam")
    }
    assert 0 < paged["bf16"] < paged["exact"] < paged["fp32"]
