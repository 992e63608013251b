"""A model three times the memory of its process is built, loaded, trained and evaluated."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.launch import run_worker

pytestmark = [pytest.mark.nvme, pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def weights(module_scratch: Path) -> Path:
    folder = module_scratch / "weights"
    folder.mkdir()
    done = run_worker("big_model.py", "write", str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("world_size", [1, 2])
def test_three_times_the_memory(
    weights: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    # The C library keeps freed blocks of up to 32 MiB otherwise, which are no memory of ours.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    arguments = ("train", str(weights), str(scratch))
    done = run_worker("big_model.py", *arguments, world_size=world_size, timeout_s=800)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split(": ", 1) for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert sorted(rank for rank, _ in lines) == [str(rank) for rank in range(world_size)]
    outcomes = [json.loads(text) for _, text in lines]
    for outcome in outcomes:
        assert outcome["model_bytes"] >= 3 * outcome["limit_bytes"]
        assert outcome["loaded"] * 4 == outcome["model_bytes"]
        assert outcome["swap_bytes"] * world_size > 3 * outcome["model_bytes"]
        assert outcome["written_bytes"] * world_size > 3 * outcome["model_bytes"]
        assert outcome["read_bytes"] > 0
        assert math.isfinite(outcome["norm"])
        assert all(map(math.isfinite, outcome["losses"]))
        assert outcome["losses"] == outcomes[0]["losses"]
        first, second, evaluated = outcome["losses"]
        assert evaluated < second < first
