"""Engines and jobs on one path never meet, and a killed run leaves nothing (H9, H15)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from pathlib import Path

import pytest

import zero
from tests.support.configs import make_config
from tests.support.launch import worker_command, worker_environment
from tests.support.observe import full_parameters
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme


def paged_config(scratch: Path) -> dict[str, object]:
    return make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="40KB",
        sub_group_size=1024,
    )


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bfree * status.f_frsize


def start(scratch: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        worker_command("train_forever.py", str(scratch), *arguments),
        env=worker_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses_of(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        words = line.split()
        assert words[:1] == ["step"], line
        assert int(words[5]) > 0, "nothing was paged out"
        found.append(words[3])
    return found


def test_two_engines_in_one_process_share_a_path_and_nothing_else(scratch: Path) -> None:
    alone, _, _, _ = zero.initialize(model=make_model(seed=1), config=paged_config(scratch))
    expected = []
    for step in range(4):
        loss = alone(*make_batch(step))
        alone.backward(loss)
        alone.step()
        expected.append(loss.item())
    alone.destroy()
    first, _, _, _ = zero.initialize(model=make_model(seed=1), config=paged_config(scratch))
    second, _, _, _ = zero.initialize(model=make_model(seed=2), config=paged_config(scratch))
    seen = []
    for step in range(4):
        losses = [engine(*make_batch(step)) for engine in (first, second)]
        for engine, loss in zip((second, first), reversed(losses), strict=True):
            engine.backward(loss)
        for engine in (second, first):
            engine.step()
        seen.append(losses[0].item())
        assert losses[0].item() != losses[1].item()
    assert seen == expected
    for engine in (first, second):
        assert engine.ledger.snapshot().nvme_write_bytes > 0
    first.destroy()
    full_parameters(second)  # the other's memory and file are still its own
    second.destroy()
    assert not list(scratch.iterdir())


def test_two_processes_on_one_path_train_as_if_alone(scratch: Path) -> None:
    alone = start(scratch, "4")
    expected, errors = alone.communicate(timeout=120)
    assert alone.returncode == 0, errors
    both = [start(scratch, "4"), start(scratch, "4")]
    for process in both:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert losses_of(output.splitlines()) == losses_of(expected.splitlines())
    assert not list(scratch.iterdir())


def test_a_killed_run_leaves_nothing(scratch: Path) -> None:
    process = start(scratch)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert len(losses_of(lines)) == 3
    descriptors = Path(f"/proc/{process.pid}/fd")
    held = [str(link.readlink()) for link in descriptors.iterdir()]
    assert any(str(scratch) in target and "(deleted)" in target for target in held), held
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not list(scratch.iterdir())


def test_an_engine_that_is_dropped_gives_its_descriptors_and_threads_back(scratch: Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names only

    before, threads = opened(), len(os.listdir("/proc/self/task"))  # noqa: PTH208
    for _ in range(3):
        engine, _, _, _ = zero.initialize(model=make_model(), config=paged_config(scratch))
        engine.backward(engine(*make_batch(0)))
        engine.step()
        assert opened() > before
        engine.destroy()
        engine.destroy()
        with pytest.raises(RuntimeError, match="destroyed"):
            engine(*make_batch(0))
    del engine
    gc.collect()
    assert opened() == before
    assert len(os.listdir("/proc/self/task")) <= threads  # noqa: PTH208
