"""NVMe traffic falls with what is resident, to nothing; without `pin_memory` nothing is locked."""

from __future__ import annotations

import errno
import gc
import itertools
from pathlib import Path
from typing import Any

import pytest

import zero
from aio_ops import PinnedArena
from estimators import minimum_host_bytes, step_traffic
from estimators.placement import in_play_bytes
from offload import process_bytes
from tests.support.configs import make_config
from tests.support.observe import process_io_bytes
from tests.support.tiny import make_batch, make_model

EXTRA = (60_000, 90_000)
KERNEL_SLACK_BYTES = 256 << 10
"""What the process may read from disks beside the swap file, such as a page of a library."""


def config_of(scratch: Path, parameters: str, host: int | str, **changes: Any) -> dict[str, Any]:
    return make_config(
        parameters=parameters,
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory=host,
        sub_group_size=4096,
        **changes,
    )


def bytes_of_a_step(config: dict[str, Any]) -> dict[str, int]:
    """Train two steps and return what the second one moved, by the ledger and by the kernel."""
    engine, _, _, _ = zero.initialize(model=make_model(extra=EXTRA), config=config)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    kernel_before, before = process_io_bytes(), engine.ledger.snapshot()
    engine.backward(engine(*make_batch(1)))
    engine.step()
    moved, kernel = engine.ledger.snapshot().minus(before), process_io_bytes()
    plan = engine.plan.memory
    planned = step_traffic(plan, 1)
    found = {
        "swap": plan.swap_file_bytes,
        "read": moved.nvme_read_bytes,
        "written": moved.nvme_write_bytes,
        "kernel_read": kernel[0] - kernel_before[0],
        "kernel_written": kernel[1] - kernel_before[1],
        "planned": planned.total_read_bytes + planned.total_written_bytes,
    }
    engine.destroy()
    return found


@pytest.mark.nvme
@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_traffic_falls_linearly_with_the_share_that_is_not_resident(
    scratch: Path, parameters: str
) -> None:
    request = zero.plan_memory(
        make_model(extra=EXTRA), config_of(scratch, parameters, "1GB")
    ).memory.request
    least, everything = minimum_host_bytes(request), in_play_bytes(request)
    points = []
    for part in range(6):
        point = bytes_of_a_step(
            config_of(scratch, parameters, least + (everything - least) * part // 6)
        )
        moved = point["read"] + point["written"]
        assert moved == point["planned"] > 0
        for way in ("read", "written"):
            beside = point[f"kernel_{way}"] - point[way]
            assert 0 <= beside <= KERNEL_SLACK_BYTES, point
        points.append((point["swap"], moved))
    # A byte of state or gradient moves twice a step; of a parameter, pinned first, four times.
    most = 2 if parameters == "none" else 4
    for (swap, moved), (less, fewer) in itertools.pairwise(points[1:]):
        assert less < swap
        assert 2 * (swap - less) <= moved - fewer <= most * (swap - less), points
    steps = [swap - less for (swap, _), (less, _) in itertools.pairwise(points[1:])]
    assert max(steps) <= 2 * min(steps), steps


@pytest.mark.nvme
@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_with_everything_resident_nothing_moves_after_the_start(
    scratch: Path, parameters: str
) -> None:
    point = bytes_of_a_step(config_of(scratch, parameters, "1GB"))
    assert point["swap"] == point["read"] == point["written"] == point["planned"] == 0
    assert point["kernel_written"] == 0
    assert point["kernel_read"] <= KERNEL_SLACK_BYTES


def locked_bytes() -> dict[str, int]:
    """Return what is locked and pinned, when what earlier tests left has been collected."""
    gc.collect()
    return process_bytes("VmLck", "VmPin")


@pytest.mark.nvme
@pytest.mark.parametrize("name", ["io_uring", "kernel_aio", "threads", "python"])
def test_without_pin_memory_no_page_is_locked(scratch: Path, name: str) -> None:
    config = config_of(scratch, "nvme", "300KB", engine=name)
    for section in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section]["pin_memory"] = False
    before = locked_bytes()
    try:
        engine, _, _, _ = zero.initialize(model=make_model(extra=EXTRA), config=config)
    except OSError as error:
        pytest.skip(f"{name}: {error}")
    for step in range(2):
        engine.backward(engine(*make_batch(step)))
        engine.step()
        assert locked_bytes() == before
    assert engine.memory_report()["process"]["locked_bytes"] == before["VmLck"]
    assert engine.ledger.snapshot().nvme_write_bytes > 0
    engine.destroy()


@pytest.mark.nvme
def test_with_pin_memory_exactly_the_slots_are_locked(scratch: Path) -> None:
    config = config_of(scratch, "nvme", "300KB", engine="io_uring")
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = True
    before = locked_bytes()
    try:
        engine, _, _, _ = zero.initialize(model=make_model(extra=EXTRA), config=config)
    except OSError as error:
        pytest.skip(f"io_uring: {error}")
    store = engine._runtime.store
    if not isinstance(store.slot_arena, PinnedArena):
        pytest.skip("no memory may be locked here")
    slots_bytes = store.slot_arena.size_bytes
    assert locked_bytes()["VmLck"] == before["VmLck"] + slots_bytes
    assert locked_bytes()["VmPin"] >= before["VmPin"] + slots_bytes  # by the ring
    process = engine.memory_report()["process"]
    assert process["locked_bytes"] == before["VmLck"] + slots_bytes
    assert process["pinned_bytes"] == locked_bytes()["VmPin"]
    engine.backward(engine(*make_batch(0)))
    engine.step()
    assert engine.ledger.snapshot().nvme_write_bytes > 0
    engine.destroy()
    del engine, store
    assert locked_bytes() == before


@pytest.mark.nvme
def test_slots_that_may_not_be_locked_are_pageable(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(mapping: object) -> None:
        raise OSError(errno.ENOMEM, "cannot lock; raise `ulimit -l`")

    monkeypatch.setattr("aio_ops.pinned._lock", refuse)  # as for a user who may lock little
    config = config_of(scratch, "nvme", "300KB")
    config["zero_optimization"]["offload_param"]["pin_memory"] = True
    with pytest.warns(
        RuntimeWarning, match=r"slots are not pinned: cannot lock; raise `ulimit -l`"
    ):
        engine, _, _, _ = zero.initialize(model=make_model(extra=EXTRA), config=config)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    assert engine.ledger.snapshot().nvme_write_bytes > 0
    engine.destroy()


@pytest.mark.nvme
def test_the_schedule_of_the_drive_is_measured_on_the_swap_file(
    scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="offload.store")
    losses = []
    for schedule in ("mixed", "measure"):
        config = config_of(scratch, "nvme", "1MB", engine="threads")
        config["tiers"]["io_schedule"] = schedule
        written = process_io_bytes()[1]
        engine, _, _, _ = zero.initialize(model=make_model(extra=EXTRA), config=config)
        size_bytes = engine.plan.memory.swap_file_bytes
        if schedule == "measure":  # the start alone writes no more than all of it, once
            assert process_io_bytes()[1] - written > 2 * size_bytes > 0
        for step in range(2):
            loss = engine(*make_batch(step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    assert losses[:2] == losses[2:]
    (record,) = caplog.records
    assert "GB/s" in record.getMessage()
