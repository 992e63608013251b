"""Where passes end: nested backwards, failures before the model, models without a root unit.

Blocks alone get gradients here, so that nothing but them and the model's outputs tells of a pass.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
import zero.planning
from offload import pages_parameters
from tests.support.at_the_loss import LAYERS, WIDTH, WORDS, Block
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.launch import run_worker
from tests.support.observe import digest, full_parameters
from tests.support.simulated_device import SimulatedDevice

pytestmark = pytest.mark.nvme


class Fail(torch.autograd.Function):
    """Fails in the backward while the model says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: Adapted) -> torch.Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.model.fails:
            raise torch.OutOfMemoryError("in the middle of a backward")
        return gradient, None


class Adapted(nn.Module):
    """Checkpointed blocks before a head that is frozen."""

    def __init__(self, *, reentrant: bool = True) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.reentrant = reentrant
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for at, block in enumerate(self.h):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
            if at == LAYERS // 2:
                x = Fail.apply(x, self)
        return self.head(x).square().mean()


def make_engine(model: nn.Module, path: Path, tier: str = "none", **keys: Any) -> zero.ZeroEngine:
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    config = make_config(
        parameters=tier, optimizer=tier, nvme_path=str(path), accumulation=2, host_memory="4MB"
    )
    stage = keys.pop("stage", 3)
    config["zero_optimization"]["stage"] = stage
    engine, _, _, _ = zero.initialize(model=model, config=config | keys)
    return engine


def train(engine: zero.ZeroEngine, micro_batches: int, x: torch.Tensor) -> list[int]:
    """Return how many steps were taken after each micro-batch."""
    steps = []
    for _ in range(micro_batches):
        engine.backward(engine(x).square().mean())
        engine.step()
        steps.append(engine.global_steps)
    return steps


TIERS = [(1, "none"), (2, "none"), (3, "none"), (3, "cpu"), (3, "nvme")]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("stage", "tier"), TIERS)
def test_a_backward_of_nested_ones_that_fails_drops_its_window(
    scratch: Path, stage: int, tier: str, *, reentrant: bool
) -> None:
    found = []
    for fails in (False, True):
        engine = make_engine(Adapted(reentrant=reentrant), scratch, tier, stage=stage)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
        if fails:
            train(engine, 1, x)
            loss = engine(x)
            engine.module.fails = True
            with pytest.raises(torch.OutOfMemoryError):
                engine.backward(loss)
            engine.module.fails = False
        assert train(engine, 2, x) == [0, 1]
        found.append((engine.get_global_grad_norm(), digest(full_parameters(engine))))
        engine.destroy()
    assert found[0] == found[1]


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_nested_backwards_are_one_under_a_loss_scale(scratch: Path, tier: str) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4}
    engine = make_engine(Adapted(), scratch, tier, fp16=fp16)
    assert train(engine, 4, torch.ones(2, WIDTH).half()) == [0, 1, 1, 2]
    assert engine.skipped_steps == 0
    engine.destroy()


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_a_backward_that_fails_before_the_model_drops_its_window(scratch: Path, tier: str) -> None:
    engine = make_engine(Adapted(), scratch, tier)
    x = torch.ones(2, WIDTH)
    train(engine, 1, x)
    engine.module.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        engine.backward(Fail.apply(engine(x), engine.module))
    engine.module.fails = False
    assert train(engine, 2, x) == [0, 1]
    engine.destroy()


NO_LOSSES: list[tuple[Any, type[Exception], str]] = [
    (1.5, TypeError, r"got float 1\.5; pass what the forward returned"),
    (None, TypeError, "got NoneType"),
    (torch.ones(()), RuntimeError, "leads to no parameter"),
    (torch.ones(2, 3, requires_grad=True), RuntimeError, r"shape \(2, 3\)"),
]


@pytest.mark.parametrize(("loss", "kind", "reason"), NO_LOSSES)
def test_what_is_no_loss_is_refused_and_the_window_stays(
    scratch: Path, loss: Any, kind: type[Exception], reason: str
) -> None:
    engine = make_engine(Adapted(), scratch, "cpu")
    x = torch.ones(2, WIDTH)
    train(engine, 1, x)
    with pytest.raises(kind, match=reason):
        engine.backward(loss)
    assert engine.micro_steps == 1
    assert train(engine, 1, x) == [1]
    engine.destroy()


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("on_device", [False, True])
def test_the_gradient_of_an_input_alone_is_no_micro_batch(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, tier: str, *, on_device: bool
) -> None:
    if on_device:
        monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(3))
    engine = make_engine(nn.Sequential(Block(), Block()), scratch, tier)
    x = torch.ones(2, WIDTH).requires_grad_()
    for steps in (0, 1):
        (slope,) = torch.autograd.grad(engine(x).square().mean(), x)
        assert engine.micro_steps == steps and slope.any()
        engine.backward(engine(x + slope.sign()).square().mean())
        engine.step()
        assert engine.global_steps == steps
    engine.destroy()


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_backwards_nested_deeper_than_autograds_own_stack_are_one(tier: str) -> None:
    done = run_worker("nested.py", tier, timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]
    counts, norm, wanted = json.loads(done.stdout)
    assert counts == [1, 2, 1]
    assert norm == pytest.approx(wanted, rel=1e-6)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # within another
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_nested_backwards_of_a_loss_beside_the_outputs_are_one(
    scratch: Path, tier: str, how: str
) -> None:
    engine = make_engine(Adapted(), scratch, tier)
    for number in (1, 2):
        x = torch.ones(2, WIDTH).requires_grad_()
        if how == "blocks":
            y = x
            for block in engine.module.h:
                y = checkpoint(block, y, use_reentrant=True)
            loss = y.square().mean()
        else:
            parts = [checkpoint(engine, part, use_reentrant=True) for part in (x, 2 * x, 3 * x)]
            loss = torch.stack(parts).sum()
        engine.backward(loss)
        engine.step()
        assert (engine.micro_steps, engine.global_steps) == (number, number // 2)
    engine.destroy()


@dataclass(slots=True)
class Output:
    logits: torch.Tensor


@dataclass(slots=True)
class NamedOutput(Output):
    name: str


def test_outputs_are_seen_in_slots_of_a_base_class(scratch: Path) -> None:
    class Slotted(Adapted):
        def forward(self, x: torch.Tensor) -> Any:
            return NamedOutput(super().forward(x), "name")

    fp16 = {"enabled": True, "initial_scale_power": 4}
    engine = make_engine(Slotted(), scratch, fp16=fp16)
    for steps in (0, 1):
        engine.scale(engine(torch.ones(2, WIDTH).half()).logits).backward()
        engine.step()
        assert engine.global_steps == steps
    engine.destroy()


class Stack(nn.Module):
    """Blocks used up to a depth, with a root unit or without one."""

    def __init__(self, *, has_root: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH) if has_root else nn.Identity()
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.depth = LAYERS
        self.loops = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for _ in range(self.loops):
            for block in self.h[: self.depth]:
                x = block(x)
        return x


def beside_a_device(stack: nn.Module, monkeypatch: pytest.MonkeyPatch) -> zero.ZeroEngine:
    monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(3))
    config = make_config(parameters="cpu", optimizer="cpu", host_memory="8MB")
    config["zero_optimization"].pop("stage3_max_reuse_distance")
    engine, _, _, _ = zero.initialize(model=stack, config=config)
    return engine


def live(engine: zero.ZeroEngine) -> int:
    return sum(unit.live_bytes for unit in engine._runtime.units)


@pytest.mark.parametrize("has_root", [False, True])
def test_nothing_is_left_after_a_forward_without_gradients(
    monkeypatch: pytest.MonkeyPatch, *, has_root: bool
) -> None:
    stack = Stack(has_root=has_root)
    stack.depth, stack.loops = 2, 3
    engine = beside_a_device(stack, monkeypatch)
    x = torch.ones(2, WIDTH)
    before = engine.ledger.snapshot()
    for _ in range(3):
        with torch.no_grad():
            engine(x)
            assert live(engine) == 0
            for _ in range(2):
                y = x
                for block in stack.h:
                    y = block(y)
            assert live(engine) == 0
    assert engine.ledger.snapshot().minus(before).copied_bytes["in"] > 0
    engine(x)  # no backward follows
    with torch.no_grad():
        for block in stack.h:
            x = block(x)
    assert live(engine) == 0
    engine.destroy()


@pytest.mark.parametrize("has_root", [False, True])
def test_depths_that_change_leave_no_more_at_the_loss_than_is_planned(
    monkeypatch: pytest.MonkeyPatch, *, has_root: bool
) -> None:
    stack = Stack(has_root=has_root)
    engine = beside_a_device(stack, monkeypatch)
    planned = engine.plan.memory.live_bytes_at_loss
    seen = []
    for depth in (3, 2, 1, 4, 3, 2, 1, 6, 5, 6, 2, 5, 3):
        stack.depth = depth
        output = engine(torch.ones(2, WIDTH))
        seen.append(live(engine))
        engine.backward(output.square().mean())
        engine.step()
    assert max(seen) == planned > 0
    engine.destroy()


class Wide(nn.Module):
    """A wide block among others, each used twice: by itself, and in a backward inside another."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 8, 1)
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, each * WIDTH), nn.Linear(each * WIDTH, WIDTH))
            for each in widths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = checkpoint(block, block(x), use_reentrant=True)
        return x


def beyond_plan(engine: zero.ZeroEngine) -> list[str]:
    lines = engine.memory_report()["lines"]
    return [
        each["what"] for each in lines if (each["actual_bytes"] or 0) > each["planned_bytes"] > 0
    ]


def test_gradients_of_a_block_used_twice_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = beside_a_device(Wide(), monkeypatch)
    engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
    engine.step()
    assert engine.ledger.peaks["gradients unsharded (peak)"] > 0
    assert not beyond_plan(engine)
    engine.destroy()


def test_after_freezing_peaks_are_compared_with_the_new_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = beside_a_device(Stack(has_root=False), monkeypatch)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()
        assert engine.ledger.peaks["gradients unsharded (peak)"] > 0
        assert not beyond_plan(engine)
        engine.module.h[1:].requires_grad_(requires_grad=False)
    engine.destroy()


class Gaps(nn.Module):
    """Blocks with something between them that does not belong to any."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inp(words)
        for block in self.h:
            x = block(x) * 0.9
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()), logits


def test_ranks_do_alike_where_one_reads_a_part_of_a_block(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block has segments of two parameter groups: one is in memory, and one on a drive."""
    monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(3))

    def work(rank: int) -> tuple[str, list[bool]]:
        torch.manual_seed(0)
        model = Gaps()
        config = make_config(
            parameters="nvme", optimizer="nvme", nvme_path=str(scratch), host_memory="2MB"
        )
        section = config["zero_optimization"]
        section["offload_param"]["max_in_cpu"] = (10**9, 58_200)[rank]
        section.pop("stage3_max_reuse_distance")
        first = [each for name, each in model.named_parameters() if name.endswith("a.weight")]
        rest = [each for name, each in model.named_parameters() if not name.endswith("a.weight")]
        groups = [{"params": rest}, {"params": first, "weight_decay": 0.0}]
        engine, _, _, _ = zero.initialize(model=model, model_parameters=groups, config=config)
        runtime = engine._runtime
        paged = [pages_parameters(runtime.store, each.index) for each in runtime.segments]
        for step in range(3):
            loss, _ = engine(torch.arange(12).view(3, 4) + step)
            engine.backward(loss)
            engine.step()
        found = digest(full_parameters(engine)), paged
        engine.destroy()
        return found

    (bits, nothing), (other_bits, some) = on_ranks(work, 2, scratch)
    assert bits == other_bits
    assert not any(nothing)
    by_block = zip(some[1::2], some[2::2], strict=True)
    assert any(one != other for one, other in by_block)


def test_ranks_do_alike_in_loops_that_change(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept over the loss is kept by both ranks: one reads half of the blocks, one none."""
    monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(3))

    def work(rank: int) -> str:
        stack = Stack(has_root=True)
        for number, parameter in enumerate(stack.parameters()):
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
        config = make_config(
            parameters="nvme", optimizer="nvme", nvme_path=str(scratch), host_memory="4MB"
        )
        section = config["zero_optimization"]
        section["offload_param"]["max_in_cpu"] = (10**9, 26_000)[rank]
        section.pop("stage3_max_reuse_distance")
        engine, _, _, _ = zero.initialize(model=stack, config=config)
        for loops in (1, 2, 3, 2, 1, 2, 3, 2):
            stack.loops = loops
            engine.backward(engine(torch.full((2, WIDTH), 1.0 + rank)).square().mean())
            engine.step()
        assert bool(engine.ledger.snapshot().bytes_by_class["nvme read parameter"]) == bool(rank)
        found = digest(full_parameters(engine))
        engine.destroy()
        return found

    one, other = on_ranks(work, 2, scratch)
    assert one == other


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_several_ranks_plan_all_gradients_where_nothing_moves(scratch: Path, stage: int) -> None:
    """They are exchanged when the backward ends."""

    def work(_rank: int) -> tuple[int, int, list[str]]:
        engine = make_engine(Stack(has_root=True), scratch, stage=stage)
        train(engine, 2, torch.ones(2, WIDTH))
        seen = engine.ledger.peaks["gradients unsharded (peak)"]
        found = seen, engine.plan.memory.gradient_scratch_bytes, beyond_plan(engine)
        engine.destroy()
        return found

    whole = 4 * sum(each.numel() for each in Stack(has_root=True).parameters())
    for seen, planned, beyond in on_ranks(work, 2, scratch):
        assert whole <= seen <= planned
        assert not beyond
