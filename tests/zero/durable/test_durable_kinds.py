"""Durable runs of every stage, state format and update rule resume with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.durable import begin, durable_config, expected, run_step, state_of

KINDS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "bf16 state": ("nvme", {"tiers": {"state_format": "bf16"}}),
    "compact state": ("nvme", {"tiers": {"state_format": "compact"}}),
    "lion": ("nvme", {"optimizer": {"type": "Lion", "params": {"lr": 1e-2}}}),
    "sgd": ("device", {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}}),
    "adafactor": ("nvme", {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}}),
    "lamb": ("nvme", {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}),
    "muon": ("device", {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
    "stage 0": ("device", {"zero_optimization": {"stage": 0}}),
    "stage 2": ("master on host", {"zero_optimization": {"stage": 2}}),
}


def config_of(place: Path, kind: str, name: str | None) -> dict[str, Any]:
    mix, changes = KINDS[kind]
    config = durable_config(str(place), name, mix)
    for section, values in changes.items():
        config[section] = values if section == "optimizer" else {**config[section], **values}
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_every_kind_resumes_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    wanted = expected(config_of(tmp_path, kind, None), 4)
    engine = begin(config_of(tmp_path, kind, "run"))
    run_step(engine)
    run_step(engine)
    engine.destroy()
    again = begin(config_of(tmp_path, kind, "run"), seed=6)
    assert again.durable is not None
    assert again.durable.resumed is not None
    assert state_of(again) == wanted[2]
    run_step(again)
    run_step(again)
    assert state_of(again) == wanted[4]
    again.destroy()


@pytest.mark.parametrize("mix", ["master on host", "state on nvme"])
def test_a_write_before_a_step_that_is_skipped_is_committed(tmp_path: Path, mix: str) -> None:
    config = durable_config(str(tmp_path), "run", mix)
    config |= {"fp16": {"enabled": True, "loss_scale": 0.0, "initial_scale_power": 8}}
    engine = begin(config)
    run_step(engine)
    weight = engine.module.norm.weight
    with torch.no_grad():
        weight.mul_(0.5)
    engine.backward(engine(torch.full((4, 24), torch.inf)))
    engine.step()
    assert engine.skipped_steps == 1
    written = weight.detach().clone()
    wanted = state_of(engine)
    engine.destroy()
    again = begin(config, seed=6)
    assert state_of(again) == wanted
    run_step(again)
    assert torch.allclose(again.module.norm.weight, written, atol=0.05)
    again.destroy()
