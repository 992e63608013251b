"""Too little of everything: demand never fails for want of a buffer (field reports H1, H2, C5)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config, slot_budget
from tests.support.observe import full_parameters, process_io_bytes
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme


class FiveAtOnce(nn.Module):
    """One block that uses five parameters in one expression, beside a large embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Embedding(3000, 32)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    class Block(nn.Module):
        """Five parameters at once."""

        def __init__(self) -> None:
            super().__init__()
            for name in "abcde":
                self.register_parameter(name, nn.Parameter(torch.randn(32, 32) * 0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(x @ (self.a + self.b) @ self.c) @ (self.d * self.e)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.large(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def starved_engine(
    model: nn.Module, scratch: Path, slots: int, sub_group_size: int
) -> zero.ZeroEngine:
    resident = make_config(parameters="cpu", optimizer="cpu", host_memory="1GB")
    segments = zero.plan_memory(model, resident).memory.request.segments
    budget = slot_budget(
        segments,
        slots=slots,
        world_size=1,
        parameters="nvme",
        optimizer="nvme",
        sub_group_size=sub_group_size,
    )
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory=budget,
        sub_group_size=sub_group_size,
    )
    engine, _, _, _ = zero.initialize(model=model, config=config)
    assert engine.plan.memory.slots.count == slots
    assert engine.plan.memory.swap_file_bytes > 0
    return engine


def resident_engine(model: nn.Module) -> zero.ZeroEngine:
    engine, _, _, _ = zero.initialize(model=model, config=make_config(host_memory="1GB"))
    return engine


def seeded_model() -> nn.Module:
    torch.manual_seed(3)
    return FiveAtOnce()


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 3000, (4, 9), generator=torch.Generator().manual_seed(step))


def run_steps(engine: zero.ZeroEngine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("slots", [1, 2])
def test_one_slot_is_enough_for_five_parameters_and_one_larger_than_a_slot(
    scratch: Path, slots: int
) -> None:
    engine = starved_engine(seeded_model(), scratch, slots, sub_group_size=2048)
    assert engine.module.large.weight.numel() * 4 > engine.plan.memory.slots.size_bytes
    before = process_io_bytes()
    losses = run_steps(engine, range(3))
    read, written = process_io_bytes()
    moved = engine.ledger.snapshot()
    assert read - before[0] > 0
    assert written - before[1] > 0
    assert moved.nvme_read_bytes > 0
    assert moved.nvme_write_bytes > 0
    plain = resident_engine(seeded_model())
    assert losses == run_steps(plain, range(3))
    assert_same(full_parameters(engine), full_parameters(plain))
    engine.destroy()
    plain.destroy()


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert list(ours) == list(theirs)
    for name, values in ours.items():
        assert np.array_equal(values, theirs[name]), name


def test_evaluation_between_steps_changes_nothing(scratch: Path) -> None:
    engine = starved_engine(seeded_model(), scratch, 1, sub_group_size=2048)
    losses = []
    for step in range(3):
        losses += run_steps(engine, range(step, step + 1))
        engine.eval()
        with torch.no_grad():
            first = engine(batch(100)).item()
            assert engine(batch(100)).item() == first
        with torch.inference_mode():
            assert engine(batch(100)).item() == first
        engine.train()
    plain = resident_engine(seeded_model())
    assert losses == run_steps(plain, range(3))
    engine.destroy()
    plain.destroy()


class InterruptedByTestError(RuntimeError):
    """Raised by the tests in the middle of a forward or backward."""


@pytest.mark.parametrize("block", [0, 1, 2])
def test_an_exception_in_a_forward_leaves_the_next_step_intact(scratch: Path, block: int) -> None:
    engine = starved_engine(seeded_model(), scratch, 1, sub_group_size=2048)
    losses = run_steps(engine, range(1))

    def interrupt(*_: Any) -> None:
        raise InterruptedByTestError

    handle = engine.module.blocks[block].register_forward_pre_hook(interrupt)
    with pytest.raises(InterruptedByTestError):
        engine(batch(50))
    handle.remove()
    assert engine_is_idle(engine)
    losses += run_steps(engine, range(1, 3))
    plain = resident_engine(seeded_model())
    assert losses == run_steps(plain, range(3))
    assert_same(full_parameters(engine), full_parameters(plain))
    engine.destroy()
    plain.destroy()


def engine_is_idle(engine: zero.ZeroEngine) -> bool:
    return not any(unit.is_held for unit in engine._runtime.units)


@pytest.mark.parametrize("plain", [False, True])
def test_an_exception_in_a_backward_drops_the_window_and_the_next_step_works(
    scratch: Path,
    plain: bool,  # noqa: FBT001  a parametrised case
) -> None:
    engine = starved_engine(seeded_model(), scratch, 2, sub_group_size=2048)
    losses = run_steps(engine, range(1))

    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise InterruptedByTestError

    hook = engine.module.blocks[1].register_forward_hook(
        lambda module, args, output: Explode.apply(output)
    )
    loss = engine(batch(50))
    with pytest.raises(InterruptedByTestError):
        if plain:
            loss.backward()
        else:
            engine.backward(loss)
    hook.remove()
    if plain:
        with pytest.warns(RuntimeWarning, match="backward failed; the gradients of this"):
            losses += run_steps(engine, range(1, 2))
    else:
        losses += run_steps(engine, range(1, 2))
    losses += run_steps(engine, range(2, 3))
    plain = resident_engine(seeded_model())
    assert losses == run_steps(plain, range(3))
    engine.destroy()
    plain.destroy()


def test_too_little_host_memory_is_refused_before_anything_is_made(scratch: Path) -> None:
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=str(scratch), host_memory=1000
    )
    with pytest.raises(zero.PlanError, match="1000 bytes"):
        zero.initialize(model=make_model(), config=config)
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("parameters", "optimizer"), list(itertools.product(("none", "cpu", "nvme"), repeat=2))
)
def test_every_mix_of_tiers_trains_to_the_same_bits(
    scratch: Path, parameters: str, optimizer: str
) -> None:
    results = []
    for own_parameters, own_optimizer, memory in (
        (parameters, optimizer, "400KB"),
        ("none", "none", "1GB"),
    ):
        config = make_config(
            parameters=own_parameters,
            optimizer=own_optimizer,
            nvme_path=str(scratch),
            host_memory=memory,
            sub_group_size=1024,
            clip=0.3,
        )
        engine, _, _, _ = zero.initialize(model=make_model(layers=3, extra=(5000,)), config=config)
        for step in range(3):
            engine.backward(engine(*make_batch(step)))
            engine.step()
        results.append(full_parameters(engine))
        engine.destroy()
    assert_same(*results)
