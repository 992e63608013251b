"""A moving average on shards (B14)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_the_average_of_the_masters_is_kept_and_can_be_evaluated(
    scratch: Path, dtype: str, *, on_disk: bool
) -> None:
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="40KB",
        sub_group_size=1024,
        dtype=dtype,
    )
    model = make_model()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    average = zero.ShardedAverage(model, decay=0.9, directory=scratch if on_disk else None)
    expected = {name: master(each) for name, each in model.named_parameters()}
    for step in range(3):
        engine.backward(engine(*make_batch(step)))
        engine.step()
        average.update()
        for name, each in model.named_parameters():
            expected[name] = expected[name] * 0.9 + master(each) * (1 - 0.9)
    current = {name: master(each) for name, each in model.named_parameters()}
    with torch.no_grad():
        before = engine(*make_batch(9)).item()
    for name, each in model.named_parameters():
        assert torch.equal(average.full(each), expected[name]), name
    with average.applied(), torch.no_grad():
        assert engine(*make_batch(9)).item() != before
        for name, each in model.named_parameters():
            assert torch.equal(master(each), expected[name])
    with torch.no_grad():
        assert engine(*make_batch(9)).item() == before
    for name, each in model.named_parameters():
        assert torch.equal(master(each), current[name])
    engine.destroy()


def master(parameter: nn.Parameter) -> torch.Tensor:
    found = zero.safe_get_full_fp32_param(parameter)
    assert found is not None
    return found


def test_what_has_no_average_is_named() -> None:
    with pytest.raises(zero.ShardedAccessError, match="belongs to no engine"):
        zero.ShardedAverage(make_model())
    with pytest.raises(ValueError, match="decay"):
        zero.ShardedAverage(make_model(), decay=2.0)
    engine, _, _, _ = zero.initialize(model=make_model(), config=make_config(host_memory="1GB"))
    average = zero.ShardedAverage(engine.module)
    with pytest.raises(zero.ShardedAccessError, match="no average"):
        average.full(nn.Parameter(torch.ones(2)))
    engine.destroy()


@pytest.mark.parametrize(
    "call", [zero.register_external_parameter, zero.unregister_external_parameter]
)
def test_external_parameters_are_accepted(call: Any) -> None:
    model = make_model()
    call(model.blocks[0], model.norm.weight)
    with pytest.raises(RuntimeError, match="takes a module and a parameter"):
        call(model.blocks[0], torch.ones(2))


@pytest.mark.parametrize("where", ["none", "nvme"])
def test_nothing_is_exchanged_after_a_resize(scratch: Path, where: str) -> None:
    config = make_config(
        parameters=where,
        optimizer=where,
        nvme_path=str(scratch) if where == "nvme" else None,
        host_memory="60KB" if where == "nvme" else "1GB",
        sub_group_size=1024,
    )
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    model = engine.module
    average = zero.ShardedAverage(model, decay=0.5)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    average.update()
    resized = model.blocks[1].up.weight  # neither the first nor the last
    zero.resize_parameter(engine, resized, torch.Size((40, 16)))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    kept = average.full(model.embedding.weight)
    with pytest.raises(zero.ShardedAccessError, match="make a new average"), average.applied():
        pass
    with pytest.raises(zero.ShardedAccessError, match="make a new average"):
        average.update()
    with pytest.raises(zero.ShardedAccessError, match="make a new average"):
        average.full(resized)
    for name, each in model.named_parameters():
        assert torch.equal(each.detach().clone(), before[name]), name
    assert torch.equal(average.full(model.embedding.weight), kept)
    engine.destroy()
