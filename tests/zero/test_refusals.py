"""What would go wrong without a word is refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model

MEMORY = "1GB"


def engine_of(model: Any, **arguments: Any) -> zero.ZeroEngine:
    config = make_config(host_memory=MEMORY)
    if "optimizer" in arguments:
        del config["optimizer"]
    engine, _, _, _ = zero.initialize(model=model, config=config, **arguments)
    return engine


def backward(engine: zero.ZeroEngine) -> None:
    engine.backward(engine(*make_batch(0)))


def add_parameter(model: Any) -> None:
    model.norm.late = nn.Parameter(torch.ones(16))


def replace_block(model: Any) -> None:
    model.blocks[1] = make_model(seed=4).blocks[0]


@pytest.mark.parametrize("change", [add_parameter, replace_block])
def test_parameters_replaced_later_are_refused(change: Any) -> None:
    model = make_model()
    engine = engine_of(model)
    change(model)
    backward(engine)
    with pytest.raises(RuntimeError, match=r"was added or replaced after zero\.initialize"):
        engine.step()
    engine.destroy()


def test_a_removed_parameter_is_refused() -> None:
    model = make_model()
    engine = engine_of(model)
    backward(engine)
    del model.norm.bias
    with pytest.raises(RuntimeError, match=r"norm\.bias left the model"):
        engine.step()
    engine.destroy()


def test_zero_grad_of_engine_and_optimizer_drop_the_window() -> None:
    norms = []
    for how in ("never", "engine", "optimizer"):
        engine = engine_of(make_model())
        if how != "never":
            engine.backward(engine(*make_batch(9)) * 1000)
            (engine if how == "engine" else engine.optimizer).zero_grad()
        backward(engine)
        engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    assert norms[0] == norms[1] == norms[2]


def test_the_optimizer_handed_in_refuses_to_step() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = engine_of(model, optimizer=optimizer)
    backward(engine)
    with pytest.raises(RuntimeError, match=r"was handed to zero\.initialize"):
        optimizer.step()
    engine.step()
    engine.destroy()


def test_optimizer_parameters_outside_the_model_are_refused() -> None:
    model = make_model()
    stray = nn.Parameter(torch.ones(3))
    with pytest.raises(zero.ConfigError, match=r"param_groups\[0\].*not in the model"):
        engine_of(model, optimizer=torch.optim.AdamW([*model.parameters(), stray]))


def test_late_groups_and_states_are_refused() -> None:
    engine = engine_of(make_model())
    optimizer = engine.optimizer
    assert optimizer is not None
    with pytest.raises(RuntimeError, match=r"not in the engine's model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(RuntimeError, match=r"engine\.save_checkpoint"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"engine\.load_checkpoint"):
        optimizer.load_state_dict({})
    engine.destroy()


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", float("nan")), ("lr", -1.0), ("lr", "fast"), ("weight_decay", float("inf"))],
)
def test_hyper_parameters_are_checked_at_each_step(key: str, value: Any) -> None:
    engine = engine_of(make_model())
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0][key] = value
    backward(engine)
    with pytest.raises(ValueError, match=rf"param_groups\[0\]\['{key}'\] is "):
        engine.step()
    engine.destroy()


def test_models_that_belong_to_an_engine_are_refused() -> None:
    model = make_model()
    engine = engine_of(model)
    with pytest.raises(zero.ConfigError, match="already belongs to an engine"):
        engine_of(model)
    with pytest.raises(zero.ConfigError, match="is an engine already"):
        engine_of(engine)
    engine.destroy()
    again = engine_of(model)  # its values rest in place, so it can be used again
    backward(again)
    again.step()
    again.destroy()


class Special(nn.Parameter):
    """A parameter class of a user."""


def test_parameters_that_cannot_be_trained_are_refused() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(zero.ConfigError, match=r"0\.weight has no shape yet"):
        engine_of(lazy)
    complex_model = nn.Linear(2, 2)
    complex_model.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(zero.ConfigError, match="complex64"):
        engine_of(complex_model)
    special = nn.Linear(2, 2)
    special.weight = Special(torch.ones(2, 2))
    with pytest.raises(zero.ConfigError, match="weight is a Special"):
        engine_of(special)


def test_gradients_nobody_asked_for_are_dropped() -> None:
    model = make_model()
    engine = engine_of(model, model_parameters=list(model.blocks.parameters()))
    backward(engine)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.startswith("blocks."), name
    engine.step()
    engine.destroy()


def test_a_modifier_rank_that_is_no_rank_is_refused() -> None:
    model = make_model()
    engine = engine_of(model)
    with pytest.raises(ValueError, match="modifier_rank 5 is not a rank of a world of 1"):
        zero.GatheredParameters(list(model.parameters()), modifier_rank=5)
    engine.destroy()


def test_a_forked_child_can_read_parameters_in_place() -> None:
    """DataLoader workers fork while training runs; reading the model there must not crash."""
    model = make_model()
    engine = engine_of(model)
    expected = model.norm.weight.sum().item()
    child = os.fork()
    if child == 0:
        os._exit(0 if model.norm.weight.sum().item() == expected else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    backward(engine)
    engine.step()
    engine.destroy()


@pytest.mark.nvme
def test_a_path_that_cannot_be_used_is_refused_even_if_nothing_pages(tmp_path: Path) -> None:
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(tmp_path / "missing"),
        host_memory=MEMORY,
    )
    with pytest.raises((OSError, zero.ConfigError), match="missing"):
        zero.initialize(model=make_model(), config=config)


def test_models_that_are_no_models_are_refused() -> None:
    with pytest.raises(zero.ConfigError, match="got str"):
        engine_of("x")
    with pytest.raises(zero.ConfigError, match=r"torch\.compile"):
        engine_of(torch.compile(make_model(), backend="eager"))


def test_a_configured_optimizer_beside_an_object_is_told() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="optimizer section of the configuration has no effect"):
        zero.initialize(model=model, optimizer=optimizer, config=make_config(host_memory=MEMORY))
