"""What a disk moves at most when half is read and half is written: mixed, or in bursts by turns."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aio_ops import Engine, HostArena, Span, Ticket, TransferFile, open_engine

TRANSFER_BYTES = (1 << 20, 4 << 20, 16 << 20)
IN_FLIGHT_BYTES = 64 << 20
BURST_BYTES = (32 << 20, 128 << 20)


@dataclass(frozen=True)
class Limit:
    """One measurement of one schedule."""

    schedule: str
    transfer_bytes: int
    bytes_per_s: float


def moves(count: int, burst: int) -> Iterator[tuple[bool, int]]:
    """Yield `(writes, index)`: `burst` reads of one half, then as many writes of the other."""
    half = count // 2
    for start in range(0, half, burst):
        stop = min(start + burst, half)
        yield from ((False, index) for index in range(start, stop))
        yield from ((True, half + index) for index in range(start, stop))


def run(
    engine: Engine, file: TransferFile, spans: list[Span], burst: int, *, drains: bool
) -> float:
    """Move the whole file and return the bytes a second; bursts wait for each other."""
    size = spans[0].size_bytes
    under_way: deque[tuple[Ticket, Span]] = deque()
    free = list(spans)
    direction = False
    begin = time.perf_counter()
    for writes, index in moves(file.size_bytes // size, burst):
        while under_way and (not free or (drains and writes != direction)):
            ticket, span = under_way.popleft()
            ticket.wait()
            free.append(span)
        direction = writes
        span = free.pop()
        verb = engine.submit_write if writes else engine.submit_read
        under_way.append((verb(file, index * size, span), span))
    for ticket, _ in under_way:
        ticket.wait()
    return file.size_bytes / (time.perf_counter() - begin)


def measure_limit(directory: Path, engine_name: str, mebibytes: int) -> list[Limit]:
    """Measure every schedule and transfer size once, on an unnamed file of its own."""
    found = []
    with open_engine(engine_name, directory=directory) as engine:
        file = engine.create_file(directory, mebibytes << 20)
        arena = HostArena(IN_FLIGHT_BYTES)
        whole = arena.carve(IN_FLIGHT_BYTES)
        whole.view()[:] = b"\xa5" * IN_FLIGHT_BYTES
        for start in range(0, file.size_bytes, IN_FLIGHT_BYTES):  # written, so that reads are real
            size = min(IN_FLIGHT_BYTES, file.size_bytes - start)
            engine.submit_write(file, start, whole.sub(0, size)).wait()
        for size in TRANSFER_BYTES:
            count = IN_FLIGHT_BYTES // size
            spans = [whole.sub(index * size, size) for index in range(count)]
            rate = run(engine, file, spans, 1, drains=False)
            found.append(Limit("mixed", size, rate))
            for burst in BURST_BYTES:
                rate = run(engine, file, spans, max(burst // size, 1), drains=True)
                found.append(Limit(f"bursts of {burst >> 20} MiB", size, rate))
        file.close()
    return found
