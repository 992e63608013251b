"""Train a model larger than its host budget and report what the kernel says it took, as JSON.

Run as `python budget.py ARGUMENTS`, the arguments being one JSON object: see `Job`. After its
baseline the process waits for a line, before which the parent may limit the cgroup that it is in.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero
from estimators import Section, Tier, step_traffic
from offload import disk_bytes, process_bytes
from tests.support.configs import make_config
from tests.support.observe import process_io_bytes
from tests.support.tiny import make_batch, make_model

WIDTH = 1024
STATE_BYTES = 12
"""Parameter and state of one fp32 parameter."""


@dataclass(frozen=True)
class Job:
    """What the parent asks for."""

    nvme_path: str
    host_bytes: int
    factor: int
    steps: int = 2
    accumulation: int = 2
    clip: float = 0.1
    dtype: str = "fp32"
    blocks_per_unit: int = 4
    rlimit: bool = False
    slack: float = 0.05
    out: str | None = None
    """Directory for a file a rank, instead of lines; nobody sets a limit then."""


class Block(nn.Module):
    """A few square layers: one unit."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def initialise(module: nn.Module) -> None:
    """Give one module of a model on meta its values."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.02)


def make_large_model(job: Job) -> nn.Module:
    """Return a model on meta whose parameters and state are `factor` times the budget."""
    unit_numel = job.blocks_per_unit * (WIDTH * WIDTH + WIDTH)
    units = -(-job.factor * job.host_bytes // (unit_numel * STATE_BYTES))
    with torch.device("meta"):
        return nn.Sequential(*(Block(job.blocks_per_unit) for _ in range(units)))


def train_tiny(job: Job) -> None:
    """Train one step of a tiny model, so that everything is loaded that training loads."""
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=job.nvme_path, host_memory="40KB"
    )
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    engine.destroy()


def wait_for_limit(job: Job, plan_bytes: int) -> None:
    """Tell the parent that the baseline is reached, and wait until the limit is set."""
    if job.out is not None:
        return
    sys.stdout.write(json.dumps({"allow_bytes": int(plan_bytes * (1 + job.slack))}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    if job.rlimit:
        limit = process_bytes("VmData")["VmData"] + int(plan_bytes * (1 + job.slack)) + (64 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def train(job: Job) -> dict[str, Any]:
    """Train and return planned and measured bytes."""
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=job.nvme_path,
        host_memory=job.host_bytes,
        accumulation=job.accumulation,
        clip=job.clip,
        dtype=job.dtype,
    )
    model = make_large_model(job)
    plan = zero.plan_memory(model, config).memory
    wait_for_limit(job, plan.host_bytes + plan.device_bytes)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts from here
    baseline = process_bytes("VmRSS")["VmRSS"]
    anonymous = smaps_bytes()["Anonymous"]
    engine, _, _, _ = zero.initialize(model=model, config=config, init_fn=initialise)
    after_start = process_bytes("VmHWM")["VmHWM"]
    io_before = process_io_bytes()
    norms = []
    for step in range(job.steps):
        for micro in range(job.accumulation):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
            x = x.to(torch.bfloat16 if job.dtype == "bf16" else torch.float32)
            engine.backward(engine(x).float().square().mean())
        engine.step()
        norms.append(engine.get_global_grad_norm())
    io_after = process_io_bytes()
    outcome = {
        **measure(engine, job),
        "baseline": baseline,
        "anonymous_baseline": anonymous,
        "peak_after_start": after_start,
        "norms": norms,
        "kernel_read": io_after[0] - io_before[0],
        "kernel_written": io_after[1] - io_before[1],
    }
    engine.destroy()
    return outcome


def measure(engine: zero.ZeroEngine, job: Job) -> dict[str, Any]:
    """Return what was planned and what is there."""
    plan = engine.plan.memory
    peak = process_bytes("VmHWM", "VmLck")
    traffic = step_traffic(plan, job.accumulation)
    kept = (Section.PARAMETER, Section.STATE)
    return {
        "peak": peak["VmHWM"],
        "locked": peak["VmLck"],
        "host_planned": plan.host_bytes,
        "host_budget": plan.host_budget_bytes,
        "device_planned": plan.device_bytes,
        "swap_planned": plan.swap_file_bytes,
        "swap_blocks": disk_bytes(engine._runtime.store.swap_file),
        "lines": engine.memory_report()["lines"],
        "parameters_and_state": sum(
            plan.resident_section_bytes(tier, section)
            for tier in (Tier.DEVICE, Tier.HOST)
            for section in kept
        )
        + sum(plan.nvme_section_bytes(section) for section in kept),
        "steps": engine.ledger.report().to_dicts(),
        "planned_read": traffic.total_read_bytes,
        "planned_written": traffic.total_written_bytes,
        "smaps": smaps_bytes(),
    }


def smaps_bytes() -> dict[str, int]:
    """Return the process's anonymous and locked bytes as smaps adds them up."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, _, text = line.partition(":")
        if name in ("Rss", "Anonymous", "Locked", "Swap"):
            found[name] = int(text.split()[0]) * 1024
    return found


def main() -> None:
    """Run one job."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    zero.init_distributed()
    train_tiny(job)
    outcome = train(job)
    if job.out is None:
        sys.stdout.write(json.dumps(outcome) + "\n")
        return
    rank = torch.distributed.get_rank()
    (Path(job.out) / f"rank{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
