"""A sharded parameter never lies: true metadata, and values that are gathered when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.observe import full_parameters
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme


@pytest.fixture
def engine(scratch: Path) -> Any:
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="40KB",
        sub_group_size=1024,
    )
    made, _, _, _ = zero.initialize(model=make_model(), config=config)
    assert made.plan.memory.swap_file_bytes > 0
    yield made
    made.destroy()


def weight(engine: zero.ZeroEngine) -> nn.Parameter:
    return engine.module.blocks[0].up.weight


def test_metadata_is_true_while_sharded(engine: zero.ZeroEngine) -> None:
    plain = dict(make_model().named_parameters())
    for name, parameter in engine.module.named_parameters():
        assert parameter.shape == plain[name].shape
        assert parameter.numel() == plain[name].numel()
        assert parameter.dtype == plain[name].dtype
        assert parameter.stride() == plain[name].stride()
        assert parameter.requires_grad
        assert parameter.grad is None
        assert isinstance(parameter, nn.Parameter)
        assert name in repr(parameter)
    assert sum(each.numel() for each in engine.module.parameters()) == sum(
        each.numel() for each in plain.values()
    )


def test_gathered_parameters_show_the_values_and_nest(engine: zero.ZeroEngine) -> None:
    expected = make_model().blocks[0].up.weight
    with zero.GatheredParameters([weight(engine)]):
        with zero.GatheredParameters(weight(engine)):
            assert torch.equal(weight(engine), expected)
        assert torch.equal(weight(engine), expected)
        assert type(weight(engine)) is nn.Parameter
    assert type(weight(engine)) is not nn.Parameter
    with pytest.raises(zero.ShardedAccessError, match=r"blocks\.0\.up\.weight"):
        weight(engine).data_ptr()


def test_a_write_with_a_modifier_rank_is_kept_and_trained_from(engine: zero.ZeroEngine) -> None:
    with zero.GatheredParameters([weight(engine)], modifier_rank=0), torch.no_grad():
        weight(engine).fill_(0.25)
    assert (full_parameters(engine)["blocks.0.up.weight"] == 0.25).all()
    engine.backward(engine(*make_batch(0)))
    engine.step()
    plain = make_model()
    with torch.no_grad():
        plain.blocks[0].up.weight.fill_(0.25)
    other, _, _, _ = zero.initialize(model=plain, config=make_config(host_memory="1GB"))
    other.backward(other(*make_batch(0)))
    other.step()
    theirs = full_parameters(other)
    for name, values in full_parameters(engine).items():
        assert (values == theirs[name]).all(), name
    other.destroy()


def test_assigning_data_with_a_modifier_rank_is_kept(engine: zero.ZeroEngine) -> None:
    with zero.GatheredParameters([weight(engine)], modifier_rank=0):
        weight(engine).data = torch.full(weight(engine).shape, 0.5)
    assert (full_parameters(engine)["blocks.0.up.weight"] == 0.5).all()


def test_a_write_that_would_be_lost_raises_and_is_undone(engine: zero.ZeroEngine) -> None:
    before = full_parameters(engine)
    with (
        pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight.*modifier_rank=0"),
        zero.GatheredParameters([weight(engine)]),
        torch.no_grad(),
    ):
        weight(engine).add_(1)
    after = full_parameters(engine)
    assert all((before[name] == after[name]).all() for name in before)


def test_a_value_kept_from_a_window_stays_readable(engine: zero.ZeroEngine) -> None:
    with zero.GatheredParameters([weight(engine)]), torch.no_grad():
        alias = weight(engine)[0]
        expected = alias.clone()
    engine.backward(engine(*make_batch(0)))
    engine.step()
    assert torch.equal(alias, expected)


def test_an_old_graph_refuses_new_weights(engine: zero.ZeroEngine) -> None:
    first, second = engine(*make_batch(0)), engine(*make_batch(1))
    first.backward()
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_two_parameters_on_one_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    with pytest.raises(zero.ConfigError, match=r"0\.weight and 1\.weight share memory"):
        zero.initialize(model=model, config=make_config(host_memory="1GB"))


def test_bf16_writes_set_their_residual(scratch: Path) -> None:
    """Masters restart from the written bf16 values: old low bits would leak otherwise."""
    results = []
    for parameters, memory in (("nvme", "40KB"), ("none", "1GB")):
        config = make_config(
            parameters=parameters,
            optimizer=parameters,
            nvme_path=str(scratch),
            host_memory=memory,
            sub_group_size=1024,
            dtype="bf16",
        )
        made, _, _, _ = zero.initialize(model=make_model(), config=config)
        for step in range(2):
            made.backward(made(*make_batch(step)))
            made.step()
        with zero.GatheredParameters([weight(made)], modifier_rank=0), torch.no_grad():
            weight(made).fill_(0.125)
        for step in range(2, 4):
            made.backward(made(*make_batch(step)))
            made.step()
        results.append(full_parameters(made))
        made.destroy()
    assert all((results[0][name] == results[1][name]).all() for name in results[0])
