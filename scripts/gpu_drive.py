"""What a drive can do at most for what a step must move, measured around each step.

The limit is the faster of two schedules, as they were measured: reads and writes mixed, or in
bursts by turns. Beside it stands what bursts without any cost of turning would take, `read / read
rate + written / write rate`. Rates are first the best of several sizes of transfers and bursts,
then those of the best sizes again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from step_bench_limit import BURST_BYTES, IN_FLIGHT_BYTES, run

from aio_ops import Engine, HostArena, Span, Ticket, TransferFile, open_engine
from estimators.command import count_option

TRANSFER_BYTES = (4 << 20, 16 << 20)
LEAST_MEBIBYTES = IN_FLIGHT_BYTES >> 20
"""Of the file that a drive is measured with: with less in flight the rates would say nothing."""


@dataclass(frozen=True)
class Settings:
    """What is compared, or what was best: sizes of transfers, in bursts pairs with the burst's."""

    read: tuple[int, ...] = TRANSFER_BYTES
    write: tuple[int, ...] = TRANSFER_BYTES
    mixed: tuple[int, ...] = TRANSFER_BYTES
    bursts: tuple[tuple[int, int], ...] = tuple(
        (size, burst) for size in TRANSFER_BYTES for burst in BURST_BYTES
    )


_ALL = Settings()


@dataclass(frozen=True)
class DriveRates:
    """Bytes a second."""

    read: float
    write: float
    mixed: float
    """Read and written together, as much of each."""
    bursts: float
    """The same in bursts by turns."""

    def seconds(self, read_bytes: int, written_bytes: int) -> dict[str, float]:
        """Return the time of each schedule for what must move."""
        return {
            "mixed": (read_bytes + written_bytes) / self.mixed,
            "bursts": (read_bytes + written_bytes) / self.bursts,
            "free bursts": read_bytes / self.read + written_bytes / self.write,
        }


class DriveWatch:
    """Measures a drive before the first step and after each one, through a file of its own.

    The file stays between measurements: new blocks of it would be slower than those of a swap file.
    """

    def __init__(self, directory: Path, mebibytes: int) -> None:
        self.rates: list[DriveRates] = []
        self._size_bytes = mebibytes << 20
        self._settings = _ALL
        self._open = contextlib.ExitStack()
        self._engine = self._open.enter_context(open_engine("auto", directory=directory))
        self._file = self._engine.create_file(directory, self._size_bytes)
        self._open.callback(self._file.close)

    def measure(self) -> None:
        """Measure it once more."""
        arena = HostArena(IN_FLIGHT_BYTES)
        whole = arena.carve(IN_FLIGHT_BYTES)
        whole.view()[:] = b"\xa5" * IN_FLIGHT_BYTES
        if not self.rates:
            one_way(self._engine, self._file, split(whole, 16 << 20), writes=True)
        found, self._settings = measure(self._engine, self._file, whole, self._settings)
        arena.close()
        self.rates.append(found)

    def close(self) -> None:
        """Give file and engine back."""
        self._open.close()


def mebibytes_option(text: str) -> int:
    """Return the size of the file that a drive is measured with; for `argparse`."""
    found = count_option(text)
    if 0 < found < LEAST_MEBIBYTES:
        raise argparse.ArgumentTypeError(f"must be 0 or at least {LEAST_MEBIBYTES}, got {found}")
    return found


def measure(
    engine: Engine, file: TransferFile, whole: Span, settings: Settings
) -> tuple[DriveRates, Settings]:
    """Measure a drive through a file that was written, by transfers from and to a span.

    Returns:
        The best rates, and the settings that gave them.
    """
    read, read_size = max(
        (one_way(engine, file, split(whole, size), writes=False), size) for size in settings.read
    )
    write, write_size = max(
        (one_way(engine, file, split(whole, size), writes=True), size) for size in settings.write
    )
    mixed, mixed_size = max(
        (run(engine, file, split(whole, size), 1, drains=False), size) for size in settings.mixed
    )
    bursts, burst_sizes = max(
        (run(engine, file, split(whole, size), burst // size, drains=True), (size, burst))
        for size, burst in settings.bursts
    )
    best = Settings((read_size,), (write_size,), (mixed_size,), (burst_sizes,))
    return DriveRates(read, write, mixed, bursts), best


def split(whole: Span, size_bytes: int) -> list[Span]:
    """Return the parts of a span."""
    count = whole.size_bytes // size_bytes
    return [whole.sub(index * size_bytes, size_bytes) for index in range(count)]


def one_way(engine: Engine, file: TransferFile, spans: list[Span], *, writes: bool) -> float:
    """Move the whole file one way and return the bytes a second."""
    size = spans[0].size_bytes
    verb = engine.submit_write if writes else engine.submit_read
    begin = time.perf_counter()
    under_way: list[Ticket] = []
    for index in range(file.size_bytes // size):
        if len(under_way) >= len(spans):
            under_way.pop(0).wait()
        under_way.append(verb(file, index * size, spans[index % len(spans)]))
    for ticket in under_way:
        ticket.wait()
    return file.size_bytes / (time.perf_counter() - begin)


def compare(
    rates: Sequence[DriveRates], read_bytes: int, written_bytes: int, seconds: Sequence[float]
) -> dict[str, Any]:
    """Return the limit for a step and its share of what steps took, medians over the steps.

    Args:
        rates: one measurement before the first step and one after each.
        read_bytes: what a step reads.
        written_bytes: what it writes.
        seconds: what each step took.
    """
    least = [each.seconds(read_bytes, written_bytes) for each in rates]
    around = [
        {name: (before[name] + after[name]) / 2 for name in before}
        for before, after in itertools.pairwise(least)
    ]
    shares = {
        name: statistics.median(
            each[name] / spent for each, spent in zip(around, seconds, strict=True)
        )
        for name in around[0]
    }
    schedule = min(("mixed", "bursts"), key=shares.__getitem__)
    return {
        "schedule": schedule,
        "least_seconds": statistics.median(each[schedule] for each in around),
        "share": shares[schedule],
        "share_of_free_bursts": shares["free bursts"],
        "read_bytes": read_bytes,
        "written_bytes": written_bytes,
        "rates": [vars(each) for each in rates],
    }
