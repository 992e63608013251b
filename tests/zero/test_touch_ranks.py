"""Two ranks touch sharded parameters: rank 0's values count, who stays away is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import run_rank_case
from tests.support.ranks import initial_weights, odd_sizes

pytestmark = pytest.mark.nvme


def test_touches_are_collectives_that_agree_or_name_who_stayed_away(scratch: Path) -> None:
    ranks = [outcome.split(" | ") for outcome in run_rank_case("touching", scratch)]
    assert ranks[0][0] == ranks[1][0]
    assert ranks[0][0].startswith("read 1 write 1 init 1 gradient 1 local 1")
    assert ranks[0][1:5] == ranks[1][1:5]
    assert ranks[0][1].startswith("grown 1 kept 1 thawed 1 average 1")
    assert ranks[0][2] == "loaded 1 half 1"
    check_odd_sizes(ranks[0][3])
    assert ranks[0][4] == initial_weights(str(scratch), 0)  # the same on one rank
    for outcome in ranks:
        assert outcome[5].startswith("RankError rank")
        assert "do something else" in outcome[5]
    assert ranks[0][6].startswith(
        "RankError rank 0: sum on sharded parameters blocks.0.up.weight needs all 2 ranks"
    )
    assert "rank 1 waits in another collective" in ranks[0][6]
    assert "if rank == 0" in ranks[0][6]
    assert ranks[1][6] == "ran"


def check_odd_sizes(said: str) -> None:
    plain, plain_digest, init, init_digest = said.split()
    assert (plain, init) == ("1", "1")
    assert plain_digest == init_digest


def test_odd_sizes_on_one_rank(scratch: Path) -> None:
    check_odd_sizes(odd_sizes(str(scratch), 0))


@pytest.mark.full
def test_odd_sizes_on_three_ranks(scratch: Path) -> None:
    outcomes = run_rank_case("odd_sizes", scratch, world_size=3)
    assert len(set(outcomes)) == 1
    check_odd_sizes(outcomes[0])
