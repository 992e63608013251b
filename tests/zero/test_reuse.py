"""Units that are used again soon are not gathered again, and no bit of the result changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
import zero.planning
from estimators.layout import align_up
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.observe import digest, full_parameters
from tests.support.simulated_device import SimulatedDevice
from zero.reuse import KEPT

pytestmark = pytest.mark.nvme
WIDTH = 32
BLOCKS = 4
FAR = 10**9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.a(x))


class Net(nn.Module):
    """Walks through blocks, of which some come again, or all run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH, bias=False)
        self.h = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.walk: tuple[int, ...] = tuple(range(BLOCKS))
        self.reruns = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for number in self.walk:
            again = self.reruns and torch.is_grad_enabled()
            x = checkpoint(self.h[number], x, use_reentrant=True) if again else self.h[number](x)
        return x.square().mean()


ROOT = WIDTH * WIDTH
NUMEL = WIDTH * WIDTH + WIDTH


def start(scratch: Path, distance: int, live: int = FAR) -> zero.ZeroEngine:
    torch.manual_seed(2)
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=str(scratch), host_memory="300KB"
    )
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 0
    config["zero_optimization"]["stage3_max_reuse_distance"] = distance
    config["zero_optimization"]["stage3_max_live_parameters"] = live
    engine, _, _, _ = zero.initialize(model=Net(), config=config)
    return engine


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(scratch: Path, rank: int, distance: int, **changes: Any) -> dict[str, Any]:
    """Train three steps, and return how often the last one has gathered and kept each unit."""
    engine = start(scratch, distance, changes.pop("live", FAR))
    for name, value in changes.items():
        setattr(engine.module, name, value)
    for step in range(3):
        with torch.no_grad():
            engine(batch(step + 9, rank).to(engine.device))
        engine.ledger.events.clear()
        before = engine.ledger.snapshot()
        engine.backward(engine(batch(step, rank).to(engine.device)))
        moved = engine.ledger.snapshot().minus(before)
        engine.step()
    counts: dict[str, Counter[str]] = {"gather": Counter(), "kept": Counter()}
    for what, name in engine.ledger.events:
        if what in counts:
            counts[what][name.partition("[")[0]] += 1
    peaks = engine.ledger.peaks
    units = engine._runtime.units
    found = {
        "bits": digest(full_parameters(engine)),
        "gathered": counts["gather"],
        "kept": counts["kept"],
        "bytes": moved.rank_bytes["gathered"],
        "read": moved.nvme_read_bytes,
        "copied": moved.copied_bytes.get("in", 0),
        "most kept": peaks.get(KEPT, 0),
        "left": sum(unit.live_bytes for unit in units),
        "room": engine.plan.memory.live_parameter_bytes
        - peaks["parameters unsharded (peak)"],
        "shards": {unit.name: unit.shard_bytes for unit in units},
    }  # fmt: skip
    engine.destroy()
    return found


def test_a_pass_keeps_what_its_backward_begins_with(scratch: Path) -> None:
    """The root is used at once, the last block once the root's elements were."""

    def work(rank: int) -> list[dict[str, Any]]:
        limits = (0, 1, ROOT - 1, ROOT, FAR)
        return [trained(scratch, rank, each) for each in limits] + [
            trained(scratch, rank, FAR, live=ROOT - 1)
        ]

    last = f"h.{BLOCKS - 1}"
    for found in on_ranks(work, 2, scratch):
        never, *some, once, always, narrow = found
        assert never["gathered"] == dict.fromkeys(("<root>", "h.0", "h.1", "h.2", last), 2)
        assert not never["kept"] and not never["most kept"]
        for each in some:
            assert each["kept"] == {"<root>": 1}
        assert once["kept"] == {"<root>": 1, last: 1}
        assert always["kept"] == {"<root>": 1, last: 1, "h.2": 1}  # what the plan has room for
        for each in (*some, once, always):
            again = {name: 2 - each["kept"].get(name, 0) for name in never["gathered"]}
            kept = [each["shards"][name] for name in each["kept"]]
            assert each["gathered"] == again
            assert never["bytes"] - each["bytes"] == sum(kept)
            assert never["read"] - each["read"] == sum(align_up(size, 4096) for size in kept)
            assert each["most kept"] > 0
        assert not narrow["kept"]
        for each in found:
            assert each["bits"] == never["bits"]
            assert each["room"] >= 0 and each["left"] == 0


def test_layers_that_come_again_are_kept(scratch: Path) -> None:
    walk = (1, 0, 1, 1)
    never = trained(scratch, 0, 0, walk=walk)
    always = trained(scratch, 0, FAR, walk=walk)
    assert never["gathered"]["h.1"] > 3
    assert always["gathered"] == {"<root>": 1, "h.1": 1, "h.0": 1}
    assert always["bits"] == never["bits"] and always["room"] >= 0
    again = [trained(scratch, 0, each, reruns=True) for each in (0, FAR)]
    assert again[0]["gathered"]["h.0"] == 3
    assert again[1]["gathered"]["h.0"] == 2
    assert again[0]["bits"] == again[1]["bits"] and again[1]["room"] >= 0


def test_what_is_kept_is_old_once_somebody_writes(scratch: Path) -> None:
    """Ranks write between two forwards: all of them, and one of them its own piece."""

    def work(rank: int) -> list[float]:
        said = []
        for distance in (0, FAR):
            engine = start(scratch, distance)
            for step in range(2):
                engine(batch(step, rank))
                for weight in (engine.module.inp.weight, engine.module.h[BLOCKS - 1].a.weight):
                    with torch.no_grad():
                        weight.mul_(1.5)
                    own = zero.safe_get_local_fp32_param(weight)
                    if rank == 0 and own is not None:
                        zero.safe_set_local_fp32_param(weight, own + 0.25)
                loss = engine(batch(step, rank))
                said.append(loss.item())
                engine.backward(loss)
                engine.step()
            engine.destroy()
        return said

    for found in on_ranks(work, 2, scratch):
        assert found[:2] == found[2:]
        assert found[0] != found[1]


def test_a_device_keeps_what_was_copied_to_it(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(3))
    never, always = (trained(scratch, 0, each, reruns=True) for each in (0, FAR))
    assert always["bits"] == never["bits"]
    assert never["copied"] - always["copied"] >= 4 * (ROOT + BLOCKS * NUMEL)
    assert always["room"] >= 0 and always["left"] == 0
