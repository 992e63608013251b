"""A save that is killed, or finds no room, leaves a checkpoint that loads whole."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks, reap, start_ranks
from tests.support.observe import state_digest
from tests.support.tiny import make_batch, make_model
from zero.checkpoint import directory, layout, verify
from zero.errors import CheckpointError

pytestmark = pytest.mark.nvme


def make_engine(folder: Path, tier: str = "none") -> zero.ZeroEngine:
    options: dict[str, Any] = {"parameters": tier, "optimizer": tier}
    if tier == "nvme":
        options |= {"nvme_path": str(folder), "sub_group_size": 1024, "host_memory": "200KB"}
    model = make_model()
    model.blocks[1].requires_grad_(requires_grad=False)
    return zero.initialize(model=model, config=make_config(**options))[0]


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Do once what every forked process would do at its first engine."""
    engine = make_engine(tmp_path_factory.mktemp("warm"))
    engine.save_checkpoint(tmp_path_factory.mktemp("warm"))
    engine.destroy()


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let frozen shards be linked, few as they are."""
    monkeypatch.setattr(layout, "LEAST_FROZEN_BYTES", 1)


def step(engine: zero.ZeroEngine, number: int, rank: int = 0) -> None:
    engine.backward(engine(*make_batch(number, rank)))
    engine.step()


def kill_while_saving(
    scratch: Path, seed: int, *, same_tag: bool, world_size: int, blocking: bool
) -> None:
    """Save again and again, be killed somewhere, and look at what is there."""
    chance = random.Random(seed)
    folder = scratch / f"ck{seed}"

    first_saved, tell = os.pipe()

    def work(rank: int) -> None:
        engine = make_engine(scratch, "nvme" if seed % 2 else "none")
        for number in range(1000):
            step(engine, number, rank)
            tag = "one" if same_tag else None
            engine.save_checkpoint(folder, tag, blocking=blocking, keep_last=2)
            if not number and not rank:
                engine.wait_for_checkpoint()
                os.write(tell, b"1")

    processes = start_ranks(work, world_size, scratch)
    os.close(tell)
    assert os.read(first_saved, 1) == b"1"
    os.close(first_saved)
    moment = chance.random() * 0.25
    timers = [
        threading.Timer(moment + chance.random() * 0.01, os.kill, (process, signal.SIGKILL))
        for process in processes
    ]
    for timer in timers:
        timer.start()
    assert set(reap(processes)) == {-signal.SIGKILL}

    tags = [path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
    for tag in tags:
        verify(folder / tag)
    engine = make_engine(scratch)
    path, _ = engine.load_checkpoint(folder)
    steps = engine.global_steps
    assert path is not None
    assert steps >= 1
    if world_size == 1:
        assert state_digest(engine) == digest_after(steps)
    engine.save_checkpoint(folder, "after")
    assert not list(folder.glob(".saving-*")), "the next save removes what was left"
    assert not list(folder.glob(".re*"))
    assert (folder / "after" / "rank00000.frozen.safetensors").is_file()
    engine.destroy()


DIGESTS: dict[int, str] = {}


def digest_after(steps: int) -> str:
    """Return the state of a run that was never stopped."""
    if steps not in DIGESTS:
        engine = make_engine(Path())
        for number in range(max(steps, 60)):
            step(engine, number)
            DIGESTS[number + 1] = state_digest(engine)
        engine.destroy()
    return DIGESTS[steps]


def kill_case(scratch: Path, seed: int) -> None:
    kill_while_saving(scratch, seed, same_tag=seed % 3 == 0, world_size=1, blocking=seed % 4 < 2)


@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_save_leaves_a_whole_checkpoint(scratch: Path, seed: int) -> None:
    kill_case(scratch, seed)


@pytest.mark.usefixtures("linked")
@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_killed_saves_leave_whole_checkpoints(scratch: Path, seed: int) -> None:
    kill_case(scratch, seed)


@pytest.mark.usefixtures("linked")
@pytest.mark.full
@pytest.mark.parametrize("seed", range(300, 320))
def test_many_pairs_of_killed_ranks_leave_whole_checkpoints(scratch: Path, seed: int) -> None:
    with pytest.warns(UserWarning, match="world size: saved 2, now 1"):
        kill_while_saving(
            scratch, seed, same_tag=seed % 3 == 0, world_size=2, blocking=seed % 4 < 2
        )


@pytest.mark.usefixtures("linked")
def test_two_killed_ranks_leave_a_whole_checkpoint(scratch: Path) -> None:
    with pytest.warns(UserWarning, match="world size: saved 2, now 1"):
        kill_while_saving(scratch, 6, same_tag=True, world_size=2, blocking=True)


def test_no_room_is_found_before_anything_is_written(scratch: Path) -> None:
    """The limit on file sizes is a full disk that needs no mount."""

    def work(rank: int) -> list[Any]:
        engine = make_engine(scratch)
        step(engine, 0, rank)
        engine.save_checkpoint(scratch / "ck", "one")
        before = sorted(path.name for path in (scratch / "ck").rglob("*"))
        step(engine, 1, rank)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = 20_000 if rank == engine.world_size - 1 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        said = ""
        try:
            engine.save_checkpoint(scratch / "ck", "one")
        except CheckpointError as error:
            said = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        engine._runtime.communicator.barrier()
        after = sorted(path.name for path in (scratch / "ck").rglob("*"))
        verify(scratch / "ck" / "one")
        step(engine, 2, rank)
        engine.save_checkpoint(scratch / "ck", "one")
        return [said, before == after, engine.global_steps]

    for world_size in (1, 2):
        said = on_ranks(work, world_size, scratch)
        assert "bytes for this rank: cannot reserve" in said[-1][0]
        assert "nothing was written" in said[-1][0]
        assert all(each[1:] == [True, 3] for each in said)
    assert "ranks [1] could not reserve its space" in said[0][0]


def test_a_tag_twice_and_only_the_last_ones_stay(scratch: Path) -> None:
    engine = make_engine(scratch)
    folder = scratch / "ck"
    for number in range(4):
        step(engine, number)
        engine.save_checkpoint(folder, keep_last=2)
    assert [tag for _, tag in directory.list_checkpoints(folder)] == [
        "global_step3",
        "global_step4",
    ]
    engine.save_checkpoint(folder, "global_step3", keep_last=1, save_latest=False)
    assert (folder / "latest").read_text() == "global_step4"
    assert (folder / "global_step4").is_dir(), "what `latest` names is never removed"
    (folder / "global_step9").mkdir()
    (folder / "notes.txt").write_text("mine")
    engine._settings = replace(
        engine._settings, tiers=replace(engine._settings.tiers, keep_last_checkpoints=1)
    )
    engine.save_checkpoint(folder)
    assert [tag for _, tag in directory.list_checkpoints(folder)] == ["global_step4"]
    assert (folder / "global_step9").is_dir()
    assert (folder / "notes.txt").exists()
    assert os.access(folder / "zero_to_fp32.py", os.X_OK)
    assert sorted(path.name for path in (folder / "global_step4").iterdir()) == [
        "manifest.json",
        "rank00000.safetensors",
    ]
    engine.destroy()


def test_what_is_replaced_is_removed_beside_training(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is gone at once; whoever saves next, or waits, finds the room free."""
    engine = make_engine(scratch)
    folder = scratch / "ck"
    step(engine, 0)
    engine.save_checkpoint(folder, "one")
    gate, remove = threading.Event(), directory.shutil.rmtree

    def late(path: Path, *, ignore_errors: bool) -> None:
        gate.wait(60)
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(directory, "_REMOVED_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(directory.shutil, "rmtree", late)
    engine.save_checkpoint(folder, "one")
    left = list(folder.glob(".removed-*"))
    assert len(left) == 1, "the save waited for the removal"
    assert (folder / "one" / "manifest.json").is_file()
    threading.Timer(0.05, gate.set).start()
    engine.save_checkpoint(folder, "two")
    assert not left[0].exists(), "the next save needs the room"
    engine.save_checkpoint(folder, "two", keep_last=1)
    engine.destroy()
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["two"]
    verify(folder)


def test_without_an_exchange_the_old_one_is_found_where_it_waits(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that cannot exchange folders moves the old one aside for a moment."""
    engine = make_engine(scratch)
    folder = scratch / "ck"
    step(engine, 0)
    engine.save_checkpoint(folder, "one")
    before = state_digest(engine)
    monkeypatch.setattr(directory, "_RENAME_EXCHANGE", 1 << 20)  # no such flag: EINVAL
    step(engine, 1)
    rename, calls = Path.rename, []

    def stop_between(path: Path, target: Path) -> Path:
        calls.append(path)
        if target.name == "one":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stop_between)
    with pytest.raises(KeyboardInterrupt):
        engine.save_checkpoint(folder, "one")
    monkeypatch.setattr(Path, "rename", rename)
    assert len(calls) == 2
    assert not (folder / "one").exists()
    engine.load_checkpoint(folder)
    assert (state_digest(engine), engine.global_steps) == (before, 1)
    step(engine, 1)
    engine.save_checkpoint(folder, "one")
    assert not list(folder.glob(".re*"))
    assert torch.isfinite(engine(*make_batch(3)))
    engine.destroy()
