"""Graphs, outputs and interruptions that once gave wrong numbers or crashed, on forced paging."""

from __future__ import annotations

import collections
import copy
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zero
from offload import PagerFailedError
from tests.support.configs import make_config

pytestmark = pytest.mark.nvme

WIDTH = 16
TIERS = ["none", "nvme"]


class Block(nn.Module):
    """A residual MLP that a test may let do something odd on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)
        self.b = nn.Linear(2 * WIDTH, WIDTH)
        self.finish: Callable[[Block, torch.Tensor], Any] = lambda block, y: y

    def forward(self, x: torch.Tensor) -> Any:
        return self.finish(self, x + self.b(torch.tanh(self.a(x))))


class Net(nn.Module):
    """Three blocks between two linear layers; `read` takes a block's output apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, 4)
        self.read: Callable[[Any], torch.Tensor] = lambda output: output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inp(x)
        for block in self.h:
            y = self.read(block(y))
        return self.out(y)


def make_net() -> Net:
    torch.manual_seed(11)
    return Net()


def make_engine(model: nn.Module, tier: str, scratch: Path, **changes: Any) -> zero.ZeroEngine:
    paged = tier == "nvme"
    config = make_config(
        **{
            "parameters": tier,
            "optimizer": tier,
            "nvme_path": str(scratch),
            "host_memory": "20KB" if paged else "1GB",
            "sub_group_size": 512 if paged else 1_000_000,
            **changes,
        }
    )
    engine, _, _, _ = zero.initialize(model=model, config=config)
    assert bool(engine.plan.memory.swap_file_bytes) == paged
    return engine


def batch(step: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(step))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def run(engine: zero.ZeroEngine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def expected_losses(steps: int) -> list[float]:
    engine = make_engine(make_net(), "none", Path())
    losses = run(engine, range(steps))
    engine.destroy()
    return losses


@dataclass
class Plain:
    y: torch.Tensor
    w: Any = None


@dataclass(slots=True)
class Slotted:
    y: torch.Tensor


class Output(collections.OrderedDict):
    @property
    def y(self) -> torch.Tensor:
        return self["y"]


OUTPUTS: dict[str, tuple[Callable[[Block, torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda block, y: (y, None), lambda out: out[0]),
    "dict": (lambda block, y: {"y": y}, lambda out: out["y"]),
    "dataclass with a view of a weight": (
        lambda block, y: Plain(y, block.a.weight.t()),
        lambda out: out.y + out.w.sum() * 0,
    ),
    "slotted dataclass": (lambda block, y: Slotted(y), lambda out: out.y),
    "deque": (lambda block, y: collections.deque([y]), lambda out: out[0]),
    "model output with a parameter": (
        lambda block, y: Output(y=y, w=block.a.weight),
        lambda out: out.y + out["w"].sum() * 0,
    ),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_any_structure(scratch: Path, kind: str) -> None:
    finish, read = OUTPUTS[kind]
    model = make_net()
    model.read = read
    for block in model.h:
        block.finish = finish
    engine = make_engine(model, "nvme", scratch)
    assert run(engine, range(3)) == expected_losses(3)
    engine.destroy()


@pytest.mark.filterwarnings("ignore:the first step took:RuntimeWarning")
@pytest.mark.parametrize("tier", TIERS)
def test_a_loss_that_leaves_a_block_by_the_side(scratch: Path, tier: str) -> None:
    def keep(block: Block, y: torch.Tensor) -> torch.Tensor:
        block.aux = (block.a.weight * y.mean()).square().sum()
        return y

    losses = {}
    for each in (tier, "plain"):
        model = make_net()
        for block in model.h:
            block.finish = keep
        if each == "plain":
            total = loss_of(model, 0) + sum(block.aux for block in model.h)
            total.backward()
            losses[each] = [p.grad.norm().item() for p in model.parameters()]
            continue
        engine = make_engine(model, tier, scratch)
        total = loss_of(engine, 0) + sum(block.aux for block in model.h)
        engine.backward(total)
        from tests.support.observe import full_gradients

        gradients = full_gradients(engine)
        losses[each] = [float(np.linalg.norm(gradients[n])) for n, _ in model.named_parameters()]
        engine.step()
        engine.destroy()
    assert losses[tier] == pytest.approx(losses["plain"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:the first step took:RuntimeWarning")
@pytest.mark.parametrize("tier", TIERS)
def test_double_backward_gives_the_gradients_of_plain_torch(scratch: Path, tier: str) -> None:
    def penalty(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = batch(0).requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().mean() + y.square().mean()

    from tests.support.observe import full_gradients

    plain = make_net()
    penalty(plain).backward()
    engine = make_engine(make_net(), tier, scratch)
    engine.backward(penalty(engine))
    gradients = full_gradients(engine)
    for name, parameter in plain.named_parameters():
        assert np.allclose(gradients[name], parameter.grad.reshape(-1).numpy(), atol=1e-7), name
    engine.step()
    assert not any(unit.is_held for unit in engine._runtime.units) or run(engine, range(1))
    run(engine, range(2))
    assert not any(unit.is_held for unit in engine._runtime.units)
    engine.destroy()


@pytest.mark.parametrize("grad", [True, False])
def test_aliases_of_weights_outlive_their_window(scratch: Path, grad: bool) -> None:  # noqa: FBT001
    model = make_net()
    expected = model.h[1].a.weight.detach().t().clone()
    kept: list[torch.Tensor] = []

    def keep(block: Block, y: torch.Tensor) -> torch.Tensor:
        kept.append(block.a.weight.t())
        kept.append(block.a.weight.detach())
        return y

    model.h[1].finish = keep
    engine = make_engine(model, "nvme", scratch)
    with torch.set_grad_enabled(grad):
        loss_of(engine, 0)
    run(engine, range(2))
    assert torch.equal(kept[0], expected)
    assert torch.equal(kept[1], expected.t())
    engine.destroy()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupted_forward_leaves_later_steps_right(
    scratch: Path, tier: str, kind: type[BaseException]
) -> None:
    model = make_net()
    engine = make_engine(model, tier, scratch)
    losses = run(engine, range(1))

    def interrupt(*_: Any) -> None:
        raise kind

    handle = model.h[1].b.register_forward_pre_hook(interrupt)
    with pytest.raises(kind):
        loss_of(engine, 50)
    handle.remove()
    losses += run(engine, range(1, 4))
    assert losses == expected_losses(4)
    engine.destroy()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_a_failed_backward_drops_its_window_on_every_tier(
    scratch: Path, tier: str, kind: type[BaseException]
) -> None:
    model = make_net()
    engine = make_engine(model, tier, scratch)
    losses = run(engine, range(1))
    armed = [True]

    def interrupt(gradient: torch.Tensor) -> None:
        if armed[0]:
            raise kind

    model.h[1].finish = lambda block, y: (y.register_hook(interrupt) if y.requires_grad else 0, y)[
        1
    ]
    loss = loss_of(engine, 1)
    with pytest.raises(kind):
        engine.backward(loss, retain_graph=True)
    armed[0] = False
    losses += run(engine, range(1, 3))
    assert losses == expected_losses(3)
    assert engine.global_steps == 3
    engine.destroy()


@pytest.mark.parametrize("tier", TIERS)
def test_a_backward_that_is_tried_again_without_a_forward_counts_once(
    scratch: Path, tier: str
) -> None:
    model = make_net()
    engine = make_engine(model, tier, scratch)
    armed = [True]

    def fail_once(gradient: torch.Tensor) -> None:
        if armed[0]:
            armed[0] = False
            raise RuntimeError("boom")

    model.h[1].finish = lambda block, y: (y.register_hook(fail_once), y)[1]
    loss = loss_of(engine, 0)
    with pytest.raises(RuntimeError, match="boom"):
        loss.backward(retain_graph=True)
    with pytest.warns(RuntimeWarning, match="backward failed"):
        loss.backward()
    engine.step()
    assert engine.global_steps == 1
    model.h[1].finish = lambda block, y: y
    assert [loss.item(), *run(engine, range(1, 3))] == expected_losses(3)
    engine.destroy()


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_a_torn_step_is_refused_from_then_on(
    scratch: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_net(), tier, scratch)
    kernels = engine._runtime.kernels
    calls = []

    def adamw(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        type(kernels).update(kernels, *arguments)

    monkeypatch.setattr(engine._runtime.store, "kernels", _Spy(kernels, adamw))
    engine.backward(loss_of(engine, 0))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    for call in (engine.step, lambda: loss_of(engine, 1)):
        with pytest.raises(PagerFailedError, match="sub-groups already moved"):
            call()
    engine.destroy()


class _Spy:
    def __init__(self, kernels: Any, adamw: Callable[..., None]) -> None:
        self._kernels = kernels
        self.update = adamw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


def test_shared_submodules_belong_to_the_root(scratch: Path) -> None:
    losses = []
    for tier in TIERS:
        model = make_net()
        model.h[2].b = model.h[0].b
        model.h[1].a.weight = model.h[0].a.weight
        engine = make_engine(model, tier, scratch)
        losses.append(run(engine, range(3)))
        engine.destroy()
    assert losses[0] == losses[1]


def test_inference_mode_does_not_poison_the_engine(scratch: Path) -> None:
    model = make_net()
    engine = make_engine(model, "nvme", scratch)
    with torch.inference_mode(), zero.GatheredParameters(list(model.parameters())):
        kept = [parameter.detach() for parameter in model.parameters()]
        loss_of(engine, 5)
    assert run(engine, range(3)) == expected_losses(3)
    assert all(tensor.isfinite().all() for tensor in kept)
    engine.destroy()


def test_a_copy_of_the_model_takes_no_engine_along(scratch: Path) -> None:
    model = make_net()
    engine = make_engine(model, "none", scratch)
    run(engine, range(1))
    twin = copy.deepcopy(model)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    loss_of(twin, 0).backward()
    assert all(parameter.grad is not None for parameter in twin.parameters())
    run(engine, range(1))
    engine.destroy()


def test_an_engine_that_is_dropped_gives_everything_back(scratch: Path) -> None:
    gc.collect()

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208

    before = counts()
    for _ in range(3):
        model = make_net()
        engine = make_engine(model, "nvme", scratch)
        run(engine, range(1))
        assert counts() > before
        del engine
        gc.collect()
        assert counts() == before
        with pytest.raises(RuntimeError, match="engine of this model is gone"):
            loss_of(model, 0)
        with pytest.raises(zero.ShardedAccessError, match="is destroyed or gone"):
            model.h[0].a.weight.sum()


def test_unused_parameters_do_not_hold_gradients_back(scratch: Path) -> None:
    """One unused parameter a block once kept the scratch of every block to the end."""
    model = make_net()
    for block in model.h:
        block.unused = nn.Parameter(torch.zeros(1))
    engine = make_engine(model, "nvme", scratch)
    reducer = engine._runtime.reducer
    assert reducer is not None
    peak = 0

    def watch(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, sum(each.numel() * 4 for each in reducer._scratch.values()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(watch)
    run(engine, range(1))
    assert 0 < peak <= engine.plan.memory.gradient_scratch_bytes
    engine.destroy()


def test_a_layer_used_twice_in_nested_backwards_adds_up_alike_on_every_tier(scratch: Path) -> None:
    """Also where parameters rest in place and gradients do not, and one of a block gets none.

    Such a block waited for its second use: acc + (u + v) in the shard, where autograd makes
    (acc + u) + v.
    """

    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inp(x)
            for block in (*self.h, *self.h):
                y = checkpoint(block, y, use_reentrant=True)
            return self.out(y)

    found = []
    for tier, budget in (("none", "1GB"), ("nvme", "20KB"), ("nvme", "40KB"), ("nvme", "50KB")):
        norms = []
        torch.manual_seed(11)
        model = Twice()
        for block in model.h:
            block.unused = nn.Parameter(torch.zeros(1))
        engine = make_engine(model, tier, scratch, accumulation=3, host_memory=budget)
        for step in range(9):
            engine.backward(loss_of(engine, step))
            engine.step()
            norms.append(engine.get_global_grad_norm())
        found.append(norms)
        engine.destroy()
    assert found == [found[0]] * 4


def test_a_graph_that_is_not_used_is_freed(scratch: Path) -> None:
    """Also by an operation that saves its own output, which plain torch does not keep either."""
    engine = make_engine(make_net(), "nvme", scratch)
    made: list[StorageWeakRef] = []

    def remember(_block: Block, y: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(y)
        made.append(StorageWeakRef(found.untyped_storage()))
        return found

    for block in engine.module.h:
        block.finish = remember
    for keeps in (True, False):
        loss = loss_of(engine, 1)
        if not keeps:
            del loss
        assert [each.expired() for each in made] == 3 * [not keeps]
        made.clear()
    engine.destroy()
