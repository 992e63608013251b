"""Our kernel AIO against the PyPI package `libaio`, where it and the system's library are there.

pip install libaio      and the system package libaio1 or libaio-dev
"""

import contextlib
import importlib
import mmap
import os
import random
from pathlib import Path
from typing import Any

import pytest

from aio_ops import HostArena, SwapFile, TransferError
from tests.aio_ops.support import SECTOR, contents, filled, make_engine, pattern

SECTORS = 64


def load_libaio() -> Any:
    try:
        return importlib.import_module("libaio")
    except (ImportError, OSError) as error:
        pytest.skip(f"the package libaio does not load: {error}")


class Peer:
    """Moves one piece at a time the package's way and returns what the kernel answered."""

    def __init__(self, libaio: Any, descriptor: int) -> None:
        self._libaio = libaio
        self._context = libaio.AIOContext(8)
        self._descriptor = descriptor

    def move(self, offset: int, memory: mmap.mmap, *, writes: bool) -> int:
        modes = self._libaio.AIOBLOCK_MODE_WRITE, self._libaio.AIOBLOCK_MODE_READ
        block = self._libaio.AIOBlock(
            modes[0] if writes else modes[1], self._descriptor, [memory], offset
        )
        self._context.submit([block])
        ((_, answer, _),) = self._context.getEvents()
        return int(answer)

    def close(self) -> None:
        self._context.close()


def test_both_move_the_same_bytes(scratch: Path) -> None:
    libaio = load_libaio()
    source = random.Random(3)
    whole = pattern(1, SECTORS * SECTOR)
    with (
        make_engine("kernel_aio") as engine,
        HostArena(8 << 20) as arena,
        SwapFile.create(scratch, len(whole)) as ours,
        SwapFile.create(scratch, len(whole)) as theirs,
        contextlib.closing(Peer(libaio, theirs.fileno())) as peer,
    ):
        assert ours.direct
        for _ in range(40):
            first = source.randrange(SECTORS)
            count = source.randint(1, min(8, SECTORS - first))
            start, size_bytes = first * SECTOR, count * SECTOR
            data = pattern(source.randrange(1000), size_bytes)
            engine.submit_write(ours, start, filled(arena, data)).wait()
            with mmap.mmap(-1, size_bytes) as memory:
                memory[:] = data
                assert peer.move(start, memory, writes=True) == size_bytes
            assert contents(ours, 0, len(whole)) == contents(theirs, 0, len(whole))
            span = arena.carve(size_bytes)
            engine.submit_read(theirs, start, span).wait()  # each reads what the other wrote
            with mmap.mmap(-1, size_bytes) as memory:
                assert peer.move(start, memory, writes=False) == size_bytes
                assert bytes(span.view()) == memory[:] == data


def test_both_see_the_same_failures(scratch: Path) -> None:
    libaio = load_libaio()
    with (
        make_engine("kernel_aio") as engine,
        HostArena(1 << 20) as arena,
        SwapFile.create(scratch, 4 * SECTOR) as file,
        contextlib.closing(Peer(libaio, file.fileno())) as peer,
        mmap.mmap(-1, 4 * SECTOR) as memory,
    ):
        os.ftruncate(file.fileno(), SECTOR)
        # The package leaves a short count to its user; ours is an error that names it.
        assert peer.move(0, memory, writes=False) == SECTOR
        with pytest.raises(TransferError, match="the file ended early") as raised:
            engine.submit_read(file, 0, arena.carve(4 * SECTOR)).wait()
        assert raised.value.moved_bytes == SECTOR
