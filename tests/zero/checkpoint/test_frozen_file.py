"""Frozen shards that have not changed are linked, not written again; whatever has changed is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.observe import state_digest
from tests.support.tiny import make_batch, make_model
from zero.checkpoint import inspect, layout, verify

pytestmark = pytest.mark.nvme


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LEAST_FROZEN_BYTES", 1)


def make_engine(scratch: Path, tier: str) -> zero.ZeroEngine:
    options: dict[str, Any] = {"parameters": tier, "optimizer": tier, "dtype": "bf16"}
    if tier == "nvme":
        options |= {"nvme_path": str(scratch), "sub_group_size": 512, "host_memory": "48KB"}
    model = make_model()
    for part in (model.embedding, model.blocks[1]):
        part.requires_grad_(requires_grad=False)
    return zero.initialize(model=model, config=make_config(**options))[0]


def step(engine: zero.ZeroEngine, number: int, rank: int = 0) -> None:
    engine.backward(engine(*make_batch(number, rank)))
    engine.step()


def change(engine: zero.ZeroEngine) -> None:
    weight = engine.module.blocks[1].up.weight
    with torch.no_grad(), zero.GatheredParameters([weight], modifier_rank=0):
        weight[-1, -1] += 1.0


def frozen(folder: Path, tag: str, rank: int = 0) -> Path:
    return folder / tag / f"rank{rank:05}.frozen.safetensors"


@pytest.mark.parametrize(
    ("tier", "blocking"), [("none", True), ("cpu", False), ("nvme", True), ("nvme", False)]
)
def test_what_is_frozen_is_written_once(scratch: Path, tier: str, *, blocking: bool) -> None:
    """Unless looking at it would take page-ins while training should go on."""
    engine = make_engine(scratch, tier)
    assert (engine._runtime.store.pager is not None) == (tier == "nvme")
    folder, digests = scratch / "ck", {}
    for number, tag in enumerate(("one", "two", "three")):
        step(engine, number)
        if tag == "three":
            change(engine)
        digests[tag] = state_digest(engine)
        engine.save_checkpoint(folder, tag, blocking=blocking)
        engine.wait_for_checkpoint()
    is_linked = frozen(folder, "one").samefile(frozen(folder, "two"))
    assert is_linked == (tier != "nvme" or blocking)
    assert not frozen(folder, "two").samefile(frozen(folder, "three")), "it has changed"
    assert inspect(folder).file_count == 2
    shutil.rmtree(folder / "one")
    for tag in ("two", "three"):
        verify(folder, tag)
        engine.load_checkpoint(folder, tag)
        assert state_digest(engine) == digests[tag]
    plain = zero.get_fp32_state_dict_from_checkpoint(folder, "two")
    assert set(plain) == set(engine.module.state_dict())
    engine.destroy()


def refuse_links(monkeypatch: pytest.MonkeyPatch, _folder: Path) -> None:
    def refuse(*_arguments: object, **_more: object) -> None:
        raise PermissionError(1, "this file system has no links")

    monkeypatch.setattr(os, "link", refuse)


def damage_the_manifest(_monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    path = folder / "one" / "manifest.json"
    path.write_text(path.read_text().replace('"first": 0', '"first": 1', 1))


def lose_the_file(_monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    frozen(folder, "one").unlink()


@pytest.mark.parametrize("harm", [refuse_links, damage_the_manifest, lose_the_file])
def test_where_there_is_nothing_to_link_it_is_written(
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    engine = make_engine(scratch, "none")
    folder = scratch / "ck"
    engine.save_checkpoint(folder, "one")
    harm(monkeypatch, folder)
    engine.save_checkpoint(folder, "two")
    assert frozen(folder, "two").stat().st_nlink == 1
    verify(folder, "two")
    engine.destroy()


def test_ranks_link_their_own_and_the_same_tag_is_replaced(scratch: Path) -> None:
    folder = scratch / "ck"

    def work(rank: int) -> str:
        engine = make_engine(scratch, "none")
        first = None
        for number in range(3):
            step(engine, number, rank)
            engine.save_checkpoint(folder, "one")
            found = frozen(folder, "one", rank).stat()
            assert first in (None, (found.st_ino, found.st_size))
            first = (found.st_ino, found.st_size)
        change(engine)  # on one rank's shard alone, most likely
        engine.save_checkpoint(folder, "one")
        digest = state_digest(engine)
        engine.destroy()
        return digest

    digests = on_ranks(work, 2, scratch)
    verify(folder)
    engine = make_engine(scratch, "none")
    with pytest.warns(zero.ResumeWarning, match="world size: saved 2, now 1"):
        engine.load_checkpoint(folder)
    assert {state_digest(engine)} == set(digests)
    engine.save_checkpoint(folder, "alone")
    assert frozen(folder, "alone").stat().st_nlink == 1, "another world size has other shards"
    engine.destroy()
