"""What the host does for a step grows with the model's depth and no faster."""

from __future__ import annotations

import cProfile
import logging
import pstats

import pytest
import torch
from torch import nn

import zero
import zero.planning
import zero.starting
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
