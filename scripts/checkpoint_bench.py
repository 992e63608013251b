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
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from places import folder_option

import zero
from aio_ops import DataFile, HostArena, open_engine
from estimators import Section
from estimators.command import output_option
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
    stage: dict[str, Any] = {"stage": 3, "sub_group_size": 8_000_000}
    if tier == "nvme":
        offload["nvme_path"] = str(folder)
    if tier != "none":
        stage["offload_optimizer"] = offload
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": stage,
        "tiers": {"host_memory": "300MB" if tier == "nvme" else "auto"},
    }
    engine = zero.initialize(model=model, config=config)[0]
    store = engine._runtime.store
    groups = store.plan.sub_groups
    paged = sum(group.numel for group in groups if group.on_nvme(Section.STATE))
    if tier == "nvme" and 4 * paged < 3 * sum(group.numel for group in groups):
        raise SystemExit("more than a quarter of the state fits memory: ask for more parameters")
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


class Plain:
    """Plain transfers, nothing computed, from and to memory that is there before."""

    def __init__(self, folder: Path) -> None:
        self._io = open_engine("auto", directory=folder)
        arena = HostArena(2 * IN_FLIGHT * BLOCK_BYTES)
        self._spans = [arena.carve(BLOCK_BYTES) for _ in range(2 * IN_FLIGHT)]
        data = random.randbytes(BLOCK_BYTES)
        for span in self._spans:
            span.view()[:] = data

    def write(self, path: Path, size_bytes: int) -> None:
        """Write and sync a new file, `IN_FLIGHT` blocks at a time."""
        with DataFile.create_new(path, size_bytes) as file:
            flying: collections.deque[Any] = collections.deque()
            for number, offset in enumerate(range(0, size_bytes, BLOCK_BYTES)):
                if len(flying) == IN_FLIGHT:
                    flying.popleft().wait()
                part = min(BLOCK_BYTES, file.size_bytes - offset)
                span = self._spans[number % IN_FLIGHT].sub(0, part)
                flying.append(self._io.submit_write(file, offset, span))
            for ticket in flying:
                ticket.wait()
            file.finish()

    def read(self, path: Path) -> None:
        """Read a file, `IN_FLIGHT` blocks at a time."""
        with DataFile.open_existing(path) as source:
            self._move(source, None)

    def copy(self, path: Path, target: Path) -> None:
        """Copy a file and sync the copy, `IN_FLIGHT` blocks each way at a time."""
        with (
            DataFile.open_existing(path) as source,
            DataFile.create_new(target, source.size_bytes) as copy,
        ):
            self._move(source, copy)
            copy.finish()

    def close(self) -> None:
        """Give the engine up."""
        self._io.close()

    def _move(self, source: DataFile, copy: DataFile | None) -> None:
        free = list(self._spans)
        reads: collections.deque[Any] = collections.deque()
        writes: collections.deque[Any] = collections.deque()
        offsets = iter(range(0, source.size_bytes, BLOCK_BYTES))
        while True:
            while free and len(reads) < IN_FLIGHT:
                offset = next(offsets, None)
                if offset is None:
                    break
                span = free.pop()
                part = span.sub(0, min(BLOCK_BYTES, source.size_bytes - offset))
                reads.append((self._io.submit_read(source, offset, part), offset, span))
            if not reads and not writes:
                return
            if reads and (free or copy is None or not writes):
                ticket, offset, span = reads.popleft()
                ticket.wait()
                if copy is None:
                    free.append(span)
                    continue
                part = span.sub(0, min(BLOCK_BYTES, copy.size_bytes - offset))
                writes.append((self._io.submit_write(copy, offset, part), span))
            else:
                ticket, span = writes.popleft()
                ticket.wait()
                free.append(span)


class Case:
    """One tier, measured round by round in a folder of its own."""

    def __init__(self, folder: Path, tier: str, mega_parameters: int) -> None:
        self.tier = tier
        self._folder = folder
        self._engine = build(folder, tier, mega_parameters)
        self._plain = Plain(folder)
        self._engine.save_checkpoint(folder / "ck", "one")
        self.size_bytes = sum(each.stat().st_size for each in (folder / "ck" / "one").iterdir())

    def round(self, number: int) -> Round:
        """Measure once; every other round in the other order."""
        plain, copied = self._folder / "plain.bin", self._folder / "copied.bin"
        writes = {
            "write": lambda: self._plain.write(plain, self.size_bytes),
            "save": lambda: self._engine.save_checkpoint(self._folder / "ck", "one"),
        }
        reads = {
            "read": lambda: self._plain.read(plain),
            "load": lambda: self._engine.load_checkpoint(self._folder / "ck", verify=False),
        }
        seconds: dict[str, float] = {}
        for pair in (writes, reads):
            for name in sorted(pair, reverse=bool(number % 2)):
                seconds[name] = timed(pair[name])
                self._engine.wait_for_checkpoint()  # the old one is removed: not measured
        copy = None
        if self.tier == "nvme":
            copy = timed(lambda: self._plain.copy(plain, copied))
            copied.unlink()
        plain.unlink()
        return Round(**seconds, copy=copy)

    def close(self) -> None:
        """Compare what was saved last with its checksums, and end."""
        verify(self._folder / "ck")
        self._plain.close()
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
    parser.add_argument(
        "folder", type=folder_option, help="a folder on the disk; nothing is left in it"
    )
    parser.add_argument("--mega-parameters", type=int, default=128)
    parser.add_argument("--tiers", nargs="+", default=["cpu", "nvme"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=output_option, help="where to write the numbers")
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
