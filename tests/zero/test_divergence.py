"""Ranks that do not do the same: it completes, or all raise soon and say who does what."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import run_worker
from zero.rendezvous import PATIENCE_S

LIMIT_S = 30.0


def run_cases(
    scratch: Path, patience: float, *cases: str, world_size: int
) -> tuple[list[list[tuple[float, str]]], str]:
    """Return what each rank says of each case, seconds and what came of it; and their errors."""
    done = run_worker(
        "divergence.py", str(scratch), str(patience), *cases, world_size=world_size, timeout_s=200
    )
    found: list[list[tuple[float, str]]] = [[] for _ in range(world_size)]
    for line in done.stdout.splitlines():
        rank, _, said = line.partition(": ")
        seconds, _, outcome = said.partition(" ")
        found[int(rank)].append((float(seconds), outcome))
    assert all(len(each) == len(cases) for each in found), done.stdout + done.stderr[-3000:]
    return found, done.stderr


def check_branches(outcomes: list[str]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.startswith(f"RankError rank {rank} is at the parameters of unit blocks.")
        assert "others do something else: rank " in outcome
        assert "the same parts of the model in the same order" in outcome


def check_early_step(outcomes: list[str]) -> None:
    assert outcomes[1].startswith("RankError rank 1 is at a step (meeting ")
    assert "rank 0: the parameters of unit" in outcomes[1]
    assert "rank 1: a step" in outcomes[0]


def check_ends_early(outcomes: list[str]) -> None:
    assert outcomes[1] == "completed"
    for rank, outcome in enumerate(outcomes):
        if rank != 1:
            assert outcome.startswith(f"RankError rank {rank}: the parameters of unit ")
            assert "rank 1 has destroyed its engine or ended; its last meeting was" in outcome
            assert "leave a loop together" in outcome


@pytest.mark.nvme
def test_ranks_that_differ(scratch: Path) -> None:
    cases = ("slow", "branches", "early_step", "ends_early", "backward_alone")
    (first, second), _ = run_cases(scratch, 1.0, *cases, world_size=2)
    said = [[first[number][1], second[number][1]] for number in range(len(cases))]
    assert all(outcome.startswith("completed") for outcome in said[0])
    assert "rank 1 computes, at " in said[0][0]  # a warning, after some time
    check_branches(said[1])
    check_early_step(said[2])
    check_ends_early(said[3])
    assert said[4][1].startswith("RankError rank 1: reading ")
    assert "rank 0 waits in another collective, at " in said[4][1]
    assert "Error" in said[4][0]  # rank 1 ended
    assert list(scratch.iterdir()) == []


@pytest.mark.nvme
@pytest.mark.full
@pytest.mark.parametrize("case", ["branches", "early_step", "ends_early", "saves_alone"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_raise_within_30_seconds(case: str, world_size: int, scratch: Path) -> None:
    ranks, errors = run_cases(scratch, PATIENCE_S, case, world_size=world_size)
    outcomes = [rank[0][1] for rank in ranks]
    assert max(rank[0][0] for rank in ranks) < LIMIT_S
    match case:
        case "branches":
            check_branches(outcomes)
        case "early_step":
            check_early_step(outcomes)
        case "ends_early":
            check_ends_early(outcomes)
        case _:
            assert outcomes[0].startswith("RankError rank 0: ")
            assert "rank 1 waits in another collective, at divergence.py:" in outcomes[0]
            assert "if rank == 0" in outcomes[0]
            assert all("Error" in outcome for outcome in outcomes)  # rank 0 ended
            assert "rank 0 raised, and rank 1 did not: rank 0: " in errors
