"""What a failing disk does to a training run: an exception that says what, never a wrong number."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import zero
from aio_ops import Fault, SimulatedDisk
from offload import PageError, PagerFailedError
from tests.support.configs import make_config
from tests.support.observe import digest, full_parameters
from tests.support.tiny import make_batch, make_model

STEPS = 2


def paged_config(path: str) -> dict[str, object]:
    return make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=path,
        host_memory="40KB",
        sub_group_size=1024,
    )


def train_on(disk: SimulatedDisk, path: Path) -> str:
    engine, _, _, _ = zero.initialize(
        model=make_model(), config=paged_config(str(path)), io_engine=disk
    )
    try:
        for step in range(STEPS):
            engine.backward(engine(*make_batch(step)))
            engine.step()
        return digest(full_parameters(engine))
    finally:
        engine.destroy()


def expected_digest() -> str:
    engine, _, _, _ = zero.initialize(model=make_model(), config=make_config(host_memory="1GB"))
    for step in range(STEPS):
        engine.backward(engine(*make_batch(step)))
        engine.step()
    result = digest(full_parameters(engine))
    engine.destroy()
    return result


def test_a_run_on_a_reordering_disk_has_the_bits_of_one_in_memory(tmp_path: Path) -> None:
    expected = expected_digest()
    for seed in range(3):
        disk = SimulatedDisk(seed)
        assert train_on(disk, tmp_path) == expected
        assert disk.submitted > 50


def transfers(path: Path) -> int:
    disk = SimulatedDisk(0)
    train_on(disk, path)
    return disk.submitted


@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
def test_a_failure_at_any_position_raises_with_record_and_extent(tmp_path: Path, kind: str) -> None:
    total = transfers(tmp_path)
    for position in range(0, total, max(total // 12, 1)):
        disk = SimulatedDisk(position, fault=Fault(position, kind))
        with pytest.raises(PageError, match=r"record .*: PAGING_(IN|OUT) of Extent\(offset="):
            train_on(disk, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
def test_a_failure_at_every_position_raises(tmp_path: Path, kind: str) -> None:
    for position in range(transfers(tmp_path)):
        disk = SimulatedDisk(position, fault=Fault(position, kind))
        with pytest.raises(PageError):
            train_on(disk, tmp_path)


def mounted(image: Path, where: Path, kind: str) -> str | None:
    """Mount 8 MB; return why it cannot be done, or None."""
    where.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(where)]
    else:
        with image.open("wb") as file:
            file.truncate(8 << 20)
        maker = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if maker is None:
            return "mkfs.ext4 is not installed"
        made = subprocess.run(
            [maker, "-q", "-m", "0", str(image)], capture_output=True, text=True, check=False
        )
        if made.returncode:
            return f"mkfs.ext4: {made.stderr.strip()}"
        command = ["mount", "-o", "loop", str(image), str(where)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else None


@pytest.fixture(params=["ext4", "tmpfs"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a real file system of 8 MB."""
    where = tmp_path / "small"
    reason = mounted(tmp_path / "image", where, request.param)
    if reason is not None:
        pytest.skip(f"cannot mount a small {request.param}: {reason}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.filterwarnings("ignore::zero.config.PreflightWarning")
def test_a_disk_too_small_is_refused_at_plan_time(small_disk: Path) -> None:
    model = make_model(layers=2, extra=(1_000_000,))
    for attempt in (
        zero.plan_memory,
        lambda each, config: zero.initialize(model=each, config=config),
    ):
        with pytest.raises(OSError, match=str(small_disk)) as caught:
            attempt(model, paged_config(str(small_disk)))
        assert "bytes" in str(caught.value)
    assert [each.name for each in small_disk.iterdir() if each.name != "lost+found"] == []


@pytest.mark.filterwarnings("ignore:a backward failed:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::zero.config.PreflightWarning")
@pytest.mark.filterwarnings("ignore:.*O_DIRECT")
def test_a_disk_that_fills_later_raises_at_the_write(small_disk: Path) -> None:
    """The reservation is punched away behind the engine's back, as thin provisioning does."""
    engine, _, _, _ = zero.initialize(model=make_model(), config=paged_config(str(small_disk)))
    engine.backward(engine(*make_batch(0)))
    engine.step()
    file = engine._runtime.store.swap_file
    assert file is not None
    punch_hole(file.fileno(), file.size_bytes)
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(b"x" * 4096)
    # Reading a hole gives zeros, so the model is wrong from here; the next write must say so.
    with pytest.raises(PageError, match=r"PAGING_OUT of Extent.*No space left on device"):
        for _ in range(3):
            engine.backward(engine(*make_batch(1)))
            engine.step()
    with pytest.raises(PagerFailedError, match="No space left on device"):
        engine(*make_batch(2))
    engine.destroy()


def punch_hole(descriptor: int, size_bytes: int) -> None:
    keep_size, punch = 0x01, 0x02
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if libc.fallocate(descriptor, keep_size | punch, 0, size_bytes):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
