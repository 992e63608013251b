"""Torch's default device and type change nothing: what is made names its own.

The default device of these tests is "meta", whose tensors have no values, and the default types are
others than fp32: what is made without naming them shows as an error, or as other bits.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config

pytestmark = pytest.mark.nvme


@pytest.fixture(params=["usual", "meta", "float64", "bfloat16"])
def defaults(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "meta":
        torch.set_default_device("meta")
    elif request.param != "usual":
        torch.set_default_dtype(getattr(torch, request.param))
    yield request.param
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """What came of each case with the usual defaults."""
    return {}


def make_model() -> nn.Module:
    with torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(24, 24, dtype=torch.float32) for _ in range(4)))


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(step)
    return torch.randn(4, 24, generator=generator, device="cpu", dtype=torch.float32)


def config_of(tier: str, optimizer: str, scratch: Path) -> dict[str, Any]:
    pages = {"nvme_path": str(scratch), "host_memory": "30KB", "sub_group_size": 1024}
    more = pages if tier == "nvme" else {"host_memory": "1GB"}
    config = make_config(parameters=tier, optimizer=tier, accumulation=2, clip=1.0, **more)
    config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-2}}
    return config


def train(engine: zero.ZeroEngine, steps: range) -> None:
    for step in steps:
        for micro in range(2):
            engine.backward(engine(batch(2 * step + micro)).square().mean())
        engine.step()


CASES = [
    ("none", "AdamW"),
    ("cpu", "AdamW"),
    ("nvme", "AdamW"),
    ("nvme", "Lion"),
    ("cpu", "RAdam"),
    ("nvme", "Adafactor"),
    ("cpu", "Lamb"),
]


@pytest.mark.parametrize(("tier", "optimizer"), CASES, ids="-".join)
def test_training_touches_and_checkpoints(
    tier: str, optimizer: str, defaults: str, outcomes: dict[str, Any], scratch: Path
) -> None:
    engine, _, _, _ = zero.initialize(
        model=make_model(), config=config_of(tier, optimizer, scratch)
    )
    assert (engine.plan.memory.swap_file_bytes > 0) is (tier == "nvme")
    train(engine, range(2))
    weight = engine.module[1].weight
    twin = copy.deepcopy(engine.module)
    pickled = pickle.loads(pickle.dumps(weight))
    gradient = torch.autograd.grad(weight.square().sum(), weight)[0].clone()
    with torch.no_grad():
        weight[3].fill_(0.5)
    engine.save_checkpoint(scratch / "saved")
    engine.save_16bit_model(scratch / "whole")
    train(engine, range(2, 4))
    found = [
        *(each.detach().clone() for each in engine.module.parameters()),
        *(each.detach() for each in twin.parameters()),
        pickled.detach(),
        gradient,
        *(zero.safe_get_full_fp32_param(each) for each in engine.module.parameters()),
    ]
    norm = engine.get_global_grad_norm()
    engine.destroy()
    engine, _, _, _ = zero.initialize(
        model=make_model(), config=config_of(tier, optimizer, scratch)
    )
    engine.load_checkpoint(scratch / "saved")
    train(engine, range(2, 4))
    loaded = [each.detach().clone() for each in engine.module.parameters()]
    engine.destroy()
    assert {(each.device.type, each.dtype) for each in (*found, *loaded)} == {
        ("cpu", torch.float32)
    }
    assert all(map(torch.equal, loaded, found))
    key = f"{tier} {optimizer}"
    if defaults == "usual":
        outcomes[key] = found, norm
        return
    expected, expected_norm = outcomes[key]
    assert norm == expected_norm
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("defaults")
def test_models_built_under_init(scratch: Path) -> None:
    with zero.Init(), torch.device("cpu"):
        model = nn.Sequential(*(nn.Linear(24, 24, dtype=torch.float32) for _ in range(4)))
    zero.load_weights(model, make_model().state_dict())
    engine, _, _, _ = zero.initialize(model=model, config=config_of("nvme", "AdamW", scratch))
    for ours, theirs in zip(engine.module.parameters(), make_model().parameters(), strict=True):
        assert torch.equal(ours.clone(), theirs)
    train(engine, range(2))
    engine.destroy()


@pytest.mark.usefixtures("defaults")
def test_training_data_is_read(scratch: Path) -> None:
    data = [(batch(index),) for index in range(6)]
    _, _, loader, _ = zero.initialize(
        model=make_model(), config=config_of("cpu", "AdamW", scratch), training_data=data
    )
    assert loader is not None
    found = [each for (both,) in loader for each in both]
    assert len(found) == len(data)
    assert all(any(torch.equal(each, known) for (known,) in data) for each in found)


@pytest.mark.parametrize("optimizer", ["AdamW", "RAdam", "Lamb"])
def test_what_is_made_in_inference_mode_is_trained(optimizer: str, scratch: Path) -> None:
    def run(*, in_mode: bool) -> list[torch.Tensor]:
        config = config_of("none", optimizer, scratch)
        model = make_model()
        with torch.inference_mode(in_mode):
            engine, _, _, _ = zero.initialize(model=model, config=config)
        for index in range(2):
            engine.backward(engine(batch(index)).square().mean())
        with torch.inference_mode(in_mode):
            engine.step()
            average = zero.ShardedAverage(model, decay=0.5)
        train(engine, range(1, 2))
        average.update()
        engine.save_checkpoint(scratch / f"{optimizer} {in_mode}")
        with torch.inference_mode(in_mode):
            engine.load_checkpoint(scratch / f"{optimizer} {in_mode}")
        train(engine, range(2, 3))
        for parameter in model[3].parameters():  # the next forward plans anew
            parameter.data = torch.full((30, *parameter.shape[1:]), 0.5)
        with torch.inference_mode(in_mode), torch.no_grad():
            engine(batch(0))
        train(engine, range(3, 4))
        found = [each.detach().clone() for each in engine.module.parameters()]
        engine.destroy()
        return found

    assert all(map(torch.equal, run(in_mode=True), run(in_mode=False)))
