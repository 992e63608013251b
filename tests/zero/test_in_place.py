"""With everything on the device at world size 1 there are no hooks on modules and no copies."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
import zero.planning
from tests.support.configs import make_config
from tests.support.launch import ROOT, worker_environment
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiny import make_batch, make_model


def test_nothing_is_hooked_copied_or_packed() -> None:
    engine, _, _, _ = zero.initialize(model=make_model(), config=make_config(host_memory="1GB"))
    model = engine.module
    for name, module in model.named_modules():
        if name:
            assert not module._forward_pre_hooks, name
            assert not module._forward_hooks, name
            assert not module._backward_hooks, name
    assert len(model._forward_pre_hooks) == 1  # counts micro-batches
    assert len(model._forward_hooks) == 1  # ends a pass
    weight = model.blocks[0].up.weight
    address = weight.data_ptr()
    made: list[int] = []
    packed: list[Any] = []
    weight.register_hook(lambda gradient: made.append(gradient.data_ptr()))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine(*make_batch(0))
    assert address in packed  # autograd saved the parameter's own memory
    assert engine._runtime.units[0].state.name == "SHARDED"  # never unsharded
    engine.backward(loss)
    assert weight.grad is not None
    assert made == [weight.grad.data_ptr()]  # the tensor that autograd made
    engine.step()
    assert weight.grad is None
    assert type(weight) is nn.Parameter
    assert weight.data_ptr() == address
    engine.destroy()


@pytest.mark.full
def test_the_overhead_is_within_five_percent() -> None:
    """Processor time, because other work on the machine changes the wall clock."""
    command = [
        sys.executable,
        str(ROOT / "scripts" / "overhead_bench.py"),
        *("--threads", "1", "--steps", "6", "--clock", "cpu", "--max-ratio", "1.05"),
    ]
    done = subprocess.run(
        command, env=worker_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "forward and backward" in done.stdout


def edit_by_clipping(parameters: list[nn.Parameter]) -> None:
    total = nn.utils.clip_grad_norm_(parameters, 0.01)
    assert total > 0.01


def edit_by_value(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(parameters, 1e-3)


def drop_one(parameters: list[nn.Parameter]) -> None:
    parameters[0].grad = None


def set_one(parameters: list[nn.Parameter]) -> None:
    parameters[0].grad = torch.full_like(parameters[0], 0.5)


def scale_all(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


EDITS = {
    "nothing": lambda parameters: None,
    "clip_grad_norm_": edit_by_clipping,
    "clip_grad_value_": edit_by_value,
    "drop one": drop_one,
    "set one": set_one,
    "scale": scale_all,
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("gradients", ["device", "host"])
def test_edits_of_grad_are_those_of_torch(edit: str, accumulation: int, gradients: str) -> None:
    """Against torch.optim.AdamW; a missing gradient is zero here, and skipped there."""
    config = make_config(host_memory="1GB", optimizer="none" if gradients == "device" else "cpu")
    config["gradient_accumulation_steps"] = accumulation
    config["gradient_clipping"] = 0.0
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0},
    }
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    for segment in engine._runtime.segments:
        assert segment.is_in_place
        assert engine._runtime.is_kept(segment.index) == (gradients == "device")
    ours, theirs = list(engine.module.parameters()), list(plain.parameters())
    for step in range(3):
        for micro in range(accumulation):
            engine.backward(engine(*make_batch(step * accumulation + micro)))
            (plain(*make_batch(step * accumulation + micro)) / accumulation).backward()
        for one, other in zip(ours, theirs, strict=True):
            assert one.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(one.grad, other.grad)
            torch.testing.assert_close(zero.safe_get_full_grad(one), other.grad)
        EDITS[edit](ours)
        EDITS[edit](theirs)
        if edit == "drop one":
            theirs[0].grad = torch.zeros_like(theirs[0])
        norm = torch.nn.utils.get_total_norm([each.grad for each in theirs])  # type: ignore[misc]
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        assert all(parameter.grad is None for parameter in ours)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("optimizer", ["none", "cpu"])
def test_setting_by_the_shard_and_at_the_parameter_are_one(optimizer: str) -> None:
    config = make_config(host_memory="1GB", optimizer=optimizer)
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    weight, bias = engine.module.norm.weight, engine.module.norm.bias
    engine.backward(engine(*make_batch(0)))
    zero.safe_set_full_grad(weight, torch.full_like(weight, 2.0))
    bias.grad = torch.full_like(bias, 3.0)
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))
    assert torch.equal(zero.safe_get_full_grad(bias), torch.full_like(bias, 3.0))
    states = {state.name: state.grad for state in zero.iterate_states(engine.module)}
    assert torch.equal(states["norm.weight"], weight.grad)
    assert torch.equal(states["norm.bias"], bias.grad)
    bias.grad = torch.full_like(bias, 4.0)
    states = {state.name: state.grad for state in zero.iterate_states(engine.module)}
    assert torch.equal(states["norm.bias"], torch.full_like(bias, 4.0))
    engine.zero_grad()
    assert weight.grad is None
    assert zero.safe_get_full_grad(bias) is None
    engine.destroy()


def test_a_gradient_set_between_two_backwards_is_accumulated_on() -> None:
    """With and without a graph of the gradient; the same as in torch."""
    for optimizer in ("none", "cpu"):
        for create_graph in (False, True):
            engine, _, _, _ = zero.initialize(
                model=make_model(), config=make_config(host_memory="1GB", optimizer=optimizer)
            )
            plain = make_model()
            for model in (engine.module, plain):
                loss = model(*make_batch(0))
                loss.backward(retain_graph=True)
                model.norm.bias.grad = torch.ones_like(model.norm.bias)
                model.norm.weight.grad = None
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of cycles that create_graph makes
                    loss.backward(create_graph=create_graph)
            for one, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
                assert other.grad is not None
                torch.testing.assert_close(zero.safe_get_full_grad(one), other.grad.detach())
                torch.testing.assert_close(one.grad.detach().clone(), other.grad.detach())
                other.grad = None
            engine.destroy()


def test_an_engine_dropped_with_gradients_shown_goes_with_its_model() -> None:
    config = make_config(host_memory="1GB", optimizer="cpu")
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    engine.backward(engine(*make_batch(0)))
    assert engine.module.norm.bias.grad is not None
    model, weight = weakref.ref(engine.module), weakref.ref(engine.module.norm.bias)
    del engine
    gc.collect()
    assert model() is None
    assert weight() is None


def test_a_step_for_gradients_without_a_backward_is_refused() -> None:
    engine, _, _, _ = zero.initialize(model=make_model(), config=make_config(host_memory="1GB"))
    engine.module.norm.bias.grad = torch.ones_like(engine.module.norm.bias)
    with pytest.raises(RuntimeError, match=r"norm\.bias has a \.grad, but no backward"):
        engine.step()
    engine.destroy()


@pytest.mark.nvme
@pytest.mark.parametrize("then", ["forward", "backward", "step"])
def test_a_gradient_put_where_gradients_rest_elsewhere_is_refused(scratch: Path, then: str) -> None:
    config = make_config(optimizer="nvme", nvme_path=str(scratch), host_memory="1GB", dtype="bf16")
    config["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    weight = engine.module.norm.bias
    calls = {
        "forward": lambda: engine(*make_batch(1)),
        "backward": lambda: engine.backward(loss),
        "step": engine.step,
    }
    loss = engine(*make_batch(0))
    if then == "step":
        engine.backward(loss)
        assert weight.grad is None
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match=r"norm\.bias.*safe_set_full_grad"):
        calls[then]()
    weight.grad = None
    if then != "step":
        engine.backward(loss)
    zero.safe_set_full_grad(weight, torch.ones_like(weight))
    engine.step()
    moment = zero.safe_get_full_optimizer_state(weight, "exp_avg")
    assert moment is not None
    assert torch.allclose(moment, torch.full_like(moment, moment[0].item()))
    engine.destroy()


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_a_sparse_gradient_can_be_set(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(1))
    config = make_config(parameters=tier, optimizer=tier, host_memory="1GB")
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    engine.backward(engine(*make_batch(0)))
    weight = engine.module.blocks[0].up.weight
    wanted = torch.eye(*weight.shape)
    weight.grad = wanted.to_sparse()
    found = zero.safe_get_full_grad(weight)
    assert found is not None
    assert torch.equal(found.to_dense(), wanted)
    engine.step()
    engine.destroy()
