"""How settings are compared and chosen: pure, or with a disk made of numbers."""

import random
import statistics
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aio_ops.tune.bench import Allowance, Sample, WritesSpentError
from aio_ops.tune.halving import Outcome, Samples, Search
from aio_ops.tune.report import round_ticks
from aio_ops.tune.results import Sustained
from aio_ops.tune.settings import LEAST_POOL_BYTES, MOST_POOL_BYTES, Setting, Workload, grid
from aio_ops.tune.statistics import interval, is_tight, relative_rates
from aio_ops.tune.tuner import choose, compare

ENGINES = ["io_uring", "kernel_aio", "threads"]
MIB = 1 << 20


def sample(rate: float) -> Sample:
    return Sample(int(rate), 0, 1.0, (0.001,))


def search_on(
    rate_of: Callable[[int], float], *, seconds: float = 0.05, noise: float = 0.0, drift: float = 0
) -> Search[int]:
    """Return a search over numbers, on a disk that drifts and is noisy."""
    source = random.Random(3)
    turn = 0

    def measure(key: int, piece_s: float) -> Sample:
        nonlocal turn
        turn += 1
        now = 1 + drift * (turn % 200) / 200
        return sample(1e6 * rate_of(key) * now * (1 + source.uniform(-noise, noise)))

    end = time.perf_counter() + seconds
    return Search(measure, lambda standing: None, end, piece_s=0.0)


def test_the_best_is_found_on_a_noisy_disk_that_doubles_its_speed() -> None:
    search = search_on(lambda key: 100 + key, noise=0.05, drift=1.0, seconds=0.5)
    outcome = search.halve(list(range(64)), lambda alive: alive)
    assert outcome.best >= 50  # the last of 64, or one within the noise of it
    first = search.samples.taken[0]
    assert len(first) == 2  # the worst was left after the first stage
    assert len(search.samples.taken[outcome.best]) > 9


def test_a_steady_disk_ends_the_search_early() -> None:
    search = search_on(lambda key: 100 + key, seconds=60)
    begin = time.perf_counter()
    outcome = search.halve(list(range(8)), lambda alive: alive)
    assert outcome.tight
    assert outcome.best == 7
    assert time.perf_counter() - begin < 5


def test_one_round_is_measured_even_without_time() -> None:
    outcome = search_on(lambda key: 100 + key, seconds=-1).halve([1, 2, 3], lambda alive: alive)
    assert outcome.best == 3
    assert {len(taken) for taken in outcome.samples.taken.values()} == {1}


def test_what_may_not_be_written_ends_the_search() -> None:
    def measure(key: int, piece_s: float) -> Sample:
        raise WritesSpentError

    search: Search[int] = Search(measure, lambda standing: None, 1e12, piece_s=0.0)
    assert search.halve(list(range(9)), lambda alive: alive).finalists == []


@pytest.mark.parametrize("most", range(32, 84, 3))
def test_writes_that_run_out_leave_what_was_measured_before(most: int) -> None:
    """The first stage measures each twice: whatever ends later, it has told."""
    measured = []

    def measure(key: int, piece_s: float) -> Sample:
        if len(measured) >= most:
            raise WritesSpentError
        measured.append(key)
        return sample(1e6 * (100 + key))

    search: Search[int] = Search(measure, lambda standing: None, 1e12, piece_s=0.0)
    outcome = search.halve(list(range(16)), lambda alive: [*alive, 0])
    assert len(measured) == most
    best = outcome.best
    assert best >= 14  # after two rounds the two best can change places
    assert search.samples.rate(best) == 1e6 * (100 + best)
    assert len(search.samples.rates(best)) >= 2


def test_one_disturbed_round_at_the_end_is_not_all_that_is_known() -> None:
    samples: Samples[int] = Samples()
    samples.taken[1] = [sample(rate) for rate in (6.83e9, 7.67e9, 1.62e9)]
    samples.relative[1] = [1.0]
    assert samples.rate(1) == pytest.approx(6.83e9)
    samples.taken[1] += [sample(5e9)] * 4
    samples.relative[1] = [1.0] * 4
    assert samples.rates(1) == [5e9] * 4


@given(st.lists(st.floats(1e3, 1e9), min_size=1, max_size=40), st.floats(0.1, 10))
def test_relative_rates_do_not_know_the_speed_of_the_disk(rates: list[float], by: float) -> None:
    slower = relative_rates([rate * by for rate in rates])
    assert slower == pytest.approx(relative_rates(rates))


def test_a_disk_that_slows_down_harms_nobody() -> None:
    steady = relative_rates([100.0 - index for index in range(50)])
    assert max(abs(rate - 1) for rate in steady[4:-4]) < 1e-9


@given(st.lists(st.floats(1, 100), min_size=1, max_size=30))
def test_the_interval_holds_the_median(values: list[float]) -> None:
    low, high = interval(values)
    assert min(values) <= low <= statistics.median(values) <= high <= max(values)


def test_an_interval_is_tight_only_with_enough_values() -> None:
    assert not is_tight([1.0] * 4, 0.02, least=5)
    assert is_tight([1.0] * 5, 0.02, least=5)
    assert not is_tight([1.0, 1.2, 0.8, 1.1, 0.9, 1.0], 0.02, least=5)


@given(
    st.sampled_from(list(Workload)),
    st.booleans(),
    st.integers(1, 300),
    st.sampled_from([LEAST_POOL_BYTES, MOST_POOL_BYTES // 2, MOST_POOL_BYTES]),
)
def test_a_grid_fits_time_and_memory(
    workload: Workload,
    registers: bool,  # noqa: FBT001  hypothesis gives it
    most: int,
    pool_bytes: int,
) -> None:
    settings = grid(ENGINES, workload, pool_bytes=pool_bytes, registers=registers, most=most)
    assert settings
    assert len(set(settings)) == len(settings)
    assert len(settings) <= max(most, 5)
    for setting in settings:
        assert MIB <= setting.block_bytes * setting.depth <= pool_bytes
        assert registers or not setting.registered
        assert not setting.alternates or workload is Workload.MIX


def test_a_minute_tries_everything_that_the_issue_names() -> None:
    settings = grid(ENGINES, Workload.MIX, pool_bytes=MOST_POOL_BYTES, registers=True, most=10_000)
    assert {setting.engine for setting in settings} == set(ENGINES)
    blocks = {setting.block_bytes for setting in settings}
    assert (min(blocks), max(blocks)) == (256 << 10, 16 * MIB)
    assert {setting.registered for setting in settings} == {False, True}
    assert {setting.alternates for setting in settings} == {False, True}
    assert len({setting.thread_count for setting in settings if setting.on_threads}) > 2


PLAIN = Setting("io_uring", MIB, 8)
PINNED = Setting("io_uring", MIB, 8, registered=True)


def outcome_of(plain: list[float], pinned: list[float]) -> Outcome[Setting]:
    samples: Samples[Setting] = Samples(
        {PLAIN: [sample(1e6)], PINNED: [sample(1e6)]}, {PLAIN: plain, PINNED: pinned}
    )
    order = sorted((PLAIN, PINNED), key=lambda key: -statistics.median(samples.relative[key]))
    return Outcome(order, samples, tight=True)


def test_what_has_no_key_is_chosen_only_where_it_is_clearly_better() -> None:
    assert choose(outcome_of([1.0, 0.9, 1.1], [1.01, 0.95, 1.1])) == (PLAIN, PLAIN)
    assert choose(outcome_of([1.0, 0.9, 1.1], [1.5, 1.4, 1.6])) == (PLAIN, PINNED)


def test_on_a_plateau_the_default_is_chosen() -> None:
    other = Setting("threads", 16 * MIB, 4)
    samples: Samples[Setting] = Samples({}, {other: [1.01, 1.01], PLAIN: [1.0, 1.0]})
    outcome = Outcome([other, PLAIN], samples, tight=True)
    assert choose(outcome, PLAIN) == (PLAIN, PLAIN)
    assert choose(outcome) == (other, other)
    samples.relative[other] = [1.1, 1.1]
    assert choose(outcome, PLAIN) == (other, other)


def test_a_sweep_names_what_beats_the_choice() -> None:
    search = search_on(lambda key: 100 if key == 3 else 50, seconds=60)
    search.begin_stage([1, 2, 3])
    for _ in range(3):
        search.round([1, 2, 3], 0)
    assert [row[0] for row in compare(1, search).beaten_by] == [3]  # type: ignore[arg-type,comparison-overlap]
    assert compare(3, search).beaten_by == ()  # type: ignore[arg-type]


def test_an_allowance_is_never_exceeded() -> None:
    allowance = Allowance(100)
    assert allowance.take(60)
    assert allowance.stop_at(0.5) == 80
    assert not allowance.take(30)
    assert allowance.take(20)
    allowance.stop_at(1.0)
    assert allowance.take(20)
    with pytest.raises(WritesSpentError):
        allowance.require(1)
    assert allowance.written_bytes == 100


@given(st.floats(1e-3, 1e4), st.floats(1, 1e4))
def test_ticks_of_a_logarithmic_axis_enclose_what_is_drawn(low: float, by: float) -> None:
    ticks = round_ticks(low, low * by)
    assert ticks[0] <= low
    assert ticks[-1] > low * by
    assert len(ticks) > 1


def long_write(*rates: float) -> Sustained:
    pieces = [(index / 4, (index + 1) / 4, int(rate * 1e9 / 4)) for index, rate in enumerate(rates)]
    return Sustained(tuple(pieces), len(rates) / 4)


def test_a_write_cache_that_ends_is_found() -> None:
    fall = long_write(*[4.0] * 10, *[1.0] * 10)
    found = fall.cliff()
    assert found is not None
    assert found[0] == pytest.approx(10e9)
    assert (found[1], found[2]) == (pytest.approx(4e9), pytest.approx(1e9))
    assert "fell from 4.00 to 1.00 GB/s after 10.0 GB" in fall.verdict()


@pytest.mark.parametrize("rates", [[4.0] * 20, [4.0, 1.0] * 10, [4.0] * 18 + [1.0] * 2, [4.0] * 3])
def test_noise_is_no_cliff(rates: list[float]) -> None:
    assert long_write(*rates).cliff() is None
