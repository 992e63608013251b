"""safe_get and safe_set on every tier, and the iterator that pages each extent once (H16)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import zero
from estimators import Section
from tests.support.configs import BETAS, EPS, LR, WEIGHT_DECAY, make_config
from tests.support.observe import as_bits, full_gradients, full_parameters
from tests.support.reference import ReferenceAdamW
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme
KINDS = [
    *(("nvme", *kind) for kind in (("bf16", "exact"), ("bf16", "fp32"), ("fp16", "exact"))),
    ("cpu", "fp32", "exact"),
    ("none", "bf16", "exact"),
    ("none", "fp32", "exact"),
    ("nvme", "fp32", "exact"),
]


def make_engine(
    scratch: Path, tier: str, dtype: str = "fp32", state_format: str = "exact"
) -> zero.ZeroEngine:
    config = make_config(
        parameters=tier,
        optimizer=tier,
        nvme_path=str(scratch),
        host_memory="48KB" if tier == "nvme" else "1GB",
        sub_group_size=1024,
        dtype=dtype,
        state_format=state_format,
        loss_scale=1.0,
    )
    model = make_model()
    for parameter in model.blocks[1].norm1.parameters():
        parameter.requires_grad = False
    return zero.initialize(model=model, config=config)[0]


@pytest.fixture(params=["none", "nvme"])
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def trainable(engine: zero.ZeroEngine) -> dict[str, nn.Parameter]:
    return {name: each for name, each in engine.module.named_parameters() if each.requires_grad}


@pytest.mark.parametrize(("tier", "dtype", "state_format"), KINDS)
def test_all_is_read_as_the_reference_has_it(
    scratch: Path, tier: str, dtype: str, state_format: str
) -> None:
    engine = make_engine(scratch, tier, dtype, state_format)
    masters = {name: as_bits(each.detach().float()) for name, each in start().items()}
    reference = ReferenceAdamW(
        masters,
        bf16=list(masters) if dtype == "bf16" else (),
        fp16=list(masters) if dtype == "fp16" else (),
    )
    for step in range(2):
        engine.backward(engine(*make_batch(step)))
        gradients = full_gradients(engine)
        for name, parameter in trainable(engine).items():
            ours = zero.safe_get_full_grad(parameter)
            assert ours is not None
            assert np.array_equal(as_bits(ours), gradients[name])
        reference.step(gradients, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip=0.0)
        engine.step()
    check_states(engine, reference)
    engine.destroy()


def start() -> dict[str, nn.Parameter]:
    model = make_model()
    frozen = {id(each) for each in model.blocks[1].norm1.parameters()}
    return {name: each for name, each in model.named_parameters() if id(each) not in frozen}


def check_states(engine: zero.ZeroEngine, reference: ReferenceAdamW) -> None:
    before = engine.ledger.snapshot()
    seen = {state.name: state for state in zero.iterate_states(engine.module)}
    moved = engine.ledger.snapshot().minus(before)
    plan = engine.plan.memory
    once = sum(
        size
        for group in plan.sub_groups
        if group.extent is not None
        for section, _, size in group.extent.sections
        if section is not Section.GRADIENT
    )
    assert moved.nvme_read_bytes == once
    assert (once > 0) == (plan.swap_file_bytes > 0)
    assert set(seen) == {name for name, _ in engine.module.named_parameters()}
    for name, parameter in engine.module.named_parameters():
        state = seen[name]
        assert torch.equal(state.value, parameter)
        assert state.grad is None
        assert zero.safe_get_full_grad(parameter) is None
        if not parameter.requires_grad:
            assert state.fp32_param is None
            assert zero.safe_get_full_fp32_param(parameter) is None
            assert zero.safe_get_full_optimizer_state(parameter, "exp_avg") is None
            continue
        master = zero.safe_get_full_fp32_param(parameter)
        local = zero.safe_get_local_fp32_param(parameter)
        assert master is not None
        assert local is not None
        assert master.shape == parameter.shape
        assert master.dtype is torch.float32
        assert np.array_equal(as_bits(master), reference.masters[name])
        assert torch.equal(local, master.reshape(-1))
        assert torch.equal(state.fp32_param, master)
        for key in ("exp_avg", "exp_avg_sq"):
            found = zero.safe_get_full_optimizer_state(parameter, key)
            assert found is not None
            assert np.array_equal(as_bits(found), getattr(reference, key)[name]), (name, key)
            assert torch.equal(getattr(state, key), found)


@pytest.mark.parametrize(("tier", "dtype", "state_format"), KINDS)
def test_what_is_set_is_kept_and_trained_from(
    scratch: Path, tier: str, dtype: str, state_format: str
) -> None:
    """Setting everything of one engine from another makes both give the same bits."""
    source = make_engine(scratch, "none", dtype, state_format)
    target = make_engine(scratch, tier, dtype, state_format)
    for step in range(2):
        source.backward(source(*make_batch(step)))
        source.step()
        target.backward(target(*make_batch(7 + step)))
        target.step()
    source.backward(source(*make_batch(2)))
    target.backward(target(*make_batch(2)))
    theirs = trainable(target)
    for name, parameter in trainable(source).items():
        copy_state(parameter, theirs[name], local=name.endswith("bias"))
    for engine in (source, target):
        engine.step()
    assert source.get_global_grad_norm() == target.get_global_grad_norm()
    ours, others = full_parameters(source), full_parameters(target)
    assert all(np.array_equal(ours[name], others[name]) for name in ours)
    source.destroy()
    target.destroy()


def copy_state(source: nn.Parameter, target: nn.Parameter, *, local: bool) -> None:
    """Copy the master, the moments and the gradient of one parameter."""
    master = zero.safe_get_full_fp32_param(source)
    gradient = zero.safe_get_full_grad(source)
    assert master is not None
    assert gradient is not None
    if local:
        zero.safe_set_local_fp32_param(target, master.reshape(-1))
        zero.safe_set_local_grad(target, gradient.reshape(-1))
    else:
        zero.safe_set_full_fp32_param(target, master)
        zero.safe_set_full_grad(target, gradient)
    for key in ("exp_avg", "exp_avg_sq"):
        state = zero.safe_get_full_optimizer_state(source, key)
        assert state is not None
        if local:
            zero.safe_set_local_optimizer_state(target, state.reshape(-1), key)
        else:
            zero.safe_set_full_optimizer_state(target, state, key)


def test_a_vectorised_update_of_gradients_is_stepped_with(scratch: Path, tier: str) -> None:
    engine = make_engine(scratch, tier)
    engine.backward(engine(*make_batch(0)))
    zero.safe_update_full_grad_vectorized(
        list(engine.module.parameters()), lambda gradient, _: gradient * 0
    )
    engine.step()
    assert engine.get_global_grad_norm() == 0.0
    engine.destroy()


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [("SGD", "momentum_buffer", "exp_avg_sq"), ("Adagrad", "sum", "exp_avg")],
)
def test_states_of_kernels_have_the_names_of_torch_too(kind: str, name: str, other: str) -> None:
    config = make_config(host_memory="1GB")
    config["optimizer"] = {"type": kind, "params": {"lr": 1e-2}}
    model, twin = make_model(), make_model()
    engine = zero.initialize(model=model, config=config)[0]
    engine.backward(engine(*make_batch(0)))
    engine.step()
    given = getattr(torch.optim, kind)(twin.parameters(), lr=1e-2)
    twin(*make_batch(0)).backward()
    given.step()
    wanted = twin.norm.weight.grad if kind == "SGD" else given.state[twin.norm.weight]["sum"]
    found = zero.safe_get_full_optimizer_state(model.norm.weight, name)
    assert torch.allclose(found, wanted, rtol=1e-6, atol=0)
    assert zero.safe_get_full_optimizer_state(model.norm.weight, other) is None
    with pytest.raises(KeyError, match=f"square_avg.*norm.weight; .*fp32_param.*{name}"):
        zero.safe_get_full_optimizer_state(model.norm.weight, "square_avg")
    engine.destroy()


def test_what_cannot_be_asked_is_named(scratch: Path, tier: str) -> None:
    engine = make_engine(scratch, tier)
    weight, frozen = engine.module.norm.weight, engine.module.blocks[1].norm1.weight
    with pytest.raises(KeyError, match=r"momentum.*exp_avg.*exp_avg_sq.*fp32_param"):
        zero.safe_get_full_optimizer_state(weight, "momentum")
    with pytest.raises(zero.ShardedAccessError, match=r"norm1\.weight has no fp32_param"):
        zero.safe_set_full_fp32_param(frozen, torch.ones(16))
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(16,\).*\(3,\)"):
        zero.safe_set_full_fp32_param(weight, torch.ones(3))
    with pytest.raises(zero.ShardedAccessError, match="belongs to no engine"):
        zero.safe_get_full_fp32_param(nn.Parameter(torch.ones(3)))
    engine.destroy()
    with pytest.raises(zero.ShardedAccessError, match="destroyed or gone"):
        zero.safe_get_full_fp32_param(weight)
