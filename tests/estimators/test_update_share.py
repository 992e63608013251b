"""Which updates are shared, and who takes the next sub-group, from what was measured."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators import ShareRates, ShareTrial, host_is_sooner


def run(trial: ShareTrial, shared: float, alone: float, count: int) -> list[bool]:
    """Note updates that take so long, and return which were shared."""
    found = []
    for _ in range(count):
        found.append(trial.shares)
        trial.note(shared if found[-1] else alone, shared=found[-1])
    return found


@pytest.mark.parametrize(
    ("shared", "alone"), [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (0.96, 1.0), (0.94, 1.0)]
)
def test_after_turns_of_both_sharing_is_kept_where_it_gains(shared: float, alone: float) -> None:
    trial = ShareTrial()
    found = run(trial, shared, alone, 40)
    assert found[:7] == [True, True, False, True, False, True, False]
    assert found[7:] == [shared < 0.95 * alone] * 33
    assert not trial.is_open


def test_the_first_update_and_single_slow_ones_do_not_count() -> None:
    trial = ShareTrial()
    trial.note(100.0, shared=True)
    for shared, alone in ((1.0, 2.0), (50.0, 2.0), (1.0, 2.0)):
        assert trial.shares
        trial.note(shared, shared=True)
        assert not trial.shares
        trial.note(alone, shared=False)
    assert trial.shares
    for _ in range(100):
        trial.note(50.0, shared=True)
        trial.note(1.0, shared=True)
        trial.note(1.0, shared=True)
    assert trial.shares
    assert not trial.is_open


def test_a_trial_starts_anew_once_sharing_has_become_slower() -> None:
    trial = ShareTrial()
    run(trial, 1.0, 2.0, 20)
    found = run(trial, 3.0, 2.0, 40)
    turns = found.index(False)
    assert 4 <= turns <= 9
    assert found[turns + 6 :] == [False] * (len(found) - turns - 6)


@given(st.floats(1e-12, 1e-6), st.floats(1e-12, 1e-6), st.lists(st.integers(1, 10**8), min_size=1))
def test_the_host_takes_no_more_than_evens_both(
    host_seconds: float, device_seconds: float, numels: list[int]
) -> None:
    rates = ShareRates(host_seconds, device_seconds)
    taken, left = 0, sum(numels)
    ends = []
    for numel in numels:
        if not host_is_sooner(rates, taken + numel, left - numel):
            break
        taken, left = taken + numel, left - numel
        ends.append(max(taken * host_seconds, left * device_seconds))
    assert all(later <= earlier for earlier, later in pairwise(ends))
    assert taken * host_seconds <= left * device_seconds or not taken


def test_before_anything_is_measured_the_host_takes_what_it_can() -> None:
    assert host_is_sooner(None, 10**9, 1)
