"""Several directories at once: do they share a link, and which one setting suits them all."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aio_ops.tune import halving
from aio_ops.tune.bench import Sample, WritesSpentError
from aio_ops.tune.results import DirectoryResult, Rate, Together
from aio_ops.tune.settings import Setting

_LEAST_TURNS = 3
_FALLBACK = Setting("python", 1 << 20, 8)


@dataclass(frozen=True, eq=False)
class Drive:
    """A tuned directory that can still be measured: a setting moves bytes for so long."""

    result: DirectoryResult
    measure: Callable[[Setting, float], Sample]


def common_candidates(results: Sequence[DirectoryResult]) -> list[Setting]:
    """Return the choices of the directories that all of them can use.

    A configuration has one setting, which serves all its directories.
    """
    chosen = [result.chosen for result in results if result.chosen is not None]
    candidates = [
        setting
        for setting in dict.fromkeys(chosen)
        if not any(setting.engine in result.refusals for result in results)
    ]
    return candidates or [_FALLBACK]


def measure_together(drives: Sequence[Drive], deadline: float) -> Together | None:
    """Measure the choices by turns alone and at once, until the deadline, three times at least.

    Returns None where --max-write was spent before.
    """
    if any(drive.result.chosen is None for drive in drives):
        return None
    candidates = common_candidates([drive.result for drive in drives])
    alone: list[dict[Drive, float]] = []
    at_once: dict[Setting, list[float]] = {setting: [] for setting in candidates}
    with ThreadPoolExecutor(len(drives)) as threads:
        while time.perf_counter() < deadline or len(alone) < _LEAST_TURNS:
            try:
                turn = {drive: _measure_alone(drive) for drive in drives}
                together = {setting: _at_once(drives, setting, threads) for setting in candidates}
            except WritesSpentError:
                break
            alone.append(turn)
            for setting, rate in together.items():
                at_once[setting].append(rate)
    if not alone:
        return None
    setting = max(candidates, key=lambda each: statistics.median(at_once[each]))
    rates = at_once[setting]
    return Together(
        {drive.result.disk.path: Rate.of([turn[drive] for turn in alone]) for drive in drives},
        setting,
        Rate.of(rates),
        _share(rates, [sum(turn.values()) for turn in alone]),
        _share(rates, [max(turn.values()) for turn in alone]),
    )


def _share(rates: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(rate / other for rate, other in zip(rates, others, strict=True))


def _measure_alone(drive: Drive) -> float:
    if drive.result.chosen is None:
        raise WritesSpentError
    return drive.measure(drive.result.chosen, halving.MOST_PIECE_S).rate


def _at_once(drives: Sequence[Drive], setting: Setting, threads: ThreadPoolExecutor) -> float:
    """Return what all move at once: the sum of their rates while all are at it."""
    barrier = threading.Barrier(len(drives))

    def measure(drive: Drive) -> float:
        barrier.wait()
        return drive.measure(setting, 2 * halving.MOST_PIECE_S).rate

    return sum(threads.map(measure, drives))
