"""The graphs that real training makes are those of plain torch, on one rank and on several."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.launch import run_worker
from tests.support.situations import SITUATIONS

pytestmark = pytest.mark.nvme
WORLDS = [1, 2, pytest.param(3, marks=pytest.mark.full)]


@cache
def outcomes(world_size: int, path: Path) -> dict[str, list[str]]:
    """Play all situations in one launch; return what each rank said, by situation."""
    done = run_worker("situations.py", str(path), world_size=world_size)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        rank, _, rest = line.partition(": ")
        name, _, outcome = rest.partition(": ")
        if rank.isdigit():
            found.setdefault(name, []).append(outcome)
    return found


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_graph_is_that_of_plain_torch(
    module_scratch: Path, world_size: int, situation: str
) -> None:
    assert outcomes(world_size, module_scratch)[situation] == ["right"] * world_size
