"""Durable runs of a small model: configurations of every tier mix, and what each step should be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zero
from aio_ops import Engine
from tests.support.configs import make_config
from tests.support.observe import as_bits, digest

MIXES: dict[str, dict[str, Any]] = {
    "nvme": {"parameters": "nvme", "optimizer": "nvme", "host_memory": "44KB", "dtype": "bf16"},
    "state on nvme": {"optimizer": "nvme", "host_memory": "32KB"},
    "host": {"parameters": "cpu", "optimizer": "cpu", "dtype": "bf16"},
    "device": {"dtype": "fp32"},
    "nvme and host": {"parameters": "nvme", "optimizer": "nvme", "host_memory": "32KB"},
    "master on host": {"optimizer": "cpu", "dtype": "fp16"},
}


class Noisy(nn.Module):
    """A few layers, a frozen one, a buffer that counts, and dropout that draws random numbers."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.frozen = nn.Linear(width, width).requires_grad_(requires_grad=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = x.to(self.norm.weight.dtype)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = nn.functional.dropout(self.norm(self.frozen(x)), 0.25)
        return x.float().square().mean() + x.float().mean()


def make_noisy(seed: int = 0) -> Noisy:
    """Return a model; another seed gives other values, which a resumed run must not use."""
    torch.manual_seed(seed)
    return Noisy()


def batch(step: int, rank: int = 0) -> torch.Tensor:
    """Return the input of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 24, generator=generator)


def durable_config(path: str, name: str | None, mix: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of a run; without a name it is not durable."""
    config = make_config(nvme_path=path, sub_group_size=512, clip=0.5, **MIXES[mix])
    config["optimizer"]["params"]["lr"] = 1e-2
    config["tiers"]["nvme"] = [{"path": path}]
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}
    if name is not None:
        config["tiers"]["durable"] = {"name": name, **more}
    return config


def begin(
    config: dict[str, Any], *, seed: int = 0, io_engine: Engine | None = None
) -> zero.ZeroEngine:
    """Return an engine that begins or resumes a run."""
    engine, _, _, _ = zero.initialize(model=make_noisy(seed), config=config, io_engine=io_engine)
    return engine


def run_step(engine: zero.ZeroEngine) -> None:
    """Train the next step."""
    engine.backward(engine(batch(engine.global_steps, engine.global_rank)))
    engine.step()


def state_of(engine: zero.ZeroEngine) -> str:
    """Return a digest of everything that a step leaves: shards, buffers, counters, generators."""
    found = {}
    for state in zero.iterate_states(engine.module):
        for field in ("value", "fp32_param", "exp_avg", "exp_avg_sq"):
            tensor = getattr(state, field)
            if tensor is not None:
                found[f"{state.name}.{field}"] = as_bits(tensor)
    rest = (
        engine.global_steps,
        int(engine.module.seen),
        engine.get_lr(),
        engine.loss_scaler.state_dict(),
        torch.get_rng_state().sum().item(),
    )
    return f"{digest(found)[:16]} {rest}"


def expected(config: dict[str, Any], steps: int) -> list[str]:
    """Return the digest before the first step and after each, of a run that is never killed."""
    engine = begin(config)
    found = [state_of(engine)]
    for _ in range(steps):
        run_step(engine)
        found.append(state_of(engine))
    engine.destroy()
    return found
