"""Engines with small blocks, and ways to look at files and memory past any engine."""

import mmap
import os
import random

import pytest

import aio_ops
from aio_ops import Engine, HostArena, SimulatedDisk, Span, TransferFile
from aio_ops.simulated import SimulatedFile

SECTOR = 4096
BLOCK_BYTES = 2 * SECTOR
KERNEL_KINDS = ("io_uring", "kernel_aio")


def make_engine(kind: str, **settings: int) -> Engine:
    """Return an engine with small blocks, so that small transfers have several of them."""
    if kind == "simulated":
        return SimulatedDisk(seed=11)
    refusal = aio_ops.native_unavailable_reason()
    if kind != "python" and refusal and os.environ.get("TIERZERO_REQUIRE_NATIVE") != "1":
        pytest.skip(f"the native engine does not load: {refusal}")
    sizes = {"block_bytes": BLOCK_BYTES, "thread_count": 3, **settings}
    try:
        engine = aio_ops.open_engine(kind, **sizes)
    except OSError as error:
        if kind not in KERNEL_KINDS:
            raise
        pytest.skip(str(error))
    if engine.name != kind:
        raise AssertionError(f"asked for {kind}, got {engine.name}")
    return engine


def pattern(seed: int, size_bytes: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def filled(arena: HostArena, data: bytes) -> Span:
    """Carve a span that holds `data`."""
    span = arena.carve(len(data))
    span.view()[:] = data
    return span


def contents(file: TransferFile, offset: int, size_bytes: int) -> bytes:
    """Read a file past the engine, so that two wrongs cannot make a right."""
    if isinstance(file, SimulatedFile):
        return bytes(file.contents[offset : offset + size_bytes])
    return stored(file.fileno(), offset, size_bytes)


def stored(descriptor: int, offset: int, size_bytes: int) -> bytes:
    """Read a descriptor that may be on direct I/O."""
    with mmap.mmap(-1, size_bytes) as memory:
        return memory[: os.preadv(descriptor, [memory], offset)]


def put(file: TransferFile, offset: int, data: bytes) -> None:
    """Write a file past the engine."""
    if isinstance(file, SimulatedFile):
        file.contents[offset : offset + len(data)] = data
        return
    with mmap.mmap(-1, len(data)) as memory:
        memory[:] = data
        if os.pwritev(file.fileno(), [memory], offset) != len(data):
            raise AssertionError(f"cannot prepare {file.path}")
