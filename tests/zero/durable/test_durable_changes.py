"""A durable run that is resumed with other settings says what changed and what it did with it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
import zero.planning
from tests.support.durable import begin, durable_config, run_step
from tests.support.simulated_device import SimulatedDevice

pytestmark = pytest.mark.nvme


@pytest.fixture
def config(scratch: Path) -> dict[str, Any]:
    """Return the configuration of a run that has made three steps."""
    found = durable_config(str(scratch), "run", "device")
    engine = begin(found)
    for _ in range(3):
        run_step(engine)
    engine.destroy()
    return found


def test_what_changed_is_told_with_what_was_done(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = begin(config, seed=1)
    assert engine.durable.resumed.changes == ()
    engine.destroy()

    config["scheduler"] = {"type": "CosineAnnealingLR", "params": {"T_max": 9}}
    config["gradient_accumulation_steps"] = 2
    config["optimizer"]["params"].update(eps=1e-5)
    with caplog.at_level(logging.WARNING):
        engine = begin(config, seed=1)
    assert engine.global_steps == 3
    lines = engine.durable.resumed.changes
    for start, done in (
        ("schedule: saved WarmupLR, now CosineAnnealingLR", "starts from its beginning"),
        ("hyper-parameters of group 0: configured eps", "the saved values are used"),
        ("batch", "accumulation_steps 1 -> 2"),
    ):
        found = [line for line in lines if line.startswith(start)]
        assert len(found) == 1, lines
        assert done in found[0]
        assert found[0] in caplog.text
    assert engine.get_lr() == [config["optimizer"]["params"]["lr"]]
    engine.destroy()


def test_another_optimizer_is_refused_and_the_way_on_works(
    config: dict[str, Any], scratch: Path
) -> None:
    """As the error says: resumed as it was, saved, and loaded under another name."""
    lion = {"type": "Lion", "params": {"lr": 0.5}}
    with pytest.raises(
        zero.DurableError, match=r"with another optimizer, .* set it as it was\. To"
    ):
        begin({**config, "optimizer": lion})
    engine = begin(config)
    weight = zero.safe_get_full_fp32_param(engine.module.norm.weight)
    engine.save_checkpoint(scratch / "ck")
    engine.destroy()
    tiers = {**config["tiers"], "durable": {"name": "other"}}
    engine = begin({**config, "optimizer": lion, "tiers": tiers})
    with pytest.warns(zero.ResumeWarning, match="optimizer: saved AdamW, now Lion"):
        engine.load_checkpoint(scratch / "ck")
    assert engine.global_steps == 3
    assert torch.equal(zero.safe_get_full_fp32_param(engine.module.norm.weight), weight)
    run_step(engine)
    assert engine.durable.last_commit.step == 4
    engine.destroy()


def test_another_device_memory_is_named(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero.planning, "open_device", lambda _wanted: SimulatedDevice())
    config = durable_config(str(scratch), "run", "host")
    engine = begin(config)
    spare = engine.plan.memory.device_bytes + 100_000
    run_step(engine)
    engine.destroy()
    config["tiers"]["device_memory"] = spare
    with pytest.raises(zero.DurableError, match=r"planned with .*tiers\.device_memory, .* as it"):
        begin(config)
    del config["tiers"]["device_memory"]
    engine = begin(config)
    assert engine.global_steps == 1
    engine.destroy()
