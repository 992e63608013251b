"""Two ranks touch sharded parameters: rank 0's values count, who stays away is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import run_rank_case

pytestmark = pytest.mark.nvme


def test_touches_are_collectives_that_agree_or_name_who_stayed_away(scratch: Path) -> None:
    ranks = [outcome.split(" | ") for outcome in run_rank_case("touching", scratch)]
    assert ranks[0][0] == ranks[1][0]
    assert ranks[0][0].startswith("read 1 write 1 init 1 gradient 1 local 1")
    for outcome in ranks:
        assert outcome[1].startswith("RankError rank")
        assert "do something else" in outcome[1]
    assert ranks[0][2].startswith(
        "RankError rank 0: sum on sharded parameters blocks.0.up.weight needs all 2 ranks"
    )
    assert "within 2 s" in ranks[0][2]
    assert "if rank == 0" in ranks[0][2]
    assert ranks[1][2] == "ran"
