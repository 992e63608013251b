"""What a drive can do at most for what a step must move, measured in the same run.

The limit is the faster of two schedules, as they were measured: reads and writes mixed, or in
bursts by turns. Beside it stands what bursts without any cost of turning would take, `read / read
rate + written / write rate`. Rates are the best of several transfer sizes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from step_bench_limit import BURST_BYTES, IN_FLIGHT_BYTES, run

from aio_ops import Engine, HostArena, Span, Ticket, TransferFile, open_engine

TRANSFER_BYTES = (4 << 20, 16 << 20)


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


def measure(directory: Path, mebibytes: int) -> DriveRates:
    """Measure a drive through a file of its own, made of huge pages and direct transfers."""
    with open_engine("auto", directory=directory) as engine:
        file = engine.create_file(directory, mebibytes << 20)
        arena = HostArena(IN_FLIGHT_BYTES)
        whole = arena.carve(IN_FLIGHT_BYTES)
        whole.view()[:] = b"\xa5" * IN_FLIGHT_BYTES
        one_way(engine, file, split(whole, 16 << 20), writes=True)  # so that reads are real
        spans = [split(whole, size) for size in TRANSFER_BYTES]
        found = DriveRates(
            max(one_way(engine, file, each, writes=False) for each in spans),
            max(one_way(engine, file, each, writes=True) for each in spans),
            max(run(engine, file, each, 1, drains=False) for each in spans),
            max(
                run(engine, file, each, burst // each[0].size_bytes, drains=True)
                for each in spans
                for burst in BURST_BYTES
            ),
        )
        file.close()
        arena.close()
    return found


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
    rates: list[DriveRates], read_bytes: int, written_bytes: int, seconds: float
) -> dict[str, Any]:
    """Return the limit for a step, from rates taken before and after it, and its share."""
    both = [each.seconds(read_bytes, written_bytes) for each in rates]
    mean = {name: sum(each[name] for each in both) / len(both) for name in both[0]}
    schedule = min(("mixed", "bursts"), key=mean.__getitem__)
    return {
        "schedule": schedule,
        "least_seconds": mean[schedule],
        "share": mean[schedule] / seconds,
        "share_of_free_bursts": mean["free bursts"] / seconds,
        "read_bytes": read_bytes,
        "written_bytes": written_bytes,
        "rates": [vars(each) for each in rates],
    }
