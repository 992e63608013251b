"""Measure what a durable run costs: bytes in the swap file, bytes and seconds of a commit.

    python scripts/durable_bench.py /path/on/the/disk --steps 6

A made-up model is trained three ways, with its state on NVMe, in host memory and half in each, each
plain and durable (a commit every step). Steps of both take turns, so that a disk that changes its
mind changes it for both; medians are compared.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from places import folder_option

import zero
from estimators.command import output_option
from zero.durable import DurableRun

WIDTH = 512


class Layers(nn.Module):
    """Square layers: about a million parameters for every four."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def make_config(path: Path, share: float, layers: int, name: str | None) -> dict[str, Any]:
    """Return a configuration that keeps `share` of parameters and state in host memory."""
    whole = layers * (WIDTH * WIDTH + WIDTH) * 16
    device = "cpu" if share >= 1 else "nvme"
    stage: dict[str, Any] = {"stage": 3, "sub_group_size": 1_000_000}
    for section in ("offload_param", "offload_optimizer"):
        stage[section] = {"device": device}
    budget = max(int(whole * share), 16 << 20) if share < 1 else 2 * whole
    tiers: dict[str, Any] = {"host_memory": budget, "nvme": [{"path": str(path)}]}
    if name is not None:
        tiers["durable"] = {"name": name}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": stage,
        "tiers": tiers,
    }


def timed_step(engine: zero.ZeroEngine) -> float:
    """Return the seconds of one step."""
    started = time.perf_counter()
    engine.backward(engine(torch.ones(2, WIDTH)))
    engine.step()
    return time.perf_counter() - started


def run_of(engine: zero.ZeroEngine) -> DurableRun:
    """Return the durable run of an engine that has one."""
    if engine.durable is None:
        raise RuntimeError("the engine is not durable, and its configuration asked for it")
    return engine.durable


def measure(path: Path, share: float, layers: int, steps: int) -> dict[str, Any]:
    """Train plain and durable in turn, and return what differed."""
    engines = []
    for name in (None, "bench"):
        config = make_config(path, share, layers, name)
        engines.append(zero.initialize(model=Layers(layers), config=config)[0])
    plain, durable = engines
    seconds: tuple[list[float], list[float]] = ([], [])
    commits, moved = [], []
    for _ in range(steps):
        for index, engine in enumerate(engines):
            seconds[index].append(timed_step(engine))
        report = run_of(durable).last_commit
        if report is not None:
            commits.append(report.seconds)
            moved.append(report.resident_bytes + report.manifest_bytes)
    memory = durable.plan.memory
    found = {
        "host_share": share,
        "parameters": sum(each.numel() for each in durable.module.parameters()),
        "swap_bytes": plain.plan.memory.swap_file_bytes,
        "durable_swap_bytes": memory.swap_file_bytes,
        "commit_bytes": statistics.median(moved),
        "step_s": statistics.median(seconds[0][1:]),
        "durable_step_s": statistics.median(seconds[1][1:]),
        "commit_s": statistics.median(commits[1:]),
    }
    for engine in engines:
        engine.destroy()
    config = make_config(path, share, layers, "bench")
    again = zero.initialize(model=Layers(layers), config=config)[0]
    resumed = run_of(again).resumed
    if resumed is None:
        raise RuntimeError(f"the run in {path / 'bench'} had commits, and was not resumed")
    found["resume_bytes"], found["resume_s"] = resumed.read_bytes, resumed.seconds
    again.destroy()
    shutil.rmtree(path / "bench")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=folder_option, help="a directory on the disk")
    parser.add_argument("--layers", type=int, default=80, help="layers of 262,656 parameters")
    parser.add_argument("--steps", type=int, default=6, help="steps of each run, the first is left")
    parser.add_argument("--json", type=output_option, help="a file for the numbers")
    options = parser.parse_args(arguments)
    if (options.path / "bench").exists():
        parser.error(f"{options.path / 'bench'} is there already; remove it, or name another path")
    warnings.simplefilter("ignore")
    rows = [
        measure(options.path, share, options.layers, options.steps) for share in (0.0, 0.5, 1.0)
    ]
    table = Table(title=f"Durable beside plain, {rows[0]['parameters']:,} parameters in fp32")
    for title in ("in host memory", "swap file", "a commit writes", "step", "commit", "resume"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row['host_share']:.0%}",
            f"{row['swap_bytes'] / 1e6:.0f} -> {row['durable_swap_bytes'] / 1e6:.0f} MB",
            f"{row['commit_bytes'] / 1e6:.1f} MB",
            f"{row['step_s']:.2f} -> {row['durable_step_s']:.2f} s",
            f"{row['commit_s']:.2f} s",
            f"{row['resume_bytes'] / 1e6:.0f} MB in {row['resume_s']:.2f} s",
        )
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
