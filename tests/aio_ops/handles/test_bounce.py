"""Tensors out of step with their file: in chunks through a few slots, the same bytes as plainly."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aio_ops import HostArena, TransferError
from aio_ops.handles import aio_handle
from aio_ops.handles.files import FileOpener
from aio_ops.handles.jobs import BouncedJob, BounceSlots, Request
from aio_ops.handles.tensors import DeviceBytes
from aio_ops.transfer import Operation
from tests.aio_ops.handles.support import (
    MIB,
    as_tensor,
    bytes_of,
    file_of,
    moved_at_least,
    unlocked,
)
from tests.aio_ops.support import make_engine, pattern

CHUNK_BYTES = 16384


@pytest.mark.parametrize("offset", [0, 4096, 777])
def test_a_tensor_of_torchs_own_is_moved_directly(scratch: Path, offset: int) -> None:
    handle = aio_handle(MIB, 8)
    path, data = file_of(scratch, 1, 30 * MIB + 99)
    target = unlocked(bytes(len(data) - offset))
    assert target.data_ptr() % 4096
    with moved_at_least(read=29 * MIB):
        returned = handle.sync_pread(target, path, offset)
        assert returned == 1
    assert bytes_of(target) == data[offset:]
    assert not any(cached_pages(path)[8:-8])
    fresh = pattern(2, len(data) - offset)
    with moved_at_least(written=29 * MIB):
        returned = handle.sync_pwrite(unlocked(fresh), path, offset)
        assert returned == 1
    assert not any(cached_pages(path)[8:-8])
    assert path.read_bytes() == data[:offset] + fresh


def cached_pages(path: Path) -> list[bool]:
    """Return which pages of a file are in the page cache."""
    import ctypes
    import mmap

    size_bytes = path.stat().st_size
    descriptor = os.open(path, os.O_RDWR)
    with mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED) as mapping:
        start = ctypes.addressof(anchor := ctypes.c_char.from_buffer(mapping))
        pages = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), pages
        )
        del anchor
    os.close(descriptor)
    assert not failed
    return [bool(page & 1) for page in pages]


def test_a_written_tensor_may_change_at_once_and_many_reads_share_the_slots(scratch: Path) -> None:
    handle = aio_handle(4096, 8)
    datas = [pattern(seed, 9 * MIB + seed) for seed in range(3)]
    source = unlocked(bytes(9 * MIB + 3))
    for index, data in enumerate(datas):
        part = source[: len(data)]
        part.copy_(as_tensor(data))
        handle.async_pwrite(part, scratch / str(index))
        part.zero_()
    returned = handle.wait()
    assert returned == 3
    assert [(scratch / str(index)).read_bytes() for index in range(3)] == datas
    targets = [unlocked(bytes(len(data))) for data in datas]
    for index, target in enumerate(targets):
        handle.async_pread(target, scratch / str(index))
    # A write needs slots that the reads hold: it moves them on, and does not wait for ever.
    handle.async_pwrite(unlocked(datas[0]), scratch / "more")
    returned = handle.wait()
    assert returned == 4
    assert [bytes_of(target) for target in targets] == datas
    assert (scratch / "more").read_bytes() == datas[0]


Piece = tuple[bool, int, int]  # writes, offset, size
pieces = st.tuples(
    st.booleans(),
    st.one_of(st.integers(0, 5 * CHUNK_BYTES), st.sampled_from([0, 4096, CHUNK_BYTES])),
    st.one_of(
        st.integers(1, 6 * CHUNK_BYTES), st.sampled_from([4096, CHUNK_BYTES, 4 * CHUNK_BYTES])
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(pieces, min_size=1, max_size=4))
def test_any_chunks_equal_plain_calls(tmp_path: Path, work: list[Piece]) -> None:
    path = tmp_path / "file"
    oracle = bytearray(pattern(1, 12 * CHUNK_BYTES))
    path.write_bytes(oracle)
    with make_engine("threads") as engine:
        slots = BounceSlots(engine, CHUNK_BYTES)
        for seed, (writes, offset, size_bytes) in enumerate(work):
            data = pattern(seed, size_bytes) if writes else bytes(size_bytes)
            tensor = as_tensor(data)
            operation = Operation.WRITE if writes else Operation.READ
            file = FileOpener().open(path, writes=writes)
            BouncedJob(slots, Request(operation, file, offset, DeviceBytes(tensor, torch))).finish()
            if writes:
                oracle[offset : offset + size_bytes] = data
            assert bytes_of(tensor) == oracle[offset : offset + size_bytes]
    assert path.read_bytes() == oracle


def test_a_failed_chunk_ends_its_job_and_frees_its_slot(scratch: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    kept: list[BaseException] = []
    path, data = file_of(scratch, 4, 20 * CHUNK_BYTES)
    with make_engine("threads") as engine:
        slots = BounceSlots(engine, CHUNK_BYTES)
        jobs = []
        for _ in range(2):  # the second waits for slots of the first
            target = as_tensor(bytes(len(data)))
            file = FileOpener().open(path, writes=False)
            memory = DeviceBytes(target, torch)
            jobs.append(BouncedJob(slots, Request(Operation.READ, file, 0, memory)))
        os.truncate(path, 2 * CHUNK_BYTES)  # what the slots did not hold is gone
        for job in jobs:
            with pytest.raises(TransferError, match="the file ended early") as caught:
                job.finish()
            kept.append(caught.value)  # errors keep their frames alive
        path.write_bytes(data)
        target = as_tensor(bytes(len(data)))
        file = FileOpener().open(path, writes=False)
        BouncedJob(slots, Request(Operation.READ, file, 0, DeviceBytes(target, torch))).finish()
        assert bytes_of(target) == data
    del file, job
    assert len(kept) == 2
    assert len(os.listdir("/proc/self/fd")) == open_before  # noqa: PTH208


def test_slots_are_made_at_the_first_need_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from aio_ops.handles import jobs

    made: list[int] = []

    def arena(size_bytes: int) -> HostArena:
        made.append(size_bytes)
        return HostArena(size_bytes)

    monkeypatch.setattr(jobs, "HostArena", arena)
    with make_engine("threads") as engine:
        slots = BounceSlots(engine, CHUNK_BYTES)
        assert slots.has_free()
        assert made == []
        slots._acquire(None)
    assert made == [4 * (CHUNK_BYTES + 4096)]
