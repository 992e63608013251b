"""Programs that end without `engine.destroy()` end well: no thread is left inside torch."""

from __future__ import annotations

import pytest

from tests.support.launch import run_worker


@pytest.mark.parametrize("group", ["destroyed", "left"])
def test_ranks_that_leave_their_engine_open_end_well(group: str) -> None:
    done = run_worker("left_open.py", group, world_size=2, timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 trained", "rank 1 trained"]
