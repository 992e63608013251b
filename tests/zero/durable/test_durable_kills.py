"""SIGKILL at random moments: what is resumed is the newest commit of all ranks, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.durable import MIXES

ROOT = Path(__file__).resolve().parents[3]


def campaign(
    place: Path, world_size: int, kills: int, seed: int, mixes: list[str]
) -> dict[str, dict]:
    """Kill runs of some tier mixes, see `tests/support/killed_runs.py`."""
    arguments = [str(place), str(world_size), str(kills), str(seed), *mixes]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_runs", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict[str, dict], kills: int, mixes: list[str]) -> None:
    problems = {mix: each["problems"] for mix, each in found.items() if each["problems"]}
    assert not problems
    assert list(found) == mixes
    assert sum(each["kills"] for each in found.values()) == kills
    assert all(each["finished"] for each in found.values())
    resumes = [step for each in found.values() for step in each["resumes"]]
    assert len(resumes) > kills // 3
    assert len(set(resumes)) > 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_ten_kills_lose_nothing_that_was_committed(tmp_path: Path, world_size: int) -> None:
    mixes = list(MIXES)[world_size - 1 :: 2]
    check(campaign(tmp_path, world_size, 10, world_size, mixes), 10, mixes)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_hundred_kills_lose_nothing_that_was_committed(tmp_path: Path, world_size: int) -> None:
    mixes = list(MIXES)
    check(campaign(tmp_path, world_size, 100, 10 + world_size, mixes), 100, mixes)
