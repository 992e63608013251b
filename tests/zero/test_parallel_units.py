"""Units side by side on one input: one of them at a time is unsharded in the backward, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
import zero.planning
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.observe import state_digest
from tests.support.simulated_device import SimulatedDevice

pytestmark = pytest.mark.nvme

WIDTH, HEADS = 32, 12


class Heads(nn.Module):
    """Many heads on one trunk, or on the input itself; some use what they are given twice."""

    def __init__(self, *, trunk: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(WIDTH, WIDTH) if trunk else nn.Identity()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        y = x.detach()
        for head in self.heads:
            y = y + head(x)
        return self.out(y).square().mean()


class Head(nn.Module):
    """A gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tanh(self.down(torch.tanh(self.up(x))))


def trained(tier: str, folder: Path, *, trunk: bool, rank: int = 0) -> dict[str, Any]:
    """Train three steps, and return what the plan was exceeded by, by the name of the line."""
    config = make_config(
        parameters=tier, optimizer=tier, nvme_path=str(folder), sub_group_size=10_000,
        host_memory="400KB" if tier == "nvme" else "8MB",
    )  # fmt: skip
    engine, _, _, _ = zero.initialize(model=Heads(trunk=trunk), config=config)
    losses = []
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + rank)
        loss = engine(torch.randn(2, WIDTH, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    lines = engine.memory_report()["lines"]
    found = {
        "losses": losses,
        "state": state_digest(engine),
        "read": engine.ledger.snapshot().bytes_by_class["nvme read parameter"],
        "exceeded": {
            each["what"]: [each["actual_bytes"], each["planned_bytes"]]
            for each in lines
            if (each["actual_bytes"] or 0) > each["planned_bytes"] > 0
        },
        "live": sum(
            each["actual_bytes"] for each in lines if each["what"] == "parameters unsharded (peak)"
        ),
    }
    engine.destroy()
    return found


@pytest.mark.parametrize(("tier", "simulates"), [("nvme", False), ("nvme", True), ("cpu", True)])
@pytest.mark.parametrize("trunk", [True, False])
def test_heads_take_turns_within_the_plan(
    tier: str,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    simulates: bool,
    trunk: bool,
) -> None:
    reference = trained("none", scratch, trunk=trunk)
    if simulates:
        monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(1))
    found = trained(tier, scratch, trunk=trunk)
    assert (found["read"] > 0) == (tier == "nvme")
    assert found["live"] > 0
    assert not found["exceeded"]
    assert found["losses"] == reference["losses"]
    assert found["state"] == reference["state"]


@pytest.mark.parametrize("simulates", [False, True])
def test_ranks_take_them_alike(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, *, simulates: bool
) -> None:
    def work(rank: int) -> list[dict[str, Any]]:
        reference = trained("none", scratch, trunk=True, rank=rank)
        if simulates:
            monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(1))
        return [reference, trained("cpu", scratch, trunk=True, rank=rank)]

    for reference, found in on_ranks(work, 2, scratch):
        assert found["live"] > 0
        assert not found["exceeded"]
        assert found["losses"] == reference["losses"]
        assert found["state"] == reference["state"]


def test_forwards_of_several_threads_are_not_compared(scratch: Path) -> None:
    """Each thread numbers its nodes from zero: the second forward here looks older than it is."""
    from concurrent.futures import ThreadPoolExecutor

    def window(engine: zero.ZeroEngine, *, threads: bool) -> float:
        x = torch.ones(2, WIDTH)
        first = engine(x)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(engine, 2 * x).result() if threads else engine(2 * x)
        loss = first + second
        engine.backward(loss)
        engine.step()
        return loss.item()

    found = []
    for threads in (False, True):
        config = make_config(parameters="nvme", optimizer="nvme", nvme_path=str(scratch))
        engine, _, _, _ = zero.initialize(model=Heads(), config=config)
        losses = [window(engine, threads=threads) for _ in range(3)]
        found.append((losses, state_digest(engine), engine.global_steps))
        engine.destroy()
    assert found[0] == found[1]


class Block(nn.Module):
    """Half of it may be left out, on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_whole = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + torch.tanh(self.first(x))
        return y + self.second(x) if self.is_whole else y


class Target(nn.Module):
    """A block is used again, where no gradient goes on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return (x + self.h[1](x.detach())).square().mean()


def stages_2_and_3(
    model_of: Callable[[], nn.Module],
    choose: Callable[[Any, int], None],
    tier: str,
    scratch: Path,
    rank: int,
) -> list[list[Any]]:
    """Train four steps in either stage, and return states and numbers of steps.

    Args:
        model_of: builds the model.
        choose: sets what this rank leaves out of it in a step.
        tier: where optimizer state rests, in stage 3 parameters as well.
        scratch: where swap files go.
        rank: of this process.
    """
    found = []
    for stage in (2, 3):
        config = make_config(
            stage=stage, parameters=tier if stage == 3 else "none", optimizer=tier,
            nvme_path=str(scratch), host_memory="40KB" if tier == "nvme" else "8MB",
            sub_group_size=512,
        )  # fmt: skip
        engine, _, _, _ = zero.initialize(model=model_of(), config=config)
        for number in range(4):
            choose(engine.module, number)
            engine.backward(engine(torch.full((2, WIDTH), 1.0 + rank + number)))
            engine.step()
        assert (engine.ledger.snapshot().nvme_read_bytes > 0) == (tier == "nvme")
        found.append([state_digest(engine), engine.global_steps])
        engine.destroy()
    return found


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_ranks_part_in_a_block_on_an_input_without_gradient(tier: str, scratch: Path) -> None:
    """Whether all of its gradients have arrived is what one rank knows alone."""

    def work(rank: int) -> list[list[Any]]:
        def choose(model: Any, _number: int) -> None:
            for block in model.h:
                block.is_whole = rank == 0

        return stages_2_and_3(Target, choose, tier, scratch, rank)

    for partitioned, sharded in on_ranks(work, 2, scratch):
        assert sharded == partitioned
        assert sharded[1] == 4


class Skipping(nn.Module):
    """Blocks that give back what they got, each rank another one, as with stochastic depth."""

    class Block(nn.Module):
        """One of them, which may return more than a tensor."""

        def __init__(self, *, packs: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.skips, self.packs = False, packs

        def forward(self, x: torch.Tensor) -> torch.Tensor | dict[str, Any]:
            if not self.skips:
                x = x + torch.tanh(self.inner(x))
            return {"hidden": [x], "cache": None} if self.packs else x

    def __init__(self, *, packs: bool, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(self.Block(packs=packs) for _ in range(4))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.h:
            y = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            x = y["hidden"][0] if isinstance(y, dict) else y
        return x.square().mean()


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_ranks_leave_out_different_blocks(
    tier: str, scratch: Path, *, packs: bool, checkpoints: bool
) -> None:
    def work(rank: int) -> list[list[Any]]:
        def choose(model: Any, number: int) -> None:
            for at, block in enumerate(model.h):
                block.skips = (at + number + rank) % 3 == 0

        def model_of() -> nn.Module:
            return Skipping(packs=packs, checkpoints=checkpoints)

        return stages_2_and_3(model_of, choose, tier, scratch, rank)

    for partitioned, sharded in on_ranks(work, 2, scratch):
        assert sharded == partitioned
        assert sharded[1] == 4


def test_ranks_of_which_one_needs_no_gradient_of_a_unit_are_told(scratch: Path) -> None:
    """The others come to its backward, and reduce what came before; this one is at the end."""

    def work(rank: int) -> str:
        config = make_config(parameters="cpu", optimizer="cpu", host_memory="8MB")
        model = Heads(trunk=False)
        if rank == 1:
            model.heads[0].register_forward_hook(lambda _module, _args, output: output.detach())
        engine, _, _, _ = zero.initialize(model=model, config=config)
        loss = engine(torch.ones(2, WIDTH))
        with pytest.raises(zero.RankError) as caught:
            engine.backward(loss)
        engine.destroy()
        return str(caught.value)

    for said in on_ranks(work, 2, scratch):
        assert "all ranks must use the same parts of the model in the same order" in said


def test_what_exceeds_the_plan_in_a_later_step_is_said_once(scratch: Path) -> None:
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=str(scratch), host_memory="400KB",
        sub_group_size=10_000,
    )  # fmt: skip
    engine, _, _, _ = zero.initialize(model=Heads(), config=config)

    def step(*, twice: bool) -> None:
        x = torch.ones(2, WIDTH).requires_grad_()
        loss = engine(x)
        if twice:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        engine.backward(loss)
        engine.step()

    step(twice=False)
    with pytest.warns(RuntimeWarning, match=r"^step 2 took \d+ bytes of device memory for param"):
        step(twice=True)
    step(twice=True)
    engine.destroy()
