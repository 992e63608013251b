"""One measured run of one engine on an existing file: started by io_bench.py, prints JSON."""

import argparse
import json
import os
import resource
import time
from collections import deque
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path

from aio_ops import Engine, HostArena, Schedule, Span, SwapFile, Ticket, open_engine
from aio_ops.kernel_engines import IoUringEngine
from aio_ops.swapfile import Descriptor

POLLING = {"sqpoll": "submission", "iopoll": "completion"}

Move = tuple[bool, int]  # writes, offset


def open_direct(path: Path) -> SwapFile:
    """Open an existing file for direct I/O."""
    descriptor = Descriptor(os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
    size_bytes = os.fstat(descriptor.number).st_size
    return SwapFile(descriptor, path, size_bytes, alignment_bytes=4096, direct=True)


def plan(workload: str, moved_bytes: int, transfer_bytes: int) -> list[Move]:
    """Return every transfer, in order; what is not a read or write alone does both by turns."""
    count = moved_bytes // transfer_bytes
    offsets = [index * transfer_bytes for index in range(count)]
    if workload in ("read", "write"):
        return [(workload == "write", offset) for offset in offsets]
    half = count // 2
    return [
        move
        for read, write in zip(offsets[:half], offsets[half : 2 * half], strict=True)
        for move in ((False, read), (True, write))
    ]


def batches(moves: list[Move], most: int) -> Iterator[tuple[bool, list[int]]]:
    """Return transfers of one kind that follow each other, at most so many at once."""
    for writes, group in groupby(moves, key=lambda move: move[0]):
        while part := [offset for _, offset in islice(group, most)]:
            yield writes, part


def move(engine: Engine, file: SwapFile, spans: list[Span], moves: list[Move]) -> None:
    """Keep every span in flight until all is moved."""
    under_way: deque[tuple[Ticket, Span]] = deque()
    free = list(spans)
    for writes, offsets in batches(moves, max(1, len(spans) // 8)):
        while len(free) < len(offsets):
            ticket, span = under_way.popleft()
            ticket.wait()
            free.append(span)
        pieces = [(offset, free.pop()) for offset in offsets]
        verb = engine.submit_writes if writes else engine.submit_reads
        used = [span for _, span in pieces]
        under_way.extend(zip(verb(file, pieces), used, strict=True))
    for ticket, _ in under_way:
        ticket.wait()


def open_asked(name: str, queue_depth: int, burst_bytes: int) -> Engine:
    """Open the engine of a contender's name: its kind, then what it adds."""
    kind, *extras = name.split("+")
    polling = next((POLLING[extra] for extra in extras if extra in POLLING), "none")
    blocks = [int(extra[:-1]) for extra in extras if extra.endswith("m") and extra[:-1].isdigit()]
    block_bytes = (blocks or [1])[0] << 20
    engine = open_engine(kind, queue_depth=queue_depth, block_bytes=block_bytes, polling=polling)
    if burst_bytes:
        engine.set_schedule(Schedule(burst_bytes=burst_bytes))
    return engine


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", help="its kind, +registered, +sqpoll, +iopoll or +4m (blocks)")
    parser.add_argument("path", type=Path)
    parser.add_argument("workload", choices=("read", "write", "mixed"))
    parser.add_argument("moved_bytes", type=int)
    parser.add_argument("transfer_bytes", type=int)
    parser.add_argument("in_flight", type=int)
    parser.add_argument("--burst-bytes", type=int, default=0)
    parser.add_argument("--hugepages", action="store_true")
    options = parser.parse_args()
    size_bytes = options.transfer_bytes
    arena = HostArena(options.in_flight * size_bytes, hugepages=options.hugepages)
    whole = arena.carve(options.in_flight * size_bytes)
    whole.view()[:] = os.urandom(1 << 16) * (whole.size_bytes >> 16)
    spans = [whole.sub(index * size_bytes, size_bytes) for index in range(options.in_flight)]
    moves = plan(options.workload, options.moved_bytes, size_bytes)
    queue_depth = max(32, options.in_flight)
    with (
        open_asked(options.engine, queue_depth, options.burst_bytes) as engine,
        open_direct(options.path) as file,
    ):
        if "registered" in options.engine and isinstance(engine, IoUringEngine):
            refusal = engine.register(whole)
            if refusal is not None:
                raise SystemExit(refusal)
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        move(engine, file, spans, moves)
        after, stop = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"cpu_s": cpu_s, "wall_s": stop - start}))


if __name__ == "__main__":
    main()
