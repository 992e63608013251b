"""Measure how fast checkpoints are saved and loaded against the rate of the disk, in one run.

    python scripts/checkpoint_bench.py /path/on/the/disk --mega-parameters 256 --json ckpt.json

A made-up model is built, its state filled with random numbers, and saved and loaded in turn with
plain transfers of the same number of bytes on the same disk, by the same engine, all direct, with
the same alignment: a write and sync, a read, and, where the state rests on NVMe, a copy, because
every byte is then read and written. Each round measures a save beside a write and a load beside a
read, first the one, then the other; its shares are of neighbours in time, so a disk that changes
its mind changes it for both. Medians are compared, and the spread is told. A row is printed as soon
as it is there.

Saving replaces the checkpoint of the round before. Loading compares all checksums.
"""

import argparse
import collections
import json
import math
import platform
import random
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero
from aio_ops import DataFile, Engine, HostArena, open_engine
from offload import Field
from offload.groups import write_group
from zero.checkpoint import verify

BLOCK_BYTES = 4 << 20
IN_FLIGHT = 16
WIDTH = 2048
COLUMNS = ("state on", "GB", "write", "save", "share", "read", "load", "share", "copy")


class Layer(nn.Module):
    """Two projections, as a transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, 2 * WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same shape."""
        hidden = nn.functional.linear(self.norm(x), self.up)
        output: torch.Tensor = x + nn.functional.linear(hidden, self.down)
        return output


@dataclass(frozen=True)
class Round:
    """Seconds of one round."""

    write: float
    save: float
    read: float
    load: float
    copy: float | None

    def shares(self) -> dict[str, float]:
        """Return saving and loading as shares of the disk's rate."""
        limits = (self.write, self.read) if self.copy is None else (self.copy, self.copy)
        return {"save": limits[0] / self.save, "load": limits[1] / self.load}


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
    store = engine._runtime.store
    fields = (Field.MASTER, Field.EXP_AVG, Field.EXP_AVG_SQ)
    values = torch.rand(max(group.numel for group in store.plan.sub_groups))
    for group in store.plan.sub_groups:
        with write_group(store, group, fields, keeps=False, is_covered=True) as writer:
            for field in fields:
                writer.put(field, 0, values[: group.numel])
    if store.pager is not None:
        store.pager.drain()
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
    data = random.randbytes(BLOCK_BYTES)
    for span in spans:
        span.view()[:] = data
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


class Case:
    """One tier, measured round by round in a folder of its own."""

    def __init__(self, folder: Path, tier: str, mega_parameters: int) -> None:
        self.tier = tier
        self._folder = folder
        self._engine = build(folder, tier, mega_parameters)
        self._engine.save_checkpoint(folder / "ck", "one")
        self.size_bytes = sum(each.stat().st_size for each in (folder / "ck" / "one").iterdir())

    def round(self, number: int) -> Round:
        """Measure once; every other round in the other order."""
        plain, copied = self._folder / "plain.bin", self._folder / "copied.bin"
        with open_engine("auto", directory=self._folder) as io:
            writes = {
                "write": lambda: plain_write(io, plain, self.size_bytes),
                "save": lambda: self._engine.save_checkpoint(self._folder / "ck", "one"),
            }
            reads = {
                "read": lambda: plain_read(io, plain),
                "load": lambda: self._engine.load_checkpoint(self._folder / "ck", verify=False),
            }
            seconds: dict[str, float] = {}
            for pair in (writes, reads):
                for name in sorted(pair, reverse=bool(number % 2)):
                    seconds[name] = timed(pair[name])
                    self._engine.wait_for_checkpoint()  # the old one is removed: not measured
            copy = None
            if self.tier == "nvme":
                copy = timed(lambda: plain_copy(io, plain, copied))
                copied.unlink()
            plain.unlink()
        return Round(**seconds, copy=copy)

    def close(self) -> None:
        """Compare what was saved last with its checksums, and end."""
        verify(self._folder / "ck")
        self._engine.destroy()


def summary(tier: str, size_bytes: int, rounds: list[Round]) -> dict[str, Any]:
    """Return medians, in bytes a second, and shares of the disk's rate with their spread."""
    seconds = {
        name: statistics.median(getattr(each, name) or math.nan for each in rounds)
        for name in ("write", "save", "read", "load", "copy")
    }
    shares = {name: sorted(each.shares()[name] for each in rounds) for name in ("save", "load")}
    return {
        "tier": tier,
        "bytes": size_bytes,
        "bytes_per_s": {name: size_bytes / each for name, each in seconds.items() if each > 0},
        "share_of_disk": {
            name: {"median": statistics.median(found), "least": found[0], "most": found[-1]}
            for name, found in shares.items()
        },
        "rounds": [vars(each) for each in rounds],
    }


def row(name: str, size_bytes: int, rounds: list[Round]) -> str:
    """Return a line of the table: one round, or what all of them say."""
    found = summary(name, size_bytes, rounds)
    rates = {key: f"{value / 1e9:.2f}" for key, value in found["bytes_per_s"].items()}
    shares = {}
    for key, share in found["share_of_disk"].items():
        shares[key] = f"{share['median']:.0%}"
        if len(rounds) > 1:
            shares[key] += f" ({share['least']:.0%}-{share['most']:.0%})"
    cells = (
        name,
        f"{size_bytes / 1e9:.2f}",
        *(rates["write"], rates["save"], shares["save"]),
        *(rates["read"], rates["load"], shares["load"]),
        rates.get("copy", "-"),
    )
    return " ".join(f"{cell:>16}" for cell in cells)


def main() -> None:
    """Measure each tier, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a folder on the disk; nothing is left in it")
    parser.add_argument("--mega-parameters", type=int, default=128)
    parser.add_argument("--tiers", nargs="+", default=["cpu", "nvme"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    given = parser.parse_args()
    print(f"{platform.node()}: GB/s; shares of the disk's rate in the same round")
    print(" ".join(f"{name:>16}" for name in COLUMNS), flush=True)
    results = []
    for tier in given.tiers:
        folder = given.folder / f"checkpoint-bench-{tier}"
        folder.mkdir()
        try:
            case = Case(folder, tier, given.mega_parameters)
            rounds = []
            for number in range(given.rounds):
                rounds.append(case.round(number))
                print(row(f"{tier} {number + 1}", case.size_bytes, rounds[-1:]), flush=True)
            print(row(f"{tier}, median", case.size_bytes, rounds), flush=True)
            results.append(summary(tier, case.size_bytes, rounds))
            case.close()
        finally:
            shutil.rmtree(folder)
        if given.json is not None:
            given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
