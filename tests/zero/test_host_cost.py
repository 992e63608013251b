"""What the host does for a step grows with the model's depth and no faster."""

from __future__ import annotations

import cProfile
import logging
import pstats
from typing import Any

import pytest
import torch
from torch import nn

import zero
import zero.planning
import zero.starting
from offload.kernels_torch import TorchDeviceKernels
from tests.support.configs import make_config
from tests.support.simulated_device import SimulatedDevice


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


def calls_of_a_step(depth: int, tiers: tuple[str, str]) -> int:
    """Return how many calls Python makes in a step of a warm engine."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(depth)))
    parameters, optimizer = tiers
    config = make_config(
        parameters=parameters, optimizer=optimizer, host_memory="64MB", dtype="fp32"
    )
    engine, _, _, _ = zero.initialize(model=model, config=config)
    assert len(engine._runtime.units) > depth
    profile = cProfile.Profile()
    for step in range(3):
        if step == 2:
            profile.enable()
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        engine.step()
    profile.disable()
    engine.destroy()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("device", "tiers"),
    [("host", ("none", "cpu")), ("simulated", ("cpu", "cpu"))],
    ids=("host", "simulated-all"),
)
def test_host_work_is_linear_in_depth(
    device: str, tiers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "simulated":
        monkeypatch.setattr(zero.planning, "open_device", lambda _wanted: SimulatedDevice())
    shallow, deep, deeper = (calls_of_a_step(depth, tiers) for depth in (4, 12, 36))
    first, second = (deep - shallow) / 8, (deeper - deep) / 24
    assert 0 < second < 1.1 * first


def test_norms_of_gradients_of_two_types_are_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all gradients together: a call with more than one type would be a launch for each."""
    asked: list[set[torch.dtype]] = []
    block_sums_of = TorchDeviceKernels.block_sums_of

    def remember(self: Any, pieces: Any) -> torch.Tensor:
        asked.append({values.dtype for values, _ in pieces})
        return block_sums_of(self, pieces)

    monkeypatch.setattr(TorchDeviceKernels, "block_sums_of", remember)
    monkeypatch.setattr(zero.planning, "open_device", lambda _wanted: SimulatedDevice())
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in list(model)[::2]:
        block.first.weight.data = block.first.weight.data.bfloat16()
    engine, _, _, _ = zero.initialize(model=model, config=make_config())
    for _ in range(2):
        asked.clear()
        loss = sum(each.float().square().sum() for each in model.parameters())
        expected = sum(float(2 * each.detach().float().norm() ** 2) for each in model.parameters())
        engine.backward(loss)
        engine.step()
        assert sorted(asked, key=str) == [{torch.bfloat16}, {torch.float32}]
        assert engine.get_global_grad_norm() == pytest.approx((2 * expected) ** 0.5, rel=1e-2)
    engine.destroy()


def test_a_start_says_how_far_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero.starting, "INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO, "zero.starting")
    model = nn.Sequential(*(Block() for _ in range(3)))
    numel = sum(each.numel() for each in model.parameters())
    engine, _, _, _ = zero.initialize(model=model, config=make_config())
    engine.destroy()
    first, *rest = [record.getMessage() for record in caplog.records]
    assert first.startswith("tiers of 0.00 GB made in")
    assert len(rest) == len(engine._runtime.units) == 4
    assert rest[-1].startswith(f"placed 4 of 4 units, {numel / 1e6:.1f} of {numel / 1e6:.1f} M")
