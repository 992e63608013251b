"""Tensors and files for the tests of the handles."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from aio_ops.handles import AioHandle
from tests.aio_ops.disks import storage_bytes
from tests.aio_ops.support import pattern

MIB = 1 << 20
BYTES = torch.empty(0, dtype=torch.uint8)


def locked(handle: AioHandle, data: bytes) -> torch.Tensor:
    """Return a locked tensor that holds `data`."""
    tensor = handle.new_cpu_locked_tensor(len(data), BYTES)
    tensor.copy_(as_tensor(data))
    return tensor


def unlocked(data: bytes) -> torch.Tensor:
    """Return a tensor of torch's own, which starts out of step with sectors, wherever it lies."""
    room = torch.zeros(len(data) + 4096, dtype=torch.uint8)
    start = (64 - room.data_ptr()) % 4096
    room[start : start + len(data)] = as_tensor(data) if data else room[:0]
    return room[start : start + len(data)]


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def make(kind: str, handle: AioHandle, data: bytes) -> torch.Tensor:
    return locked(handle, data) if kind == "locked" else unlocked(data)


def file_of(directory: Path, seed: int, size_bytes: int) -> tuple[Path, bytes]:
    """Return a file on disk, not in the page cache, and what it holds."""
    data = pattern(seed, size_bytes)
    path = directory / f"file-{seed}"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return path, data


@contextlib.contextmanager
def moved_at_least(read: int = 0, written: int = 0) -> Iterator[None]:
    """Assert that this process moved as many bytes from and to storage."""
    before = storage_bytes()
    yield
    after = storage_bytes()
    moved = (after[0] - before[0], after[1] - before[1])
    if moved[0] < read or moved[1] < written:
        raise AssertionError(f"{moved} bytes read and written, not {(read, written)}")


def in_child(act: Callable[[], Any]) -> str:
    """Run `act` in a forked child and return what it says, or how it fails."""
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded")
        child = os.fork()
    if child == 0:
        try:
            said = repr(act())
        except BaseException as error:  # noqa: BLE001  the parent judges it
            said = f"{type(error).__name__}: {error}"
        os.write(sending, said.encode())
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise AssertionError(f"the child ended with {os.waitstatus_to_exitcode(status)}")
    return said
