"""What an interruption leaves of the hooks for saved tensors: nothing, and nobody else's missing.

torch runs no hooks of a module after a `KeyboardInterrupt`, so those of a guard stay on top.
"""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from offload import PagerFailedError
from tests.support.configs import make_config

pytestmark = pytest.mark.nvme

WIDTH = 64


class Block(nn.Module):
    """Is interrupted while it says so."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise KeyboardInterrupt
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    """Checkpointed blocks between two layers of the root unit."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def make_engine(tier: str, folder: Path, *, reentrant: bool) -> zero.ZeroEngine:
    config = make_config(
        parameters=tier, optimizer=tier, nvme_path=str(folder), accumulation=2,
        host_memory="64KB", sub_group_size=1024,
    )  # fmt: skip
    return zero.initialize(model=Net(reentrant=reentrant), config=config)[0]


def micro_batch(engine: zero.ZeroEngine, number: int) -> float:
    loss = engine(torch.full((2, WIDTH), 1.0 + number))
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("tier", ["none", "nvme"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("moment", ["backward", "forward"])
def test_an_interrupted_block_drops_its_window_alone(
    moment: str, tier: str, scratch: Path, *, reentrant: bool
) -> None:
    reference = make_engine("none", scratch, reentrant=reentrant)
    wanted = [micro_batch(reference, number) for number in (2, 3, 4)]
    engine = make_engine(tier, scratch, reentrant=reentrant)
    micro_batch(engine, 0)
    seen: list[Any] = []
    block: Any = engine.module.h[1]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: (seen.append(1), each)[1], lambda each: each
    ):
        loss = engine(torch.ones(2, WIDTH)) if moment == "backward" else None
        block.fails = True
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss) if loss is not None else engine(torch.ones(2, WIDTH))
        block.fails = False
        seen.clear()
        torch.ones(3, requires_grad=True).exp()
        assert len(seen) == 1, "the user's own hooks are on top again"
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None  # noqa: FBT003
    if moment == "forward":
        engine.zero_grad()
    assert [micro_batch(engine, number) for number in (2, 3, 4)] == wanted
    assert engine.global_steps == 1
    if tier == "nvme":
        assert engine.ledger.snapshot().nvme_write_bytes > 0
    engine.destroy()
    reference.destroy()


class Tree(Net):
    """Calls itself: a forward of the model inside one of its own."""

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return self.enter(self(x, depth - 1)) if depth else x


@pytest.mark.parametrize("kind", [Net, Tree])
def test_a_model_that_was_interrupted_begins_anew(kind: type[Net], scratch: Path) -> None:
    """As `engine.module.generate` is, in a notebook: no step comes that would tidy up."""
    plain, x = kind(reentrant=False), torch.ones(2, WIDTH)
    offload = {"device": "nvme", "nvme_path": str(scratch)}
    config = {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": offload,
        },
        "tiers": {"host_memory": "64KB"},
    }
    engine, _, _, _ = zero.initialize(model=kind(reentrant=False), config=config)
    units = engine._runtime.scheduler.units
    with torch.no_grad():
        wanted = plain(x)
        assert torch.equal(engine.module(x), wanted)
        assert not any(unit.is_unsharded for unit in units)
        for number in (1, 3):
            block: Any = engine.module.h[number]
            block.fails = True
            with pytest.raises(KeyboardInterrupt):
                engine.module(x)
            block.fails = False
            assert any(unit.is_unsharded for unit in units), "nobody has told of the interruption"
            assert torch.equal(engine.module(x), wanted)
            assert not any(unit.is_unsharded for unit in units)
    assert engine.ledger.snapshot().nvme_read_bytes > 0
    engine.destroy()


def test_a_thread_that_ends_in_a_forward_leaves_this_ones_hooks(scratch: Path) -> None:
    """Each thread has a stack of its own, and that of the one that ended is gone."""
    reference = make_engine("none", scratch, reentrant=False)
    wanted = [micro_batch(reference, number) for number in range(4)]
    engine = make_engine("nvme", scratch, reentrant=False)
    block: Any = engine.module.h[1]
    block.fails = True
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        pool.submit(engine.module, torch.ones(2, WIDTH)).result()
    block.fails = False
    seen: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: (seen.append(1), each)[1], lambda each: each
    ):
        with torch.no_grad():
            engine(torch.ones(2, WIDTH))
        torch.ones(3, requires_grad=True).exp()
    assert len(seen) == 1
    assert [micro_batch(engine, number) for number in range(4)] == wanted
    engine.destroy()
    reference.destroy()


class SignallingKernels:
    """Kernels that somebody presses Ctrl-C in, so many times before the third update."""

    def __init__(self, kernels: Any, presses: int) -> None:
        self._kernels = kernels
        self._presses = presses
        self._updates = 0

    def update(self, *arguments: Any) -> None:
        self._updates += 1
        for _ in range(self._presses if self._updates == 3 else 0):
            signal.raise_signal(signal.SIGINT)
        self._kernels.update(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_a_ctrl_c_waits_for_the_end_of_a_step(
    tier: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`except KeyboardInterrupt: engine.save_checkpoint(...)` has a whole state to save."""
    reference = make_engine("none", scratch, reentrant=False)
    wanted = [micro_batch(reference, number) for number in range(6)]
    engine = make_engine(tier, scratch, reentrant=False)
    losses = [micro_batch(engine, 0)]
    store = engine._runtime.store
    with monkeypatch.context() as patch:
        patch.setattr(store, "kernels", SignallingKernels(store.kernels, 1))
        with pytest.raises(KeyboardInterrupt):
            micro_batch(engine, 1)
    assert engine.global_steps == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.save_checkpoint(scratch / "ck")
    losses += [micro_batch(engine, number) for number in (2, 3)]
    assert losses == [wanted[0], *wanted[2:4]]
    other = make_engine(tier, scratch, reentrant=False)
    other.load_checkpoint(scratch / "ck")
    again = [micro_batch(other, number) for number in (2, 3)]
    assert again == wanted[2:4]
    if tier == "nvme":
        assert engine.ledger.snapshot().nvme_write_bytes > 0
    for each in (engine, other, reference):
        each.destroy()


def test_a_second_ctrl_c_is_not_held_back(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("nvme", scratch, reentrant=False)
    micro_batch(engine, 0)
    store = engine._runtime.store
    with monkeypatch.context() as patch:
        patch.setattr(store, "kernels", SignallingKernels(store.kernels, 2))
        with pytest.raises(KeyboardInterrupt):
            micro_batch(engine, 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(PagerFailedError, match=r"already moved: .* \(2 of \d+\)"):
        engine.step()
    engine.destroy()


def test_a_handler_of_the_program_is_left_alone(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("nvme", scratch, reentrant=False)
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(engine.global_steps))
    try:
        micro_batch(engine, 0)
        store = engine._runtime.store
        monkeypatch.setattr(store, "kernels", SignallingKernels(store.kernels, 1))
        micro_batch(engine, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [0]
    assert engine.global_steps == 1
    engine.destroy()


def test_a_second_thread_is_refused_while_the_first_goes_on(scratch: Path) -> None:
    """What runs elsewhere is not taken for what an interruption has left."""
    engine = make_engine("nvme", scratch, reentrant=False)
    x, wanted = torch.ones(2, WIDTH), Net(reentrant=False)(torch.ones(2, WIDTH))
    inside, may_go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        may_go.wait(60)

    handle = engine.module.h[1].register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(engine.module, x)
        inside.wait(60)
        handle.remove()
        for model in (engine.module, engine):
            with pytest.raises(RuntimeError, match="two threads run a forward of the same engine"):
                model(x)
        may_go.set()
        assert torch.equal(first.result(), wanted)
    assert torch.equal(engine(x), wanted)
    engine.destroy()
