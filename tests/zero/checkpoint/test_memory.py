"""Saving, loading and exporting take no more memory than training, and a few blocks."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from offload import process_bytes
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks

pytestmark = pytest.mark.nvme

WIDTH = 1024
SLACK_BYTES = 24 << 20
"""Blocks on their way, and what Python and the heap take meanwhile."""


def build(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def start(scratch: Path, layers: int, budget: str) -> zero.ZeroEngine:
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=str(scratch), host_memory=budget
    )
    return zero.initialize(model=build(layers), config=config)[0]


def peak_of(work: Any) -> int:
    """Return the most memory that was resident during a call."""
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return process_bytes("VmHWM")["VmHWM"]


def train(engine: zero.ZeroEngine) -> None:
    x = torch.ones(1, WIDTH)
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()


def check(scratch: Path, layers: int, budget: str, limit: int | None) -> None:
    """Train and save in one process, load in another, export in a third."""
    state_bytes = layers * WIDTH * WIDTH * 12

    def save(_rank: int) -> list[int]:
        engine = start(scratch, layers, budget)
        found = [peak_of(lambda: train(engine))]
        for blocking in (True, False):
            found.append(
                peak_of(
                    lambda blocking=blocking: (
                        engine.save_checkpoint(scratch / "ck", blocking=blocking),
                        engine.wait_for_checkpoint(),
                    )
                )
            )
        engine.destroy()
        return found

    def load(_rank: int) -> int:
        engine = start(scratch, layers, budget)
        peak = peak_of(lambda: engine.load_checkpoint(scratch / "ck"))
        train(engine)
        engine.destroy()
        return peak

    def convert() -> None:
        for safe in (True, False):
            zero.convert_checkpoint_to_fp32(scratch / "ck", scratch / "out", "1GB", safe)

    def export(_rank: int) -> int:
        if limit is not None:
            size = process_bytes("VmData")["VmData"] + limit
            resource.setrlimit(resource.RLIMIT_DATA, (size, size))
        convert()  # imports and the like
        before = process_bytes("VmRSS")["VmRSS"]
        return peak_of(convert) - before

    trained, *saved = on_ranks(save, 1, scratch, 600)[0]
    assert (scratch / "ck" / "global_step2" / "rank00000.safetensors").stat().st_size > state_bytes
    for peak in saved:
        assert peak <= trained + SLACK_BYTES
    assert on_ranks(load, 1, scratch, 600)[0] <= trained + SLACK_BYTES
    exported = on_ranks(export, 1, scratch, 600)[0]
    assert exported <= SLACK_BYTES < state_bytes // 3
    whole = {path.name: path.stat().st_size for path in (scratch / "out").iterdir()}
    assert set(whole) == {"model.safetensors", "pytorch_model.bin"}
    assert min(whole.values()) > state_bytes // 3


def test_a_state_four_times_the_budget(scratch: Path) -> None:
    """120 MB of state, 30 MB of budget."""
    start(scratch, 1, "20MB").destroy()  # imports and the like, before anybody is measured
    check(scratch, 10, "30MB", None)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_model_many_times_the_limit(scratch: Path) -> None:
    """A model of 512 MB is saved, loaded and exported; exporting may allocate 96 MB in all."""
    start(scratch, 1, "20MB").destroy()
    check(scratch, 128, "48MB", 96 << 20)
