"""The shapes of call that the field tests its handles with: small blocks, every combination."""

import itertools
import os
from pathlib import Path

import pytest
import torch

from aio_ops.handles import AioHandle, aio_handle, aio_read, aio_write
from tests.aio_ops.handles.support import (
    MIB,
    bytes_of,
    file_of,
    locked,
    make,
    moved_at_least,
    unlocked,
)
from tests.aio_ops.support import pattern

BLOCK_BYTES = 1024
DEPTH = 2
SIZE_BYTES = 4096
PARALLEL = 2

combinations = pytest.mark.parametrize(
    ("kind", "single", "overlap"),
    list(itertools.product(["locked", "unlocked"], [False, True], [False, True])),
)


def small(single: bool, overlap: bool) -> AioHandle:
    return aio_handle(BLOCK_BYTES, DEPTH, single, overlap, PARALLEL)


@combinations
def test_getters_say_what_was_given(kind: str, single: bool, overlap: bool) -> None:
    handle = small(single, overlap)
    assert handle.get_block_size() == BLOCK_BYTES
    assert handle.get_queue_depth() == DEPTH
    assert handle.get_single_submit() is single
    assert handle.get_overlap_events() is overlap
    assert handle.get_intra_op_parallelism() == PARALLEL
    assert handle.get_alignment() == PARALLEL * 512


def test_a_default_handle_has_the_defaults_of_the_field() -> None:
    for handle in (aio_handle(), aio_handle(None, None, None, None, None)):
        assert handle.get_block_size() == 1048576
        assert handle.get_queue_depth() == 128
        assert handle.get_single_submit() is False
        assert handle.get_overlap_events() is False
        assert handle.get_intra_op_parallelism() == 1
        assert handle.engine_name in ("io_uring", "kernel_aio", "threads", "python")


@combinations
def test_parallel_read(scratch: Path, kind: str, single: bool, overlap: bool) -> None:
    path, data = file_of(scratch, 1, SIZE_BYTES)
    handle = small(single, overlap)
    tensor = make(kind, handle, bytes(SIZE_BYTES))
    with moved_at_least(read=SIZE_BYTES):
        returned = handle.sync_pread(tensor, str(path))
        assert returned == 1
    assert bytes_of(tensor) == data
    tensor.zero_()
    returned = handle.read(tensor, str(path), True)
    assert returned == 0
    assert bytes_of(tensor) == data


@combinations
def test_async_read(scratch: Path, kind: str, single: bool, overlap: bool) -> None:
    path, data = file_of(scratch, 2, SIZE_BYTES)
    handle = small(single, overlap)
    tensor = make(kind, handle, bytes(SIZE_BYTES))
    returned = handle.async_pread(tensor, str(path))
    assert returned == 0
    returned = handle.wait()
    assert returned == 1
    assert bytes_of(tensor) == data
    returned = handle.wait()
    assert returned == 0


@combinations
def test_parallel_write(scratch: Path, kind: str, single: bool, overlap: bool) -> None:
    data = pattern(3, SIZE_BYTES)
    handle = small(single, overlap)
    path = scratch / "new"
    with moved_at_least(written=SIZE_BYTES):
        returned = handle.sync_pwrite(make(kind, handle, data), str(path))
        assert returned == 1
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    other = pattern(4, SIZE_BYTES)
    returned = handle.write(make(kind, handle, other), str(path), True)
    assert returned == 0
    assert path.read_bytes() == other


@combinations
def test_async_write(scratch: Path, kind: str, single: bool, overlap: bool) -> None:
    data = pattern(5, SIZE_BYTES)
    handle = small(single, overlap)
    path = scratch / "new"
    returned = handle.async_pwrite(make(kind, handle, data), str(path))
    assert returned == 0
    returned = handle.wait()
    assert returned == 1
    assert path.read_bytes() == data


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", ["locked", "unlocked"])
def test_a_queue_of_files(scratch: Path, count: int, kind: str) -> None:
    handle = small(False, True)
    files = [file_of(scratch, seed, SIZE_BYTES) for seed in range(count)]
    targets = [make(kind, handle, bytes(SIZE_BYTES)) for _ in files]
    for (path, _), target in zip(files, targets, strict=True):
        returned = handle.async_pread(target, str(path))
        assert returned == 0
    returned = handle.wait()
    assert returned == count
    for (_, data), target in zip(files, targets, strict=True):
        assert bytes_of(target) == data
    copies = [scratch / f"copy-{index}" for index in range(count)]
    for target, copy in zip(targets, copies, strict=True):
        returned = handle.async_pwrite(target, str(copy))
        assert returned == 0
    returned = handle.wait()
    assert returned == count
    assert [copy.read_bytes() for copy in copies] == [data for _, data in files]


@pytest.mark.parametrize("partitions", [[1, 1, 1], [1, 1, 2], [1, 2, 1], [2, 1, 1]])
@pytest.mark.parametrize("by_descriptor", [False, True])
def test_partitions_of_one_file(scratch: Path, partitions: list[int], by_descriptor: bool) -> None:
    handle = aio_handle(BLOCK_BYTES, DEPTH, False, True, PARALLEL)
    sizes = [count * BLOCK_BYTES * PARALLEL * 4 for count in partitions]
    parts = [pattern(seed, size) for seed, size in enumerate(sizes)]
    path = scratch / "whole"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT) if by_descriptor else -1
    offset = 0
    for part in parts:
        place: str | int = descriptor if by_descriptor else str(path)
        returned = handle.async_pwrite(locked(handle, part), place, offset)
        assert returned == 0
        returned = handle.wait()
        assert returned == 1
        offset += len(part)
    if by_descriptor:
        os.close(descriptor)  # it is the caller's, and still open
    assert path.read_bytes() == b"".join(parts)
    offset = 0
    for part in parts:
        target = locked(handle, bytes(len(part)))
        returned = handle.sync_pread(target, str(path), offset)
        assert returned == 1
        assert bytes_of(target) == part
        offset += len(part)


def test_a_descriptor_may_be_closed_at_once_and_is_never_closed_by_us(scratch: Path) -> None:
    handle = aio_handle()
    data = pattern(6, MIB)
    path = scratch / "new"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    handle.async_pwrite(locked(handle, data), fd=descriptor)
    os.close(descriptor)
    returned = handle.wait()
    assert returned == 1
    assert path.read_bytes() == data
    descriptor = os.open(path, os.O_RDONLY)
    target = unlocked(bytes(MIB))
    handle.async_pread(target, descriptor)
    returned = handle.wait()
    assert returned == 1
    os.close(descriptor)
    assert bytes_of(target) == data


def test_pread_and_pwrite_take_the_fields_fourth_argument(scratch: Path) -> None:
    path, data = file_of(scratch, 7, SIZE_BYTES)
    handle = aio_handle()
    tensor = unlocked(bytes(SIZE_BYTES))
    returned = handle.pread(tensor, str(path), False, True)
    assert returned == 0
    returned = handle.pwrite(unlocked(data), str(path), True, True, SIZE_BYTES)
    assert returned == 0
    returned = handle.pwrite(unlocked(data), str(path), False, False, 2 * SIZE_BYTES)
    assert returned == 3
    assert bytes_of(tensor) == data
    assert path.read_bytes() == 3 * data
    returned = handle.pread(tensor, str(path), True, **{"async": True})
    assert returned == 0
    returned = handle.pread(tensor, str(path), True, file_offset=SIZE_BYTES, **{"async": False})
    assert returned == 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'asink'"):
        handle.pread(tensor, str(path), True, asink=True)
    with pytest.raises(TypeError, match="say with the fourth argument"):
        handle.pread(tensor, str(path), True)


def test_a_synchronous_call_waits_for_what_is_pending_and_counts_it(scratch: Path) -> None:
    handle = aio_handle()
    data = pattern(8, MIB)
    source = locked(handle, data)
    for name in "abc":
        handle.async_pwrite(source, str(scratch / name))
    returned = handle.sync_pwrite(source, str(scratch / "d"))
    assert returned == 4
    returned = handle.wait()
    assert returned == 0
    assert all((scratch / name).read_bytes() == data for name in "abcd")


def test_the_functions_of_the_module(scratch: Path) -> None:
    path = scratch / "new"
    data = pattern(9, MIB + 24)
    settings = (MIB, 8, False, True, True)
    returned = aio_write(unlocked(data), str(path), *settings)
    assert returned == 0
    assert path.read_bytes() == data
    target = unlocked(bytes(len(data)))
    returned = aio_read(target, str(path), *settings)
    assert returned == 0
    assert bytes_of(target) == data
    # The whole file is what was written: no tail of a longer one stays.
    returned = aio_write(unlocked(data[:4096]), str(path), *settings)
    assert returned == 0
    assert path.read_bytes() == data[:4096]
    with pytest.raises(ValueError, match=r"has 4096 bytes from offset 0 on, but the tensor has 8"):
        aio_read(torch.zeros(2), str(path), *settings)


def test_a_handle_writes_into_a_file_without_cutting_it(scratch: Path) -> None:
    path, data = file_of(scratch, 10, 8192)
    handle = aio_handle()
    part = pattern(11, 4096)
    handle.sync_pwrite(locked(handle, part), str(path))
    assert path.read_bytes() == part + data[4096:]
    handle.write(locked(handle, part), str(path), False, 4096)
    assert path.read_bytes() == part + part
    with pytest.raises(ValueError, match="8192 bytes from offset 0 on, but the tensor has 4096"):
        handle.read(locked(handle, part), str(path), False)
    target = locked(handle, bytes(4096))
    returned = handle.read(target, str(path), False, 4096)
    assert returned == 0
    assert bytes_of(target) == part


@pytest.mark.parametrize("engine", ["io_uring", "kernel_aio", "threads", "python"])
def test_every_engine_serves(scratch: Path, engine: str) -> None:
    from tests.aio_ops.support import make_engine

    make_engine(engine).close()  # or skip with the reason
    handle = aio_handle(16384, 4, False, True, 2, engine=engine)
    assert handle.engine_name == engine
    data = pattern(12, 3 * MIB + 5)
    with moved_at_least(read=3 * MIB, written=3 * MIB):
        handle.sync_pwrite(locked(handle, data), scratch / "new")
        target = locked(handle, bytes(len(data)))
        handle.sync_pread(target, scratch / "new")
    assert bytes_of(target) == data


@pytest.mark.parametrize(
    ("name", "value"), [("block_size", 0), ("queue_depth", -1), ("intra_op_parallelism", 0)]
)
def test_settings_that_cannot_be_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number from 1 on, got {value}"):
        aio_handle(**{name: value})
