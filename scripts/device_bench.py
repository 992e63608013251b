"""Measure the links of a GPU through our pinned memory, beside torch's: table and JSON.

    python scripts/device_bench.py /path/on/the/disk --json device.json

Host to device and back, each alone and both at once, from a PinnedArena and from torch's pinned
tensors, by turns. Then a round trip: what is read from a file into device memory while as much
device memory is written to the file, against the same with host memory alone, which is the slower
link: if everything overlaps, the device costs nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from places import folder_option

from aio_ops import DeviceMover, DeviceSpan, PinnedArena, Ticket, open_engine
from aio_ops.native_engine import NativeEngine
from estimators.command import output_option

MIB = 1 << 20
COPY_BYTES = 256 * MIB
TRANSFER_BYTES = 16 * MIB


def copy_rate(to_device: torch.Tensor | None, to_host: torch.Tensor | None) -> float:
    """Copy between the device and pinned memory; return bytes a second, both ways together."""
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    near = [torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    moved_bytes = 0
    for _ in range(8):
        if to_device is not None:
            with torch.cuda.stream(streams[0]):
                near[0].copy_(to_device, non_blocking=True)
            moved_bytes += COPY_BYTES
        if to_host is not None:
            with torch.cuda.stream(streams[1]):
                to_host.copy_(near[1], non_blocking=True)
            moved_bytes += COPY_BYTES
    torch.cuda.synchronize()
    return moved_bytes / (time.perf_counter() - start)


def by_turns(tries: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each as often as asked for, each round starting with another."""
    rates: dict[str, list[float]] = {name: [] for name in tries}
    names = list(tries)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            rates[name].append(tries[name]())
    return rates


def measure_copies(rounds: int) -> dict[str, list[float]]:
    """Return the rates of copies from our memory and from torch's."""
    arena = PinnedArena(2 * COPY_BYTES, device=0)
    whole = torch.frombuffer(arena.whole().view(), dtype=torch.uint8)
    ours = whole[:COPY_BYTES], whole[COPY_BYTES:]
    theirs = tuple(torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    tries: dict[str, Callable[[], float]] = {}
    for who, memory in (("arena", ours), ("torch", theirs)):
        tries[f"to device, {who}"] = partial(copy_rate, memory[0], None)
        tries[f"to host, {who}"] = partial(copy_rate, None, memory[1])
        tries[f"both, {who}"] = partial(copy_rate, *memory)
    return by_turns(tries, rounds)


class RoundTrip:
    """Half of a file is read while the other half is written, by way of the device or not."""

    def __init__(self, directory: Path, moved_bytes: int) -> None:
        engine = open_engine("auto", directory=directory, queue_depth=64)
        if not isinstance(engine, NativeEngine):
            raise SystemExit(f"only native engines move device memory, and this is {engine.name}")
        self.engine = engine
        self.moved_bytes = moved_bytes
        self.file = engine.create_file(directory, 2 * moved_bytes)
        self.mover = DeviceMover(engine, 0, slot_bytes=4 * MIB, slot_count=8)
        self.arena = PinnedArena(8 * TRANSFER_BYTES, device=0)
        self.arena.register_with(engine)
        self.spans = [self.arena.carve(TRANSFER_BYTES) for _ in range(8)]
        self.near = [torch.ones(moved_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        torch.cuda.synchronize()
        for span in self.spans:
            span.view()[:] = bytes([5]) * TRANSFER_BYTES
        for offset in range(0, 2 * moved_bytes, TRANSFER_BYTES):  # so that reads reach the disk
            engine.submit_write(self.file, offset, self.spans[0]).wait()

    def by_device(self) -> float:
        """Return bytes a second of each direction, through the device."""
        start = time.perf_counter()
        for offset in range(0, self.moved_bytes, TRANSFER_BYTES):
            pieces = [
                DeviceSpan(0, near.data_ptr() + offset, TRANSFER_BYTES, near) for near in self.near
            ]
            self.mover.submit_read(self.file, offset, pieces[0])
            self.mover.submit_write(self.file, self.moved_bytes + offset, pieces[1])
        self.mover.drain()
        return self.moved_bytes / (time.perf_counter() - start)

    def by_host(self) -> float:
        """Return the same between the file and host memory alone."""
        start = time.perf_counter()
        tickets: list[Ticket] = []
        for number, offset in enumerate(range(0, self.moved_bytes, TRANSFER_BYTES)):
            if number >= 4:
                for ticket in tickets[2 * (number - 4) : 2 * (number - 3)]:
                    ticket.wait()
            read, write = self.spans[number % 4], self.spans[4 + number % 4]
            tickets.append(self.engine.submit_read(self.file, offset, read))
            tickets.append(self.engine.submit_write(self.file, self.moved_bytes + offset, write))
        self.engine.drain()
        return self.moved_bytes / (time.perf_counter() - start)

    def close(self) -> None:
        """Give everything back."""
        self.mover.close()
        self.engine.close()


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=folder_option)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--mebibytes", type=int, default=512, help="read, and written, by a trip")
    parser.add_argument("--json", type=output_option)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    rates = measure_copies(options.rounds)
    trip = RoundTrip(options.directory, options.mebibytes * MIB)
    tries = {"disk and device": trip.by_device, "disk and host": trip.by_host}
    rates |= by_turns(tries, options.rounds)
    trip.close()
    table = Table("what", "GB/s, median", "least", "most")
    for name, own in rates.items():
        table.add_row(
            name, *(f"{value / 1e9:.2f}" for value in (statistics.median(own), min(own), max(own)))
        )
    console = Console(width=100)
    console.print(table)
    pairs = [(f"{way}, arena", f"{way}, torch") for way in ("to device", "to host", "both")]
    for ours, other in [*pairs, ("disk and device", "disk and host")]:
        ratios = [mine / its for mine, its in zip(rates[ours], rates[other], strict=True)]
        console.print(f"{ours} / {other}: {statistics.median(ratios):.3f}", highlight=False)
    if options.json:
        machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "rates": rates}) + "\n")


if __name__ == "__main__":
    main()
