"""Measure how fast checkpoints are saved and loaded against the rate of the disk, in one run.

    python scripts/checkpoint_bench.py /path/on/the/disk --mega-parameters 256 --json ckpt.json

A made-up model is built, its optimizer state filled with random numbers, and saved and loaded in
turn with plain transfers of the same number of bytes on the same disk: a write and sync, a read,
and, where the state rests on NVMe, a copy, because every byte is then read and written. Rounds take
turns, so that a disk that changes its mind changes it for all; medians are compared.
"""

import argparse
import collections
import json
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import zero
from aio_ops import DataFile, Engine, HostArena, open_engine
from offload import Field
from zero.checkpoint import verify

BLOCK_BYTES = 4 << 20
IN_FLIGHT = 16
WIDTH = 2048


class Layer(nn.Module):
    """Two projections, as a transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same shape."""
        output: torch.Tensor = x + self.down(self.up(self.norm(x)))
        return output


@dataclass(frozen=True)
class Round:
    """Seconds of one round."""

    write: float
    read: float
    copy: float | None
    save: float
    load: float


def build(folder: Path, tier: str, mega_parameters: int) -> zero.ZeroEngine:
    """Return an engine whose state is random."""
    layers = max(mega_parameters * 10**6 // (4 * WIDTH * WIDTH), 1)
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    offload: dict[str, Any] = {"device": tier}
    stage: dict[str, Any] = {"stage": 3, "sub_group_size": 16_000_000}
    if tier == "nvme":
        offload["nvme_path"] = str(folder)
    if tier != "none":
        stage["offload_optimizer"] = offload
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": stage,
        "tiers": {"host_memory": "2GB" if tier == "nvme" else "auto"},
    }
    engine = zero.initialize(model=model, config=config)[0]
    for parameter in engine.module.parameters():
        for field in (Field.EXP_AVG, Field.EXP_AVG_SQ):
            zero.safe_set_full_optimizer_state(parameter, torch.rand(parameter.shape), field.value)
    return engine


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_write(io: Engine, path: Path, size_bytes: int) -> None:
    """Write and sync a file, `IN_FLIGHT` blocks at a time, nothing computed."""
    arena = HostArena(IN_FLIGHT * BLOCK_BYTES)
    spans = [arena.carve(BLOCK_BYTES) for _ in range(IN_FLIGHT)]
    for span in spans:
        span.view()[:] = torch.randint(0, 255, (BLOCK_BYTES,), dtype=torch.uint8).numpy().tobytes()
    with DataFile.create_new(path, size_bytes) as file:
        flying: collections.deque[Any] = collections.deque()
        for number, offset in enumerate(range(0, size_bytes, BLOCK_BYTES)):
            if len(flying) == IN_FLIGHT:
                flying.popleft().wait()
            part = min(BLOCK_BYTES, file.size_bytes - offset)
            span = spans[number % IN_FLIGHT].sub(0, part)
            flying.append(io.submit_write(file, offset, span))
        for ticket in flying:
            ticket.wait()
        file.finish()
    arena.close()


class PlainRead:
    """Reads a file, and writes what was read to another if one is given."""

    def __init__(self, io: Engine, source: DataFile, copy: DataFile | None) -> None:
        self._io = io
        self._source = source
        self._copy = copy
        self._arena = HostArena(2 * IN_FLIGHT * BLOCK_BYTES)
        self._free = [self._arena.carve(BLOCK_BYTES) for _ in range(2 * IN_FLIGHT)]
        self._reads: collections.deque[Any] = collections.deque()
        self._writes: collections.deque[Any] = collections.deque()

    def run(self) -> None:
        """Move all of it."""
        for offset in range(0, self._source.size_bytes, BLOCK_BYTES):
            if len(self._reads) == IN_FLIGHT:
                self._finish_read()
            while not self._free:
                self._finish_write()
            span = self._free.pop()
            part = min(BLOCK_BYTES, self._source.size_bytes - offset)
            ticket = self._io.submit_read(self._source, offset, span.sub(0, part))
            self._reads.append((ticket, offset, span))
        while self._reads:
            self._finish_read()
        while self._writes:
            self._finish_write()
        self._arena.close()

    def _finish_read(self) -> None:
        ticket, offset, span = self._reads.popleft()
        ticket.wait()
        if self._copy is None:
            self._free.append(span)
            return
        part = min(BLOCK_BYTES, self._copy.size_bytes - offset)
        self._writes.append((self._io.submit_write(self._copy, offset, span.sub(0, part)), span))
        if len(self._writes) > IN_FLIGHT:
            self._finish_write()

    def _finish_write(self) -> None:
        ticket, span = self._writes.popleft()
        ticket.wait()
        self._free.append(span)


def plain_read(io: Engine, path: Path) -> None:
    """Read a file."""
    with DataFile.open_existing(path) as source:
        PlainRead(io, source, None).run()


def plain_copy(io: Engine, path: Path, target: Path) -> None:
    """Copy a file and sync the copy."""
    with (
        DataFile.open_existing(path) as source,
        DataFile.create_new(target, source.size_bytes) as copy,
    ):
        PlainRead(io, source, copy).run()
        copy.finish()


def measure(folder: Path, tier: str, mega_parameters: int, rounds: int) -> dict[str, Any]:
    """Return rates of one tier in bytes a second, and shares of the disk's."""
    engine = build(folder, tier, mega_parameters)
    plain, copied = folder / "plain.bin", folder / "copied.bin"
    found: list[Round] = []
    with open_engine("auto", directory=folder) as io:
        engine.save_checkpoint(folder / "ck", "one")
        size = sum(path.stat().st_size for path in (folder / "ck" / "one").iterdir())
        for number in range(rounds):
            write = timed(lambda: plain_write(io, plain, size))
            tag = f"round{number}"
            save = timed(partial(engine.save_checkpoint, folder / "ck", tag))
            read = timed(lambda: plain_read(io, plain))
            load = timed(lambda: engine.load_checkpoint(folder / "ck", verify=False))
            copy = timed(lambda: plain_copy(io, plain, copied)) if tier == "nvme" else None
            found.append(Round(write, read, copy, save, load))
            plain.unlink()
            copied.unlink(missing_ok=True)
            for path in (folder / "ck").glob("[or]*"):
                if path.name != tag and path.is_dir():
                    shutil.rmtree(path)  # outside of what is measured
    verify(folder / "ck")
    engine.destroy()
    seconds = {
        name: statistics.median(getattr(each, name) for each in found)
        for name in ("write", "read", "save", "load")
    }
    limits = {"save": seconds["write"], "load": seconds["read"]}
    if tier == "nvme":
        seconds["copy"] = statistics.median(each.copy or 0.0 for each in found)
        limits = {"save": seconds["copy"], "load": seconds["copy"]}
    return {
        "tier": tier,
        "bytes": size,
        "bytes_per_s": {name: size / each for name, each in seconds.items()},
        "share_of_disk": {name: limits[name] / seconds[name] for name in limits},
        "rounds": [vars(each) for each in found],
    }


def main() -> None:
    """Measure each tier, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a folder on the disk; nothing is left in it")
    parser.add_argument("--mega-parameters", type=int, default=64)
    parser.add_argument("--tiers", nargs="+", default=["cpu", "nvme"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    given = parser.parse_args()
    results = []
    for tier in given.tiers:
        folder = given.folder / f"checkpoint-bench-{tier}"
        folder.mkdir()
        try:
            results.append(measure(folder, tier, given.mega_parameters, given.rounds))
        finally:
            shutil.rmtree(folder)
    table = Table(title=f"{platform.node()}: GB/s, median of {given.rounds}")
    for name in ("state on", "GB", "write", "read", "copy", "save", "of disk", "load", "of disk"):
        table.add_column(name, justify="right")
    for each in results:
        rate = {name: f"{value / 1e9:.2f}" for name, value in each["bytes_per_s"].items()}
        share = {name: f"{value:.0%}" for name, value in each["share_of_disk"].items()}
        table.add_row(
            each["tier"],
            f"{each['bytes'] / 1e9:.2f}",
            rate["write"],
            rate["read"],
            rate.get("copy", ""),
            rate["save"],
            share["save"],
            rate["load"],
            share["load"],
        )
    Console().print(table)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
