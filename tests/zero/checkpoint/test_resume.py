"""Train six steps, or three, save, load into a new engine and train three: the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.tiny import TinyTransformer, make_batch, make_model

pytestmark = pytest.mark.nvme

STEPS, HALF = 6, 3


def states(engine: zero.ZeroEngine) -> dict[str, np.ndarray]:
    """Return everything that is kept of every parameter."""
    found: dict[str, np.ndarray] = {}
    for state in zero.iterate_states(engine.module):
        for key in ("value", "fp32_param", "exp_avg", "exp_avg_sq", "grad"):
            tensor = getattr(state, key)
            if tensor is not None:
                raw = tensor.reshape(-1).contiguous().view(torch.uint8)
                found[f"{state.name} {key}"] = raw.numpy().copy()
    return found


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert list(one) == list(other)
    different = [name for name in one if not np.array_equal(one[name], other[name])]
    assert not different


class Noisy(TinyTransformer):
    """Draws from the generator, has a buffer that moves, and a frozen block."""

    def __init__(self) -> None:
        super().__init__(extra=(37,))
        self.register_buffer("mean", torch.zeros(1))
        self.blocks[0].requires_grad_(requires_grad=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens, targets)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(loss.detach().float() * 0.1)
        return loss * (1 + 0.01 * torch.rand(()) + 0.01 * random.random())


def noisy() -> nn.Module:
    torch.manual_seed(1)
    random.seed(1)
    return Noisy()


CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "nvme": {"parameters": "nvme", "optimizer": "nvme", "sub_group_size": 1024},
    "mixed": {"parameters": "cpu", "optimizer": "nvme", "sub_group_size": 2048, "dtype": "bf16"},
    "bf16": {"parameters": "nvme", "optimizer": "nvme", "sub_group_size": 1024, "dtype": "bf16"},
    "fp32-state": {"dtype": "bf16", "state_format": "fp32", "optimizer": "nvme"},
    "bf16-state": {"dtype": "bf16", "state_format": "bf16", "optimizer": "nvme"},
    "compact": {
        "dtype": "bf16",
        "state_format": "compact",
        "optimizer": "nvme",
        "sub_group_size": 1024,
    },
    "fp16": {"dtype": "fp16", "parameters": "nvme", "optimizer": "nvme"},
}


def configure(case: str, scratch: Path, **more: Any) -> dict[str, Any]:
    options = {**CASES[case], **more}
    if "nvme" in (options.get("parameters"), options.get("optimizer")):
        options["nvme_path"] = str(scratch)
        options.setdefault("host_memory", "120KB")
    config = make_config(clip=1.0, **options)
    config["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_max_lr": 0.01},
    }
    return config


def start(config: dict[str, Any]) -> zero.ZeroEngine:
    return zero.initialize(model=noisy(), config=config)[0]


def train(engine: zero.ZeroEngine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(*make_batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_bits_of_one_never_stopped(case: str, scratch: Path) -> None:
    config = configure(case, scratch)
    engine = start(config)
    losses = train(engine, 0, STEPS)
    whole = states(engine)
    engine.destroy()

    engine = start(config)
    train(engine, 0, HALF)
    at_save = states(engine)
    assert engine.save_checkpoint(scratch / "ck", client_state={"epoch": 7})
    assert_same(states(engine), at_save)
    went_on = train(engine, HALF, STEPS)
    assert went_on == losses[HALF:], "saving changed the run"
    if "nvme" in CASES[case].values():
        assert engine.ledger.report().steps
    engine.destroy()

    make_model()  # another model first: nothing counts models
    engine = start(config)
    torch.rand(5), random.random()
    path, client = engine.load_checkpoint(scratch / "ck")
    assert path == str(scratch / "ck" / "global_step3")
    assert client == {"epoch": 7}
    assert engine.resume_report == ()
    assert_same(states(engine), at_save)
    assert train(engine, HALF, STEPS) == losses[HALF:]
    assert_same(states(engine), whole)
    assert engine.global_steps == STEPS
    engine.destroy()


def test_buffers_of_any_type_that_files_hold_come_back(scratch: Path) -> None:
    class Turned(nn.Module):
        def __init__(self, start: float) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)
            turns = torch.polar(torch.ones(5, 4), torch.full((5, 4), start))
            self.register_buffer("turns", turns)
            self.register_buffer("seen", torch.arange(3).to(torch.uint32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(self.q(x).unflatten(-1, (4, 2)).contiguous())
            return torch.view_as_real(pairs * self.turns).square().mean()

    def make(start: float) -> zero.ZeroEngine:
        torch.manual_seed(0)
        return zero.initialize(model=Turned(start), config=make_config())[0]

    engine = make(0.5)
    engine.backward(engine(torch.ones(2, 5, 8)))
    engine.step()
    engine.save_checkpoint(str(scratch), tag="t")
    other = make(0.25)
    other.load_checkpoint(str(scratch), tag="t")
    assert torch.equal(other.module.turns, engine.module.turns)
    assert other.module.seen.dtype is torch.uint32
    assert other.module.seen.tolist() == [0, 1, 2]
    for each in (engine, other):
        each.destroy()
