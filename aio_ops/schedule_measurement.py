"""Find out whether a device is faster with reads and writes mixed, or in bursts that alternate."""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from aio_ops.engine import Engine
from aio_ops.memory import Span
from aio_ops.schedule import Schedule
from aio_ops.transfer import Ticket, TransferFile

MIXED = Schedule()
# Bursts cost latency: a read may wait for one of writes. Less than this gain is not worth it.
LEAST_GAIN = 1.05
_ROUNDS = 3
_PASSES = 4  # times what the spans hold is moved before the same bytes come again


@dataclass(frozen=True, slots=True)
class ScheduleMeasurement:
    """Which schedule moved most bytes a second, half of them read and half written."""

    best: Schedule
    bytes_per_s: dict[Schedule, float]

    def describe(self) -> str:
        """Return the outcome in one line."""
        rates = ", ".join(
            f"{schedule.describe()} {rate / 1e9:.2f} GB/s"
            for schedule, rate in self.bytes_per_s.items()
        )
        return f"{rates}: {self.best.describe()} it is"


def measure_schedule(
    engine: Engine, file: TransferFile, spans: Sequence[Span], *, seconds: float = 2.0
) -> ScheduleMeasurement:
    """Try mixed and alternating reads and writes on a file whose bytes nobody needs.

    `spans` are what may be in flight, all of one size, at least four of them; a burst is what half
    or a quarter of them hold. A part of the file's first half is written once, for a file system
    answers reads of what was never written without its disk; then that part is read and one as
    large in the second half is written, over and over, for about `seconds` in all. The engine's
    schedule is the best one afterwards. Raises ValueError when spans or file are too small.
    """
    size_bytes = spans[0].size_bytes if spans else 0
    if len(spans) < 4 or any(span.size_bytes != size_bytes for span in spans):
        raise ValueError(f"measuring takes at least four spans of one size, got {list(spans)}")
    half_bytes = file.size_bytes // 2 // size_bytes * size_bytes
    if half_bytes < size_bytes:
        raise ValueError(
            f"{file.path} has {file.size_bytes} bytes, and measuring with spans of {size_bytes} "
            f"takes at least {2 * size_bytes}"
        )
    burst_bytes = len(spans) // 2 * size_bytes
    schedules = [MIXED, Schedule(burst_bytes=burst_bytes), Schedule(burst_bytes=burst_bytes // 2)]
    rates: dict[Schedule, list[float]] = {schedule: [] for schedule in schedules}
    part_bytes = min(half_bytes, _PASSES * len(spans) * size_bytes)
    run = Traffic(engine, file, spans, part_bytes, half_bytes)
    run.fill()
    for number in range(_ROUNDS):
        for schedule in schedules[number:] + schedules[:number]:
            engine.set_schedule(schedule)
            rates[schedule].append(run.go(seconds / _ROUNDS / len(schedules)))
    medians = {schedule: statistics.median(own) for schedule, own in rates.items()}
    fastest = max(medians, key=medians.__getitem__)
    best = fastest if medians[fastest] > LEAST_GAIN * medians[MIXED] else MIXED
    engine.set_schedule(best)
    return ScheduleMeasurement(best, medians)


class Traffic:
    """Keeps every span in flight, as many to read as to write."""

    def __init__(
        self,
        engine: Engine,
        file: TransferFile,
        spans: Sequence[Span],
        part_bytes: int,
        half_bytes: int,
    ) -> None:
        self._engine = engine
        self._file = file
        self._spans = spans
        self._part_bytes = part_bytes
        self._half_bytes = half_bytes
        self._turn = 0

    def fill(self) -> None:
        """Write what is read later."""
        size_bytes = self._spans[0].size_bytes
        for start in range(0, self._part_bytes, size_bytes * len(self._spans)):
            offsets = range(start, self._part_bytes, size_bytes)
            pieces = list(zip(offsets, self._spans, strict=False))
            for ticket in self._engine.submit_writes(self._file, pieces):
                ticket.wait()

    def go(self, seconds: float) -> float:
        """Move bytes for so long, and return how many a second."""
        under_way: deque[tuple[Ticket, Span]] = deque()
        moved_bytes = 0
        start = time.perf_counter()
        for span in self._spans:
            under_way.append((self._next(span), span))
        while under_way:
            ticket, span = under_way.popleft()
            ticket.wait()
            moved_bytes += span.size_bytes
            if time.perf_counter() - start < seconds:
                under_way.append((self._next(span), span))
        return moved_bytes / (time.perf_counter() - start)

    def _next(self, span: Span) -> Ticket:
        writes = self._turn % 2 == 1
        offset = self._turn // 2 * span.size_bytes % self._part_bytes
        self._turn += 1
        if writes:
            return self._engine.submit_write(self._file, self._half_bytes + offset, span)
        return self._engine.submit_read(self._file, offset, span)
