"""Writes to 16-bit parameters that rest in place reach their masters, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model

NAME = "blocks.0.up.weight"
Write = Callable[[nn.Module, nn.Parameter], object]


def write_gathered(_model: nn.Module, parameter: nn.Parameter) -> None:
    with zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.fill_(0.5)


def write_state(model: nn.Module, parameter: nn.Parameter) -> None:
    model.load_state_dict({NAME: torch.full_like(parameter, 0.5)}, strict=False)


WRITES: dict[str, Write] = {
    "fill_": lambda _, parameter: parameter.fill_(0.5),
    "copy_": lambda _, parameter: parameter.copy_(torch.full_like(parameter, 0.5)),
    "gathered": write_gathered,
    "load_state_dict": write_state,
}
HIDDEN_WRITES: dict[str, Write] = {
    "data.fill_": lambda _, parameter: parameter.data.fill_(0.5),
    "data.copy_": lambda _, parameter: parameter.data.copy_(torch.full_like(parameter, 0.5)),
}


def start(state_format: str, nvme_path: Path | None = None) -> zero.ZeroEngine:
    where = "none" if nvme_path is None else "nvme"
    engine, _, _, _ = zero.initialize(
        model=make_model(),
        config=make_config(
            parameters=where,
            optimizer=where,
            nvme_path=str(nvme_path) if nvme_path is not None else None,
            dtype="bf16",
            state_format=state_format,
            host_memory="1GB" if nvme_path is None else "60KB",
        ),
    )
    for step in range(2):
        train(engine, step)
    return engine


def train(engine: zero.ZeroEngine, step: int) -> None:
    engine.backward(engine(*make_batch(step)))
    engine.step()


def masters(engine: zero.ZeroEngine) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        master = zero.safe_get_full_fp32_param(parameter)
        assert master is not None
        found[name] = master
    return found


@pytest.mark.parametrize("state_format", ["exact", "fp32"])
@pytest.mark.parametrize("how", [*WRITES, *HIDDEN_WRITES])
def test_a_write_reaches_its_own_master_alone(how: str, state_format: str) -> None:
    engine = start(state_format)
    parameter = dict(engine.module.named_parameters())[NAME]
    assert type(parameter) is nn.Parameter
    before = masters(engine)
    assert any(not torch.equal(each, each.bfloat16().float()) for each in before.values())
    with torch.no_grad():
        (WRITES | HIDDEN_WRITES)[how](engine.module, parameter)
    after = masters(engine)
    assert torch.equal(after.pop(NAME), torch.full(parameter.shape, 0.5))
    for name, master in after.items():
        assert torch.equal(master, before[name]), name
    engine.destroy()


@pytest.mark.nvme
def test_a_gathered_write_leaves_masters_on_nvme_alone(scratch: Path) -> None:
    engine = start("exact", scratch)
    parameter = dict(engine.module.named_parameters())[NAME]
    before = masters(engine)
    with torch.no_grad():
        write_gathered(engine.module, parameter)
    after = masters(engine)
    assert torch.equal(after.pop(NAME), torch.full(parameter.shape, 0.5))
    for name, master in after.items():
        assert torch.equal(master, before[name]), name
    engine.destroy()


@pytest.mark.parametrize("state_format", ["exact", "fp32"])
@pytest.mark.parametrize("how", HIDDEN_WRITES)
def test_the_next_step_starts_from_a_write_through_data(how: str, state_format: str) -> None:
    finals = []
    for write in (HIDDEN_WRITES[how], WRITES["fill_"]):
        engine = start(state_format)
        parameter = dict(engine.module.named_parameters())[NAME]
        with torch.no_grad():
            write(engine.module, parameter)
        train(engine, 2)
        finals.append(masters(engine))
        assert (finals[-1][NAME] - 0.5).abs().max() < 0.05
        engine.destroy()
    for name, master in finals[0].items():
        assert torch.equal(master, finals[1][name]), name


def test_a_failed_read_only_block_keeps_an_earlier_write() -> None:
    engine = start("exact")
    parameter = dict(engine.module.named_parameters())[NAME]
    with torch.no_grad():
        parameter.data.fill_(0.5)
        with (
            pytest.raises(RuntimeError, match="read-only"),
            zero.GatheredParameters([parameter]),
        ):
            parameter.fill_(2.0)
    assert torch.equal(masters(engine)[NAME], torch.full(parameter.shape, 0.5))
    engine.destroy()
