"""One measured run of one engine on an existing file: started by io_bench.py, prints JSON."""

import argparse
import json
import os
import resource
import time
from collections import deque
from pathlib import Path

from aio_ops import Engine, HostArena, Span, SwapFile, Ticket, open_engine
from aio_ops.kernel_engines import IoUringEngine
from aio_ops.swapfile import Descriptor

BURST_BYTES = 64 << 20


def open_direct(path: Path) -> SwapFile:
    """Open an existing file for direct I/O."""
    descriptor = Descriptor(os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
    size_bytes = os.fstat(descriptor.number).st_size
    return SwapFile(descriptor, path, size_bytes, alignment_bytes=4096, direct=True)


def plan(workload: str, moved_bytes: int, transfer_bytes: int) -> list[tuple[bool, int]]:
    """Return (writes, offset) of every transfer, in order; a mix reads and writes two halves."""
    count = moved_bytes // transfer_bytes
    offsets = [index * transfer_bytes for index in range(count)]
    if workload in ("read", "write"):
        return [(workload == "write", offset) for offset in offsets]
    half = count // 2
    burst = 1 if workload == "mixed" else max(1, BURST_BYTES // transfer_bytes)
    moves: list[tuple[bool, int]] = []
    for start in range(0, half, burst):
        stop = min(start + burst, half)
        moves += [(False, offset) for offset in offsets[start:stop]]
        moves += [(True, offset) for offset in offsets[half + start : half + stop]]
    return moves


def move(
    engine: Engine,
    file: SwapFile,
    spans: list[Span],
    moves: list[tuple[bool, int]],
    *,
    drains: bool,
) -> None:
    """Keep every span in flight until all is moved; between bursts nothing is, if `drains`."""
    under_way: deque[tuple[Ticket, Span]] = deque()
    free = list(spans)
    direction = moves[0][0]
    for writes, offset in moves:
        while under_way and (not free or (drains and writes != direction)):
            ticket, span = under_way.popleft()
            ticket.wait()
            free.append(span)
        direction = writes
        span = free.pop()
        verb = engine.submit_write if writes else engine.submit_read
        under_way.append((verb(file, offset, span), span))
    for ticket, _ in under_way:
        ticket.wait()


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("path", type=Path)
    parser.add_argument("workload")
    parser.add_argument("moved_bytes", type=int)
    parser.add_argument("transfer_bytes", type=int)
    parser.add_argument("in_flight", type=int)
    parser.add_argument("--hugepages", action="store_true")
    options = parser.parse_args()
    kind, _, registered = options.engine.partition("+")
    arena = HostArena(options.in_flight * options.transfer_bytes, hugepages=options.hugepages)
    spans = [arena.carve(options.transfer_bytes) for _ in range(options.in_flight)]
    for span in spans:
        span.view()[:] = os.urandom(4096) * (options.transfer_bytes // 4096)
    moves = plan(options.workload, options.moved_bytes, options.transfer_bytes)
    with open_engine(kind) as engine, open_direct(options.path) as file:
        if registered and isinstance(engine, IoUringEngine):
            for span in spans:
                refusal = engine.register(span)
                if refusal is not None:
                    raise SystemExit(refusal)
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        move(engine, file, spans, moves, drains=options.workload == "alternating")
        after, stop = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"cpu_s": cpu_s, "wall_s": stop - start}))


if __name__ == "__main__":
    main()
