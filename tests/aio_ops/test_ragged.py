"""Transfers of any size, offset and address on direct files: the same bytes as by plain calls."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aio_ops import Engine, HostArena, Span, SwapFile, TransferFile
from aio_ops.python_engine import aligned_middle
from tests.aio_ops.disks import storage_bytes
from tests.aio_ops.support import SECTOR, contents, make_engine, pattern

FILE_BYTES = 12 * SECTOR


def placed(arena: HostArena, data: bytes, shift: int) -> Span:
    """Carve a span that holds `data` and starts `shift` bytes after a sector boundary."""
    span = arena.carve(len(data) + shift).sub(shift, len(data))
    span.view()[:] = data
    return span


def stored(file: TransferFile) -> bytes:
    return contents(file, 0, FILE_BYTES)


@pytest.mark.parametrize("shift", [0, 1, 4095])
@pytest.mark.parametrize("offset", [0, 1, 4095])
@pytest.mark.parametrize("size_bytes", [1, 4095, 4097, 5 * SECTOR + 77])
def test_every_raggedness_is_exact(
    engine: Engine, scratch: Path, arena: HostArena, offset: int, size_bytes: int, shift: int
) -> None:
    data = pattern(offset + size_bytes, size_bytes)
    with contextlib.closing(engine.create_file(scratch, FILE_BYTES, any_alignment=True)) as file:
        assert file.direct
        ticket = engine.submit_write(file, offset, placed(arena, data, shift))
        ticket.wait()
        assert ticket.moved_bytes == size_bytes
        assert stored(file) == bytes(offset) + data + bytes(FILE_BYTES - offset - size_bytes)
        around = placed(arena, b"\x77" * (size_bytes + 2), shift)
        engine.submit_read(file, offset, around.sub(1, size_bytes)).wait()
        assert bytes(around.view()) == b"\x77" + data + b"\x77"


def test_the_aligned_middle_is_direct(real_engine: Engine, scratch: Path, arena: HostArena) -> None:
    data = pattern(1, 8 * SECTOR + 200)
    with contextlib.closing(
        real_engine.create_file(scratch, FILE_BYTES, any_alignment=True)
    ) as file:
        before = storage_bytes()
        real_engine.submit_write(file, SECTOR - 100, placed(arena, data, SECTOR - 100)).wait()
        written = storage_bytes()[1] - before[1]
        assert written >= 8 * SECTOR
        cached = cached_pages(file)
        assert not any(cached[1:9])
        target = placed(arena, bytes(len(data)), SECTOR - 100)
        before = storage_bytes()
        real_engine.submit_read(file, SECTOR - 100, target).wait()
        assert storage_bytes()[0] - before[0] >= 8 * SECTOR
        assert bytes(target.view()) == data


def cached_pages(file: TransferFile) -> list[bool]:
    """Return which pages of the file are in the page cache."""
    import ctypes
    import mmap

    with mmap.mmap(file.edge_fileno(), FILE_BYTES, mmap.MAP_SHARED) as mapping:
        start = ctypes.addressof(anchor := ctypes.c_char.from_buffer(mapping))
        pages = (ctypes.c_ubyte * (FILE_BYTES // SECTOR))()
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(FILE_BYTES), pages
        )
        del anchor
    assert not failed
    return [bool(page & 1) for page in pages]


def test_a_file_has_one_edge_descriptor_as_long_as_it_lives(scratch: Path) -> None:
    with SwapFile.create(scratch, FILE_BYTES, any_alignment=True) as file:
        edge = file.edge_fileno()
        assert os.fstat(edge).st_ino == os.fstat(file.fileno()).st_ino
        lease = file.lease()
    os.fstat(edge)
    del lease
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(edge)
    with SwapFile.create(scratch, FILE_BYTES) as file:
        assert file.edge_fileno() == -1
        assert not file.any_alignment


@pytest.mark.parametrize(
    ("offset", "size_bytes", "address", "middle"),
    [
        (0, 2 * SECTOR, 0, range(2 * SECTOR)),
        (1, SECTOR, 1, range(0)),
        (1, 2 * SECTOR, 1, range(SECTOR - 1, 2 * SECTOR - 1)),
        (1, 2 * SECTOR, 2, range(0)),
        (SECTOR, 100, 0, range(0)),
        (SECTOR, SECTOR + 100, 0, range(SECTOR)),
    ],
)
def test_the_middle_is_the_whole_sectors(
    offset: int, size_bytes: int, address: int, middle: range
) -> None:
    assert aligned_middle(offset, size_bytes, address, SECTOR) == middle


Extent = tuple[int, int, int, int]  # offset, size, shift, seed
extents = st.tuples(
    st.one_of(st.integers(0, FILE_BYTES - 1), st.sampled_from(range(0, FILE_BYTES, SECTOR))),
    st.one_of(st.integers(1, 5 * SECTOR), st.sampled_from([SECTOR, 2 * SECTOR])),
    st.one_of(st.just(0), st.just(-1), st.integers(0, SECTOR - 1)),
    st.integers(0, 255),
)
rounds = st.lists(st.lists(extents, min_size=1, max_size=8), min_size=1, max_size=4)


def apart(asked: list[Extent]) -> list[Extent]:
    """Keep what overlaps nothing before it, for nothing is ordered between transfers."""
    kept: list[Extent] = []
    for offset, size_bytes, shift, seed in asked:
        stop = min(offset + size_bytes, FILE_BYTES)
        if all(stop <= one[0] or offset >= one[0] + one[1] for one in kept):
            in_step = offset % SECTOR if shift < 0 else shift  # so that there is a middle
            kept.append((offset, stop - offset, in_step, seed))
    return kept


def check_rounds(engine_kind: str, scratch: Path, steps: list[list[Extent]]) -> None:
    expected = bytearray(FILE_BYTES)
    with (
        make_engine(engine_kind, block_bytes=SECTOR) as engine,
        HostArena(128 * 7 * SECTOR) as arena,
        contextlib.closing(engine.create_file(scratch, FILE_BYTES, any_alignment=True)) as file,
    ):
        for asked in steps:
            moves = apart(asked)
            for offset, size_bytes, shift, seed in moves:  # all of them in flight at once
                data = pattern(seed, size_bytes)
                expected[offset : offset + size_bytes] = data
                engine.submit_write(file, offset, placed(arena, data, shift))
            engine.drain()
            reads = []
            for offset, size_bytes, shift, _ in asked:
                size = min(size_bytes, FILE_BYTES - offset)
                span = placed(arena, bytes(size), max(shift, 0))
                reads.append((engine.submit_read(file, offset, span), offset, span))
            for ticket, offset, span in reads:
                ticket.wait()
                assert bytes(span.view()) == expected[offset : offset + span.size_bytes]
            assert stored(file) == bytes(expected)


def examples(count: int) -> Callable[..., Callable[..., None]]:
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@examples(50)
@given(rounds)
def test_any_mix_equals_the_oracle(
    engine_kind: str, scratch: Path, steps: list[list[Extent]]
) -> None:
    check_rounds(engine_kind, scratch, steps)


@pytest.mark.full
@examples(1000)
@given(rounds)
def test_any_mix_equals_the_oracle_1000_times(
    engine_kind: str, scratch: Path, steps: list[list[Extent]]
) -> None:
    check_rounds(engine_kind, scratch, steps)
