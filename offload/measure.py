"""Measure what a drive reads and writes a second, with the engine that will page."""

from __future__ import annotations

import collections
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from aio_ops import Engine, HostArena, Span, Ticket
from estimators import DriveRates

TRANSFER_BYTES = 4 << 20
IN_FLIGHT = 8
FILE_BYTES = 64 << 20
ROUNDS = 3


def measure_rates(engine: Engine, directory: Path) -> DriveRates:
    """Write and read an unnamed file of 64 MiB three times and return the median rates.

    Raises:
        OSError: if the directory cannot be used, or a transfer fails.
    """
    file = engine.create_file(directory, FILE_BYTES)
    arena = HostArena(IN_FLIGHT * TRANSFER_BYTES)
    spans = [arena.carve(TRANSFER_BYTES) for _ in range(IN_FLIGHT)]
    for span in spans:
        span.view()[:] = os.urandom(4096) * (TRANSFER_BYTES // 4096)
    try:
        written, read = [], []
        for _ in range(ROUNDS):
            written.append(_rate(lambda at, span: engine.submit_write(file, at, span), spans))
            read.append(_rate(lambda at, span: engine.submit_read(file, at, span), spans))
    finally:
        engine.drain()
        file.close()
        arena.close()
    return DriveRates(statistics.median(read), statistics.median(written), "measured")


def _rate(submit: Callable[[int, Span], Ticket], spans: list[Span]) -> float:
    """Return the bytes a second of one pass over the file with every span in flight."""
    under_way: collections.deque[Ticket] = collections.deque()
    begin = time.perf_counter()
    for offset, span in zip(range(0, FILE_BYTES, TRANSFER_BYTES), itertools.cycle(spans)):
        if len(under_way) == len(spans):
            under_way.popleft().wait()
        under_way.append(submit(offset, span))
    while under_way:
        under_way.popleft().wait()
    return FILE_BYTES / (time.perf_counter() - begin)
