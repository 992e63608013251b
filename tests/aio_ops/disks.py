"""Real file systems that are small, read-only, without direct I/O, or frozen at will."""

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_FREEZE = 0xC0045877  # FIFREEZE
_THAW = 0xC0045878  # FITHAW


@contextlib.contextmanager
def mounted(directory: Path, kind: str, *options: str, source: str = "none") -> Iterator[Path]:
    """Mount a file system for the length of a block, or skip with what the machine says."""
    directory.mkdir()
    command = ["mount", "-t", kind, "-o", ",".join(options) or "rw", source, str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"cannot mount a {kind} here: {result.stderr.splitlines()[0]}")
    try:
        yield directory
    finally:
        command = ["umount", str(directory)]
        left = subprocess.run(command, capture_output=True, text=True, check=False)
        if left.returncode:  # someone still has a file open there: detach, and let the test fail
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
            raise RuntimeError(f"cannot unmount: {left.stderr.strip()}")


@contextlib.contextmanager
def mounted_ext4(parent: Path, size_bytes: int) -> Iterator[Path]:
    """Make and mount an ext4 file system in a file."""
    with _mounted_image(parent, "ext4", size_bytes, "-m", "0") as directory:
        yield directory


@contextlib.contextmanager
def mounted_sharing(parent: Path) -> Iterator[Path]:
    """Make and mount a file system whose files can share bytes: XFS or btrfs, whichever is here."""
    if _maker("xfs"):
        with _mounted_image(parent, "xfs", 320 << 20, "-m", "reflink=1") as directory:
            yield directory
    else:
        with _mounted_image(parent, "btrfs", 256 << 20) as directory:
            yield directory


def _maker(kind: str) -> str | None:
    return shutil.which(f"mkfs.{kind}", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def _mounted_image(parent: Path, kind: str, size_bytes: int, *options: str) -> Iterator[Path]:
    maker = _maker(kind)
    if maker is None:
        pytest.skip(f"there is no mkfs.{kind} here")
    image = parent / "image"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run([maker, "-q", *options, str(image)], check=True)
    with mounted(parent / kind, kind, "loop", source=str(image)) as directory:
        yield directory


@contextlib.contextmanager
def frozen(directory: Path) -> Iterator[Callable[[], None]]:
    """Freeze a mounted file system: every write to it blocks in the kernel until it is thawed.

    The block gets a function that thaws it early; leaving the block thaws it in any case. So does
    a second process after a while: a test that hangs here could not even be killed.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    held = True

    def thaw() -> None:
        nonlocal held
        if held:
            held = False
            fcntl.ioctl(descriptor, _THAW, 0)

    try:
        try:
            fcntl.ioctl(descriptor, _FREEZE, 0)
        except OSError as error:
            pytest.skip(f"cannot freeze the file system at {directory}: {error.strerror}")
        with _thawed_at_last(directory):
            try:
                yield thaw
            finally:
                thaw()
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _thawed_at_last(directory: Path) -> Iterator[None]:
    script = 'timeout 100 cat; exec fsfreeze --unfreeze "$0"'
    guard = subprocess.Popen(
        ["sh", "-c", script, str(directory)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate()  # it sees the end of its input, and thaws what is thawed


def free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def storage_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from and written to storage so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]
