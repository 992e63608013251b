"""Harm to one of two ranks: all ranks fall back, refuse or end alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.durable_ranks", str(place)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def resumed(found: dict[str, Any], case: str, step: int) -> list[list[str]]:
    """Check that both ranks resumed at a step, and return why newer commits were not taken."""
    assert found[case]["problems"] == []
    assert set(found[case]["resumed"]) == {"0", "1"}
    reasons = []
    for at, text in found[case]["resumed"].values():
        digest, fell_back = json.loads(text)
        assert (at, digest) == (step, found["truth"][step])
        reasons.append(fell_back)
    return reasons


def refused(found: dict[str, Any], case: str, ranks: int, said: str) -> None:
    assert found[case]["resumed"] == {}
    assert len(found[case]["final"]) == ranks
    for text in found[case]["final"].values():
        assert text.startswith("DurableError: the durable run 'run' ")
        assert said in text


def test_a_torn_manifest_of_one_rank_takes_all_to_the_commit_before(found: dict) -> None:
    assert resumed(found, "manifest", 2) == [[], []]
    assert set(found["manifest"]["final"].values()) == {found["truth"][3]}


def test_a_torn_extent_of_one_rank_takes_all_to_the_commit_before(found: dict) -> None:
    reasons = resumed(found, "data", 2)
    assert reasons[0] == reasons[1]
    assert "commit 3 was not taken: rank 0: " in reasons[0][0]
    assert set(found["data"]["final"].values()) == {found["truth"][4]}


def test_the_directory_of_a_rank_is_missed(found: dict) -> None:
    refused(found, "missing", 2, "ranks [1] have no directory, though others have commit 4")


def test_another_world_size_is_refused_by_name(found: dict) -> None:
    refused(found, "one rank", 1, "has 2 ranks, and 1 are here; start it with as many")
    refused(found, "three ranks", 3, "has 2 ranks, and 3 are here")


def test_a_name_in_use_on_one_rank_is_refused_on_all(found: dict) -> None:
    refused(found, "in use", 2, "cannot be used: rank 1: ")
    refused(found, "in use", 2, "is in use by a living run")
    resumed(found, "whole again", 4)


def test_sigterm_to_one_rank_commits_and_ends_all(found: dict) -> None:
    assert found["terminated"]["codes"] == [-15, -15]
    (step, _), _ = found["after SIGTERM"]["resumed"].values()
    assert step >= found["terminated"]["done"] >= 5
