"""Two ranks: what differs between them is made equal or refused, never mixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import run_rank_case

pytestmark = pytest.mark.nvme


def test_another_order_of_blocks_on_one_rank_is_refused(scratch: Path) -> None:
    for outcome in run_rank_case("different_order", scratch):
        assert outcome.startswith("RuntimeError")
        assert "all ranks must use the same parts of the model in the same order" in outcome


def test_another_model_on_one_rank_is_refused(scratch: Path) -> None:
    for outcome in run_rank_case("different_models", scratch):
        assert "zero.initialize with a model of its own" in outcome


def test_weights_and_buffers_of_rank_0_count(scratch: Path) -> None:
    first, second = run_rank_case("different_seeds", scratch)
    assert first == second
    assert first.endswith("[0.0, 0.0, 0.0]")


def test_a_block_that_no_rank_uses_is_no_hindrance(scratch: Path) -> None:
    first, second = run_rank_case("unused_everywhere", scratch)
    assert first == second
    assert len(first) == 12


def test_a_gradient_set_before_the_first_backward_is_there_on_all_ranks(scratch: Path) -> None:
    first, second = run_rank_case("set_gradients", scratch)
    assert first == second
    assert first.startswith("[1, 1, 1, 1, 1, 1]")


def test_a_replan_that_fails_on_one_rank_fails_on_all_and_changes_nothing(scratch: Path) -> None:
    first, second = run_rank_case("replan_failing", scratch)
    assert first == ", ".join(["RankError 1 1"] * 4)
    assert second == ", ".join(["OSError 1 1"] * 4)
