"""state_dict, loading, copying and pickling of a sharded model (B1, B5, B7)."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme


@pytest.fixture(params=["nvme", "none"])
def engine(scratch: Path, request: pytest.FixtureRequest) -> Iterator[zero.ZeroEngine]:
    config = make_config(
        parameters=request.param,
        optimizer=request.param,
        nvme_path=str(scratch),
        host_memory="40KB" if request.param == "nvme" else "1GB",
        sub_group_size=1024,
    )
    made, _, _, _ = zero.initialize(model=make_model(), config=config)
    yield made
    made.destroy()


def assert_values(model: nn.Module, expected: nn.Module) -> None:
    theirs = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def trained(engine: zero.ZeroEngine) -> nn.Module:
    """Return what an engine on the device tier gives after a step from the values of `engine`."""
    plain = copy.deepcopy(engine.module)
    other, _, _, _ = zero.initialize(model=plain, config=make_config(host_memory="1GB"))
    other.backward(other(*make_batch(0)))
    other.step()
    engine.backward(engine(*make_batch(0)))
    engine.step()
    assert_values(engine.module, plain)
    return plain


def test_state_dict_is_lazy_and_real(engine: zero.ZeroEngine) -> None:
    before = engine.ledger.snapshot()
    state = engine.module.state_dict()
    assert engine.ledger.snapshot().minus(before).nvme_read_bytes == 0
    plain = make_model().state_dict()
    assert list(state) == list(plain)
    for name, values in plain.items():
        assert isinstance(state[name], torch.Tensor)
        assert state[name].shape == values.shape
        assert not state[name].requires_grad
        assert torch.equal(state[name], values)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    fresh = make_model(seed=8)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert_values(fresh, make_model())


def test_a_state_dict_shows_later_values(engine: zero.ZeroEngine) -> None:
    state = engine.module.state_dict()
    plain = trained(engine)
    for name, values in plain.state_dict().items():
        assert torch.equal(state[name], values), name


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_trained_from(engine: zero.ZeroEngine, *, assign: bool) -> None:
    objects = dict(engine.module.named_parameters())
    engine.module.load_state_dict(make_model(seed=5).state_dict(), assign=assign)
    engine(*make_batch(0))
    assert_values(engine.module, make_model(seed=5))
    assert all(each is objects[name] for name, each in engine.module.named_parameters())
    trained(engine)


def test_loading_another_shape_is_refused_by_torch_and_changes_nothing(
    engine: zero.ZeroEngine,
) -> None:
    state = make_model(seed=5).state_dict()
    state["blocks.0.up.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.up\.weight.*\[33, 16\]"):
        engine.module.load_state_dict(state)
    assert torch.equal(engine.module.blocks[0].up.weight, make_model().blocks[0].up.weight)


def test_a_parameter_put_in_place_of_a_managed_one_gives_its_values(
    engine: zero.ZeroEngine,
) -> None:
    weight = engine.module.norm.weight
    engine.module.norm.weight = nn.Parameter(torch.full((16,), 0.5))
    engine.backward(engine(*make_batch(0)))
    assert engine.module.norm.weight is weight
    assert (weight == 0.5).all()
    engine.module.norm.weight = nn.Parameter(torch.ones(7))
    with pytest.raises(RuntimeError, match=r"norm\.weight.*replaced by one of.*shape \(7,\)"):
        engine.step()


def test_replacing_one_place_of_a_tied_parameter_is_refused(engine: zero.ZeroEngine) -> None:
    engine.module.head.weight = nn.Parameter(torch.ones(31, 16))
    with pytest.raises(RuntimeError, match=r"embedding\.weight is tied, and was replaced in some"):
        engine(*make_batch(0))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_is_plain_and_stands_alone(engine: zero.ZeroEngine, how: Any) -> None:
    twin = how(engine.module)
    expected = engine(*make_batch(0)).item()
    trained(engine)
    engine.destroy()
    assert all(type(each) is nn.Parameter for each in twin.parameters())
    assert twin.head.weight is twin.embedding.weight
    assert_values(twin, make_model())
    loss = twin(*make_batch(0))
    assert loss.item() == expected
    loss.backward()
    assert twin.blocks[0].up.weight.grad is not None


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_an_engine_is_neither_copied_nor_pickled(engine: zero.ZeroEngine, how: Any) -> None:
    with pytest.raises(TypeError, match=r"an engine cannot be .*engine\.module"):
        how(engine)


def test_external_optimizers_train_the_shards(scratch: Path) -> None:
    """Any torch optimizer and clipping work on sharded parameters, slowly."""
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="40KB",
        sub_group_size=1024,
    )
    made, _, _, _ = zero.initialize(model=make_model(), config=config)
    plain = make_model()
    pairs = [
        (model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
        for model in (made.module, plain)
    ]
    for step in range(2):
        for model, optimizer in pairs:
            model(*make_batch(step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            assert all(each.grad is None for each in model.parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(made.module.get_parameter(name).clone(), parameter)
    assert made.ledger.snapshot().nvme_write_bytes > 0
    made.destroy()


def test_writes_through_data_in_a_read_only_window_raise(engine: zero.ZeroEngine) -> None:
    weight = engine.module.blocks[0].up.weight
    before = weight.detach().clone()
    with (
        pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight.*modifier_rank=0"),
        zero.GatheredParameters([weight]),
    ):
        weight.data.add_(1)
    assert torch.equal(weight, before)
