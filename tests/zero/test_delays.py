"""Whatever is late, and on whichever rank, the bits are those of a run in which nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.delayed_runs import compare_seeds
from tests.support.delays import KINDS
from tests.support.fork_ranks import on_ranks

FEW = {1: range(12), 2: range(12, 17), 3: range(17, 20)}
MANY = {1: range(100), 2: range(100, 350), 3: range(350, 500)}
ALONE = {"meeting", "issue of a collective", "completion of a collective", "bytes in collectives"}
"""What one rank has none of."""


def check(world_size: int, seeds: range, folder: Path, timeout_s: float) -> None:
    """Compare each seed on every rank, and see that each kind was delayed in each of them."""
    found = on_ranks(
        lambda rank: compare_seeds(str(folder), rank, world_size, list(seeds)),
        world_size,
        folder,
        timeout_s,
    )
    for rank, said in enumerate(found):
        assert said["wrong"] == [], f"rank {rank}: seeds {said['wrong']}"
        expected = set(said["least"]) - (ALONE if world_size == 1 else set())
        assert set(KINDS) <= set(said["least"])
        assert {what for what, least in said["least"].items() if least > 0} == expected
        paged = {
            f"nvme {way} {section}"
            for way in ("read", "write")
            for section in ("gradient", "parameter", "state")
        }
        resident = {"host parameter"} | ({"host gradient"} if world_size == 1 else set())
        assert {key for key, size in said["tiers"].items() if size} >= paged | resident


@pytest.mark.nvme
@pytest.mark.parametrize("world_size", FEW)
def test_bits_do_not_depend_on_what_is_late(world_size: int, scratch: Path) -> None:
    check(world_size, FEW[world_size], scratch, timeout_s=120)


@pytest.mark.nvme
@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", MANY)
def test_bits_do_not_depend_on_what_is_late_in_500_ways(world_size: int, scratch: Path) -> None:
    check(world_size, MANY[world_size], scratch, timeout_s=1400)
