"""With everything on the device at world size 1 there are no hooks on modules and no copies."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.launch import ROOT, worker_environment
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
    assert not model._forward_hooks
    weight = model.blocks[0].up.weight
    address = weight.data_ptr()
    segment = next(
        each
        for each in engine._runtime.segments
        if any(member.parameter is weight for member in each.members)
    )
    position = [id(member.parameter) for member in segment.members].index(id(weight))
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
    reducer = engine._runtime.reducer
    assert reducer is not None
    kept = reducer.kept.gradient(segment, position)
    assert kept is not None
    assert made == [kept.data_ptr()]  # the tensor that autograd made
    engine.step()
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


@pytest.mark.parametrize("then", ["forward", "backward", "step"])
def test_a_gradient_put_at_a_parameter_is_refused(then: str) -> None:
    engine, _, _, _ = zero.initialize(model=make_model(), config=make_config(host_memory="1GB"))
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
