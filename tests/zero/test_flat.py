"""Memory, descriptors and threads do not grow with the steps."""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from offload import process_bytes
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model

MIB = 1 << 20


def census() -> tuple[int, int]:
    """Return the open descriptors and the threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208


def resident_bytes_by_step(engine: zero.ZeroEngine, steps: int, folder: Path) -> list[int]:
    """Train and return the resident bytes after each step; descriptors, threads and files stay.

    It evaluates and saves on its way, and runs forwards that no backward follows.
    """
    sizes = []
    before: tuple[int, int] | None = None
    files: list[Path] = []
    for step in range(steps):
        engine.backward(engine(*make_batch(step)))
        engine.backward(engine(*make_batch(step + 1)))
        engine.step()
        if step % 5 == 0:
            engine.eval()
            with torch.no_grad():
                engine(*make_batch(step))
            engine.train()
            engine(*make_batch(step))
            engine.zero_grad()
        if step % (steps // 20) == 0:
            engine.save_checkpoint(folder, tag="last")
            files = files or sorted(folder.rglob("*"))
            assert sorted(folder.rglob("*")) == files
        sizes.append(process_bytes("VmRSS")["VmRSS"])
        if step >= 5:
            before = before or census()
            descriptors, threads = census()
            assert descriptors == before[0], f"step {step}"
            assert threads <= before[1], f"step {step}"  # one of a save may be about to end
        if step % 10 == 0:
            engine.ledger.report().json_lines()
            engine.memory_report()
    return sizes


def train_and_watch(scratch: Path, steps: int) -> list[int]:
    """Make an engine whose state pages, train it, and return the resident bytes after each step."""
    config: dict[str, Any] = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="60KB",
        sub_group_size=1024,
        accumulation=2,
        clip=0.5,
    )
    config["tiers"] |= {"verify": True, "write_burst": 2}
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    sizes = resident_bytes_by_step(engine, steps, scratch / "saved")
    assert engine.ledger.snapshot().nvme_write_bytes > 0
    engine.destroy()
    return sizes


def in_a_new_process(
    work: Callable[[Path, int], list[int]], scratch: Path, count: int
) -> list[int]:
    """Return what `work` returns in a process that nothing else has used."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, scratch, count).result()


@pytest.mark.nvme
@pytest.mark.parametrize("steps", [60, pytest.param(500, marks=pytest.mark.full)])
def test_steps_leave_nothing_behind(scratch: Path, steps: int) -> None:
    sizes = in_a_new_process(train_and_watch, scratch, steps)
    early = statistics.median(sizes[steps // 6 : steps // 3])
    late = statistics.median(sizes[-steps // 6 :])
    assert late - early <= 2 * MIB, f"{(late - early) / steps:.0f} bytes a step"


def resident_bytes_by_cycle(scratch: Path, cycles: int) -> list[int]:
    """Make, train, evaluate and destroy engines, and return the resident bytes after each."""
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="60KB",
        sub_group_size=1024,
    )
    sizes = []
    before: tuple[int, int] | None = None
    for cycle in range(cycles):
        engine, _, _, _ = zero.initialize(model=make_model(), config=config)
        for step in range(2):
            engine.backward(engine(*make_batch(step)))
            engine.step()
            engine.eval()
            with torch.no_grad():
                engine(*make_batch(step))
            engine.train()
        assert engine.ledger.snapshot().nvme_write_bytes > 0
        engine.destroy()
        del engine
        gc.collect()
        sizes.append(process_bytes("VmRSS")["VmRSS"])
        before = before if cycle else census()
        assert census() == before, f"cycle {cycle}"
        assert not list(scratch.iterdir())
    return sizes


@pytest.mark.nvme
@pytest.mark.parametrize("cycles", [4, pytest.param(20, marks=pytest.mark.full)])
def test_engines_come_and_go_with_all_they_had(scratch: Path, cycles: int) -> None:
    """Memory, descriptors, threads and files are flat."""
    sizes = in_a_new_process(resident_bytes_by_cycle, scratch, cycles)
    assert sizes[-1] - sizes[len(sizes) // 2 - 1] <= 2 * MIB
