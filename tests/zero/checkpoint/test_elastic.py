"""Saved at one world size, tier and format, loaded at any other: the same state, bit for bit."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.observe import state_digest
from tests.support.ranks import Odd
from tests.support.tiny import TinyTransformer, make_batch

pytestmark = pytest.mark.nvme


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Do once what every forked rank would do at its first engine."""
    zero.initialize(model=model(), config=make_config())[0].destroy()


class Model(TinyTransformer):
    """Tied, with a frozen block and parameters of every size around the world sizes."""

    def __init__(self) -> None:
        super().__init__(extra=(1, 2, 3, 129))
        self.blocks[1].requires_grad_(requires_grad=False)


def model() -> nn.Module:
    torch.manual_seed(5)
    return Model()


def config(tier: str, folder: Path, *, as_stored: bool = False, **more: Any) -> dict[str, Any]:
    options = {"parameters": tier, "optimizer": tier, "accumulation": 2, **more}
    if tier == "nvme":
        options |= {"nvme_path": str(folder), "sub_group_size": 512, "host_memory": "60KB"}
    found = make_config(clip=1.0, **options)
    found["tiers"]["checkpoints_as_stored"] = as_stored
    return found


def train(engine: zero.ZeroEngine, first: int, last: int, rank: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*make_batch(step, rank)))
        engine.step()


def save_at(tier: str, folder: Path, source: Path | None, steps: tuple[int, int], **more: Any):
    """Return what a rank does: start or resume, train some micro-batches, save; tell the state."""

    def work(rank: int) -> str:
        engine = zero.initialize(model=model(), config=config(tier, folder, **more))[0]
        if source is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                engine.load_checkpoint(source)
        assert (engine._runtime.store.pager is not None) == (tier == "nvme")
        train(engine, *steps, rank)
        engine.save_checkpoint(folder / f"{tier}{engine.world_size}", client_state={"rank": rank})
        found = state_digest(engine)
        engine.destroy()
        return found

    return work


@pytest.mark.parametrize(
    ("formats", "as_stored"), [(("exact", "fp32"), False), (("compact", "compact"), True)]
)
def test_state_moves_between_world_sizes_tiers_and_formats(
    scratch: Path, formats: tuple[str, str], *, as_stored: bool
) -> None:
    """Half way through an accumulation window; no step is made in between.

    Two ranks save; one, three and four load that and save; two load each of those.
    """
    own: dict[str, Any] = {"dtype": "bf16", "state_format": formats[0], "as_stored": as_stored}
    first = on_ranks(save_at("nvme", scratch, None, (0, 5), **own), 2, scratch)
    assert first[0] == first[1]
    for tier, world_size, more, back in (
        ("cpu", 1, {"state_format": formats[1]}, "none"),
        ("none", 3, {}, "nvme"),
        ("nvme", 4, {}, "cpu"),
    ):
        work = save_at(tier, scratch, scratch / "nvme2", (5, 5), **{**own, **more})
        found = on_ranks(work, world_size, scratch)
        assert set(found) == set(first), f"{tier} on {world_size}"
        source = scratch / f"{tier}{world_size}"
        returned = scratch / f"from{world_size}"
        returned.mkdir()
        found = on_ranks(save_at(back, returned, source, (5, 5), **own), 2, scratch)
        assert set(found) == set(first), f"back to {back} on 2"


def test_resumed_ranks_go_on_as_if_never_stopped(scratch: Path) -> None:
    for name in "abc":
        (scratch / name).mkdir()
    whole = on_ranks(save_at("nvme", scratch / "a", None, (0, 8)), 2, scratch)
    on_ranks(save_at("nvme", scratch / "b", None, (0, 5)), 2, scratch)
    assert (
        on_ranks(save_at("nvme", scratch / "c", scratch / "b" / "nvme2", (5, 8)), 2, scratch)
        == whole
    )


def test_odd_tied_weights_are_exported_from_any_ranks(scratch: Path) -> None:
    """Parameters of every size around the world size, tied odd ones, and 3-D ones."""
    folder = scratch / "odd"

    def work(rank: int) -> None:
        engine = zero.initialize(model=Odd(), config=config("none", scratch))[0]
        for _ in range(2):
            engine.backward(engine(torch.arange(7)))
            engine.step()
        engine.save_checkpoint(folder)
        expected = {key: each.clone() for key, each in engine.module.state_dict().items()}
        engine.destroy()
        if rank == 0:
            found = zero.get_fp32_state_dict_from_checkpoint(folder)
            assert set(found) == set(expected)
            for name, tensor in expected.items():
                assert torch.equal(found[name].to(tensor.dtype), tensor), name
            plain = zero.load_state_dict_from_checkpoint(Odd(), folder)
            assert plain.head.weight is plain.embedding.weight

    for world_size in (2, 3):
        on_ranks(work, world_size, scratch)


@pytest.mark.filterwarnings("ignore:rank 0 waits for:RuntimeWarning")
def test_a_rank_that_stays_away_is_named(scratch: Path) -> None:
    def work(rank: int) -> str:
        engine = zero.initialize(model=model(), config=config("none", scratch))[0]
        engine._runtime.communicator.rendezvous.patience_s = 0.5
        if rank == 0:
            try:
                engine.save_checkpoint(scratch / "ck")
            except zero.RankError as error:
                return str(error)
        return "stayed away"

    said = on_ranks(work, 2, scratch)[0]
    assert "needs all 2 ranks" in said
    assert re.search(r"[Rr]anks? \[?1\]?\b", said.replace("all 2 ranks", "")), said
    assert not (scratch / "ck").exists()


@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 1)])
def test_stages_with_whole_parameters_go_on(scratch: Path, stage: int, world_size: int) -> None:
    """Saved in one stage half way through a window, resumed in it and in stage 3."""

    def run(source: Path | None, steps: tuple[int, int], stage: int, target: Path) -> Any:
        def work(rank: int) -> list[Any]:
            options = config("none", scratch, dtype="bf16")
            options["zero_optimization"]["stage"] = stage
            engine = zero.initialize(model=model(), config=options)[0]
            if source is not None:
                engine.load_checkpoint(source)
            loaded = state_digest(engine)
            train(engine, *steps, rank)
            engine.save_checkpoint(target)
            found = [loaded, state_digest(engine), engine(*make_batch(99)).item()]
            engine.destroy()
            return found

        return work

    whole = on_ranks(run(None, (0, 8), stage, scratch / "w"), world_size, scratch)
    half = on_ranks(run(None, (0, 5), stage, scratch / "ck"), world_size, scratch)
    for resumed in (stage, 3):
        work = run(scratch / "ck", (5, 8), resumed, scratch / f"r{resumed}")
        found = on_ranks(work, world_size, scratch)
        assert [each[0] for each in found] == [each[1] for each in half], f"stage {resumed}"
        if resumed == stage:
            assert [each[1:] for each in found] == [each[1:] for each in whole]
