"""Checkpoints beside a device: what rests there is saved and loaded, however late copies are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import zero
import zero.planning
from tests.support.configs import make_config
from tests.support.observe import state_digest
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme


def start(scratch: Path, tier: str) -> zero.ZeroEngine:
    options: dict[str, Any] = {"optimizer": tier, "parameters": tier, "accumulation": 2}
    if tier == "nvme":
        options |= {"nvme_path": str(scratch), "sub_group_size": 1024, "host_memory": "400KB"}
    return zero.initialize(model=make_model(), config=make_config(dtype="bf16", **options))[0]


def train(engine: zero.ZeroEngine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*make_batch(step)))
        engine.step()


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_run_moves_to_a_device_and_back(
    scratch: Path, tier: str, blocking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(scratch, "none")
    train(engine, 0, 5)
    engine.save_checkpoint(scratch / "host")
    half = state_digest(engine)
    train(engine, 5, 8)
    whole = state_digest(engine)
    engine.destroy()

    devices: list[SimulatedDevice] = []

    def open_simulated(_wanted: str) -> SimulatedDevice:
        devices.append(SimulatedDevice(len(devices)))
        return devices[-1]

    with monkeypatch.context() as beside:
        beside.setattr(zero.planning, "open_device", open_simulated)
        engine = start(scratch, tier)
        assert devices
        engine.load_checkpoint(scratch / "host")
        assert state_digest(engine) == half
        engine.save_checkpoint(scratch / "device", blocking=blocking)
        train(engine, 5, 8)
        assert state_digest(engine) == whole
        engine.destroy()

    engine = start(scratch, "none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.load_checkpoint(scratch / "device")
    assert state_digest(engine) == half
    train(engine, 5, 8)
    assert state_digest(engine) == whole
    engine.destroy()
