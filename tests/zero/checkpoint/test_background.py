"""A save beside training has the state of its call, whatever training does meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from offload import Field
from tests.aio_ops.disks import mounted_sharing
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.observe import state_digest
from tests.support.tiny import make_batch, make_model
from zero.checkpoint import verify
from zero.checkpoint.background import BackgroundSave
from zero.checkpoint.rank_file import RankFile

pytestmark = pytest.mark.nvme


def make_engine(folder: Path, tier: str, dtype: str = "fp32", **more: Any) -> zero.ZeroEngine:
    options: dict[str, Any] = {"parameters": tier, "optimizer": tier, "accumulation": 2, **more}
    if tier == "nvme":
        options |= {"nvme_path": str(folder), "sub_group_size": 1024, "host_memory": "200KB"}
    return zero.initialize(model=make_model(), config=make_config(dtype=dtype, **options))[0]


def train(engine: zero.ZeroEngine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*make_batch(step)))
        engine.step()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread copy nothing before somebody waits for it: training is always faster."""
    gate = threading.Event()
    write, before, wait = (
        RankFile.write_group,
        BackgroundSave._before_change,
        BackgroundSave.wait,
    )

    def late(self: RankFile, *arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            gate.wait(60)
        write(self, *arguments)

    def opening(function: Any) -> Any:
        def call(self: BackgroundSave, *arguments: Any) -> Any:
            gate.set()
            return function(self, *arguments)

        return call

    monkeypatch.setattr(RankFile, "write_group", late)
    monkeypatch.setattr(BackgroundSave, "_before_change", opening(before))
    monkeypatch.setattr(BackgroundSave, "wait", opening(wait))


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize(("tier", "dtype"), [("none", "bf16"), ("cpu", "fp32"), ("nvme", "bf16")])
def test_the_state_is_that_of_the_call(scratch: Path, tier: str, dtype: str) -> None:
    """Half way through a window; then training goes on, and a user writes weights."""
    engine = make_engine(scratch, tier, dtype)
    train(engine, 0, 5)
    at_call = state_digest(engine)
    engine.save_checkpoint(scratch / "ck", "one", blocking=False)
    pending = engine.pending_save
    assert pending is not None
    assert not pending.is_over, "the call waited for the copies"
    with torch.no_grad(), zero.GatheredParameters([engine.module.norm.weight], modifier_rank=0):
        engine.module.norm.weight.fill_(3.0)
    zero.safe_set_full_optimizer_state(
        engine.module.norm.bias, torch.full((16,), 5.0), Field.EXP_AVG.value
    )
    train(engine, 5, 8)
    assert pending.waited_groups, "nothing was about to change before it was copied"
    assert engine.wait_for_checkpoint() == str(scratch / "ck" / "one")
    assert engine.wait_for_checkpoint() is None
    assert state_digest(engine) != at_call
    verify(scratch / "ck")
    engine.load_checkpoint(scratch / "ck")
    assert state_digest(engine) == at_call
    assert engine.micro_steps == 5
    engine.destroy()


def test_nobody_waits_where_the_file_system_shares_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread copies nothing before three steps are over, and finds the state of the call."""
    gate, write = threading.Event(), RankFile.write_group

    def late(self: RankFile, *arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            gate.wait(20)
        write(self, *arguments)

    monkeypatch.setattr(RankFile, "write_group", late)
    with mounted_sharing(tmp_path) as disk:
        for durable in (False, True):
            (disk / f"{durable}").mkdir()
            config = make_config(
                parameters="nvme",
                optimizer="nvme",
                nvme_path=str(disk / f"{durable}"),
                sub_group_size=1024,
                host_memory="24KB",
                dtype="bf16",
            )
            config["tiers"]["durable"] = {"name": "run"} if durable else False
            engine = zero.initialize(model=make_model(), config=config)[0]
            assert engine._runtime.store.pager is not None
            train(engine, 0, 3)
            at_call = state_digest(engine)
            gate.clear()
            engine.save_checkpoint(tmp_path / f"ck{durable}", blocking=False)
            pending = engine.pending_save
            assert pending is not None
            assert pending.is_cloned
            train(engine, 3, 6)
            assert not pending.is_over
            assert not pending.waited_groups
            gate.set()
            engine.wait_for_checkpoint()
            assert state_digest(engine) != at_call
            engine.destroy()
            engine = make_engine(tmp_path, "none", "bf16", accumulation=1)
            engine.load_checkpoint(tmp_path / f"ck{durable}")
            assert state_digest(engine) == at_call
            engine.destroy()


def test_state_that_was_never_written_is_saved_as_zeros(scratch: Path) -> None:
    """Before the first step nothing of the state on NVMe can be read."""
    config = make_config(
        optimizer="nvme", nvme_path=str(scratch), sub_group_size=1024, host_memory="64KB"
    )
    engine = zero.initialize(model=make_model(), config=config)[0]
    store = engine._runtime.store
    assert store.pager is not None
    assert not store.written_states
    at_call = state_digest(engine)
    engine.save_checkpoint(scratch / "ck", "one", blocking=False)
    train(engine, 0, 2)
    engine.wait_for_checkpoint()
    assert state_digest(engine) != at_call
    engine.load_checkpoint(scratch / "ck")
    assert state_digest(engine) == at_call
    engine.destroy()


@pytest.mark.usefixtures("late_copies")
def test_whoever_ends_or_saves_again_waits(scratch: Path) -> None:
    engine = make_engine(scratch, "nvme")
    train(engine, 0, 2)
    engine.save_checkpoint(scratch / "ck", "one", blocking=False)
    engine.save_checkpoint(scratch / "ck", "two", blocking=False)
    verify(scratch / "ck", "one")
    engine.destroy()
    verify(scratch / "ck", "two")
    assert (scratch / "ck" / "latest").read_text() == "two"


def test_a_failure_is_told_and_raised_and_training_goes_on(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(scratch, "cpu")
    train(engine, 0, 2)
    engine.save_checkpoint(scratch / "ck", "one")

    write = RankFile.write_group

    def fail(self: RankFile, *arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(5, "the drive is gone")
        write(self, *arguments)

    monkeypatch.setattr(RankFile, "write_group", fail)
    engine.save_checkpoint(scratch / "ck", "one", blocking=False)
    monkeypatch.undo()
    pending = engine.pending_save
    assert pending is not None
    pending._thread.join()
    with pytest.warns(RuntimeWarning, match="saving one failed: .*the drive is gone; training"):
        train(engine, 2, 4)
    with pytest.raises(OSError, match="the drive is gone"):
        engine.wait_for_checkpoint()
    verify(scratch / "ck", "one")
    assert [path.name for path in (scratch / "ck").glob(".*")] == []
    train(engine, 4, 6)
    engine.save_checkpoint(scratch / "ck", "one", blocking=False)
    engine.destroy()
    assert verify(scratch / "ck")


def test_a_rank_that_looks_while_the_folder_moves_to_its_place_goes_on(scratch: Path) -> None:
    """It is there when the second rank asks whether it is a folder, and gone at the next look."""

    def work(rank: int) -> list[bool]:
        engine = make_engine(scratch, "cpu")
        is_dir = Path.is_dir

        def slow(path: Path) -> bool:
            found = is_dir(path)
            while rank and path.name.startswith(".saving-") and path.exists():
                os.sched_yield()
            return found

        said = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "is_dir", slow)
            for blocking in (True, False):
                engine.save_checkpoint(scratch / "ck", f"{blocking}", blocking=blocking)
                engine.wait_for_checkpoint()
                said.append(is_dir(scratch / "ck" / f"{blocking}"))
        engine.destroy()
        return said

    assert on_ranks(work, 2, scratch) == [[True, True]] * 2
