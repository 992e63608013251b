"""Training that uses everything at once, on one rank or several, with delays or without."""

from __future__ import annotations

import collections
import hashlib
import warnings
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
import zero.comm
from tests.support.configs import make_config
from tests.support.delays import (
    KINDS,
    Delays,
    late_collectives,
    late_device,
    open_late_engine,
)
from tests.support.observe import digest, full_parameters
from tests.support.situations import WIDTH, Block, Either, Mixture

STEPS = 2


class Everything(nn.Module):
    """Branches by rank and by step, experts, layers used twice, two kinds of checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList([Block(), Block(), Either(), Mixture(), Block()])
        self.out = nn.Linear(WIDTH, 4)
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        first, second, either, mixture, last = self.h
        either.goes_left = (rank + step) % 2 == 0
        y = first(self.inp(x))
        y = checkpoint(second, y, use_reentrant=False)
        y = first(mixture(either(y)))
        y = checkpoint(second, y, use_reentrant=True) if y.requires_grad else y
        if step % 2:
            y = last(y)
        found: torch.Tensor = self.out(y)
        return found


def delayed_config(path: str, rank_memory_kb: int, world_size: int) -> dict[str, Any]:
    """Return a configuration under which sections rest on the host and on NVMe, in parts."""
    return make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=path,
        host_memory=f"{rank_memory_kb * world_size}KB",
        sub_group_size=256,
        accumulation=2,
        clip=0.1,
    )


def batch(rank: int, number: int) -> torch.Tensor:
    """Return a batch that depends on rank and number only."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, WIDTH, generator=generator)


def local_state(model: nn.Module) -> bytes:
    """Return the bits of this rank's part of masters and moments, without a collective."""
    found = []
    for parameter in model.parameters():
        parts = [zero.safe_get_local_fp32_param(parameter)]
        parts += [
            zero.safe_get_local_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")
        ]
        found += [each.numpy().tobytes() for each in parts if each is not None]
    return b"".join(found)


def train(config: dict[str, Any], rank: int, **options: Any) -> dict[str, Any]:
    """Train a few steps and return the bits of all that came of it, and what moved."""
    torch.manual_seed(3)
    model = Everything()
    engine, _, _, _ = zero.initialize(model=model, config=config, **options)
    bits = hashlib.sha256()
    for step in range(STEPS):
        y = engine(batch(rank, 3 * step), rank, step)
        engine.backward(y[:, 0].square().mean(), retain_graph=True)
        engine.backward(y[:, 1:].abs().mean())
        with torch.no_grad():
            seen = engine(batch(rank, 3 * step + 1), rank, step)
        weight = model.h[1].a.weight
        loss = engine(batch(rank, 3 * step + 2), rank, step + 1).square().mean()
        engine.backward(loss + 1e-2 * weight.square().sum())
        engine.step()
        for each in (y, seen, loss):
            bits.update(each.detach().contiguous().numpy().tobytes())
        bits.update(str(engine.get_global_grad_norm()).encode())
    with zero.GatheredParameters(list(model.out.parameters()), modifier_rank=0):
        model.out.bias.data.add_(rank + 1.0)
    bits.update(digest(full_parameters(engine)).encode())
    bits.update(local_state(model))
    moved = engine.ledger.snapshot()
    tiers = {**moved.bytes_by_class, **moved.resident_bytes}
    held = [unit.name for unit in engine._runtime.units if unit.moves and unit.is_unsharded]
    engine.destroy()
    return {"bits": bits.hexdigest(), "tiers": tiers, "held": held}


def train_late(path: str, rank: int, world_size: int, seed: int) -> dict[str, Any]:
    """Train with the delays of a seed, and say also what was delayed."""
    delays = Delays(seed, rank, world_size)
    engine = open_late_engine(seed, delays, path)
    large_bytes = 256 if seed % 4 < 2 else 1 << 20
    memory_kb = (24, 16, 64 if world_size == 1 else 32)[seed % 3]
    config = delayed_config(path, memory_kb, world_size)
    config["tiers"]["update_device"] = "cpu" if seed % 5 == 4 else "auto"
    with (
        late_collectives(delays) as collectives,
        late_device(seed, delays) as device,
        mock.patch.object(zero.comm, "LARGE_GATHER_BYTES", large_bytes),
        warnings.catch_warnings(),
    ):
        found = train(config, rank, io_engine=engine)
    found["seen"] = {
        **{what: delays.counts[what] for what in KINDS},
        **{f"bytes copied {way}": size for way, size in device.copied_bytes.items()},
        "bytes in collectives": collectives.bytes,
        "bytes read": sum(size for key, size in found["tiers"].items() if "read" in key),
        "bytes written": sum(size for key, size in found["tiers"].items() if "write" in key),
    }
    return found


def compare_seeds(path: str, rank: int, world_size: int, seeds: list[int]) -> dict[str, Any]:
    """Return how runs with delays differ from one without, and the least of what was delayed."""
    expected = train(delayed_config(path, 24, world_size), rank)
    tiers: collections.Counter[str] = collections.Counter(expected["tiers"])
    wrong = []
    least: dict[str, int] = {}
    for seed in seeds:
        found = train_late(path, rank, world_size, seed)
        if found["bits"] != expected["bits"] or found["held"]:
            wrong.append(seed)
        tiers.update(found["tiers"])
        for what, count in found["seen"].items():
            least[what] = min(count, least.get(what, count))
    return {"wrong": wrong, "least": least, "tiers": tiers}
