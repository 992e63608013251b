"""Transfers of device memory: the real ones where there is a GPU, the refusals elsewhere."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aio_ops import DeviceMover, DeviceSpan, PinnedArena, TransferError
from aio_ops.native_engine import NativeEngine
from aio_ops.pinned import open_cuda
from tests.aio_ops.disks import storage_bytes
from tests.aio_ops.support import SECTOR, contents, make_engine, pattern, put

MIB = 1 << 20


@pytest.fixture(params=["io_uring", "kernel_aio", "threads"])
def engine(request: pytest.FixtureRequest) -> Iterator[NativeEngine]:
    with make_engine(request.param, block_bytes=MIB) as engine:
        assert isinstance(engine, NativeEngine)
        yield engine


def span_of(tensor: torch.Tensor) -> DeviceSpan:
    size_bytes = tensor.numel() * tensor.element_size()
    return DeviceSpan(tensor.device.index or 0, tensor.data_ptr(), size_bytes, tensor)


def on_device(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("size_bytes", [SECTOR, 8 * MIB, 33 * MIB + SECTOR])
def test_bytes_go_there_and_back(engine: NativeEngine, scratch: Path, size_bytes: int) -> None:
    data = pattern(1, size_bytes)
    with (
        engine.create_file(scratch, size_bytes) as file,
        DeviceMover(engine, 0, slot_bytes=MIB, slot_count=3) as mover,
    ):
        assert mover.arena.cuda_registered
        before = storage_bytes()
        mover.submit_write(file, 0, span_of(on_device(data))).wait()
        assert contents(file, 0, size_bytes) == data
        back = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        ticket = mover.submit_read(file, 0, span_of(back))
        ticket.wait()
        assert ticket.moved_bytes == size_bytes
        assert back.cpu().numpy().tobytes() == data
        moved = [after - first for after, first in zip(storage_bytes(), before, strict=True)]
        assert min(moved) >= size_bytes


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*lie on the same device:RuntimeWarning")
def test_a_striped_file_takes_device_memory(engine: NativeEngine, scratch: Path) -> None:
    size_bytes = 21 * MIB + SECTOR
    data = pattern(3, size_bytes)
    directories = [scratch / name for name in "abc"]
    for directory in directories:
        directory.mkdir()
    file = engine.create_striped_file(
        directories, size_bytes, weights=[3, 1, 2], unit_bytes=MIB + SECTOR
    )
    with contextlib.closing(file), DeviceMover(engine, 0, slot_bytes=MIB, slot_count=3) as mover:
        ticket = mover.submit_write(file, 0, span_of(on_device(data)))
        ticket.wait()
        assert ticket.moved_bytes == size_bytes
        for piece in file.layout.pieces(0, size_bytes):
            part = data[piece.start : piece.start + piece.size_bytes]
            assert contents(file.members[piece.member], piece.offset, piece.size_bytes) == part
        back = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        mover.submit_read(file, 0, span_of(back)).wait()
        assert back.cpu().numpy().tobytes() == data


@pytest.mark.gpu
def test_a_write_waits_for_its_event_on_the_device(engine: NativeEngine, scratch: Path) -> None:
    size_bytes = 16 * MIB
    with engine.create_file(scratch, size_bytes) as file, DeviceMover(engine, 0) as mover:
        values = torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        busy = torch.cuda.Stream()
        done = torch.cuda.Event()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(400_000_000)  # cycles: some 0.2 s
            values.fill_(7)
            done.record()
        ticket = mover.submit_write(file, 0, span_of(values), after=done.cuda_event)
        assert not done.query()
        assert not ticket.done()
        ticket.wait()
        assert contents(file, 0, size_bytes) == bytes([7]) * size_bytes


@pytest.mark.gpu
def test_both_directions_at_once(engine: NativeEngine, scratch: Path) -> None:
    count, size_bytes = 12, 4 * MIB
    with (
        engine.create_file(scratch, 2 * count * size_bytes) as file,
        DeviceMover(engine, 0, slot_bytes=MIB, slot_count=2) as mover,
    ):
        for index in range(count):
            put(file, index * size_bytes, pattern(index, size_bytes))
        targets = [torch.zeros(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(count)]
        sources = [on_device(pattern(100 + index, size_bytes)) for index in range(count)]
        torch.cuda.synchronize()
        for index in range(count):
            mover.submit_read(file, index * size_bytes, span_of(targets[index]))
            mover.submit_write(file, (count + index) * size_bytes, span_of(sources[index]))
        mover.drain()
        for index, target in enumerate(targets):
            assert target.cpu().numpy().tobytes() == pattern(index, size_bytes)
            written = contents(file, (count + index) * size_bytes, size_bytes)
            assert written == pattern(100 + index, size_bytes)


@pytest.mark.gpu
def test_what_is_not_aligned_moves_too(engine: NativeEngine, scratch: Path) -> None:
    data = pattern(3, 3 * MIB)
    with (
        contextlib.closing(engine.create_file(scratch, 4 * MIB, any_alignment=True)) as file,
        DeviceMover(engine, 0, slot_bytes=MIB, slot_count=2) as mover,
    ):
        mover.submit_write(file, 77, span_of(on_device(data))).wait()
        back = torch.zeros(3 * MIB - 5, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        mover.submit_read(file, 82, span_of(back)).wait()
        assert back.cpu().numpy().tobytes() == data[5:]


@pytest.mark.gpu
def test_failures_name_the_file_or_what_the_driver_says(
    engine: NativeEngine, scratch: Path
) -> None:
    with engine.create_file(scratch, 8 * MIB) as file, DeviceMover(engine, 0) as mover:
        values = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        os.ftruncate(file.fileno(), MIB)
        with pytest.raises(TransferError, match="the file ended early"):
            mover.submit_read(file, 0, span_of(values)).wait()
        nowhere = DeviceSpan(0, 4096, MIB, None)
        with pytest.raises(TransferError, match="CUDA error 1: invalid argument") as raised:
            mover.submit_write(file, 0, nowhere).wait()
        assert raised.value.errno == errno.EIO
        with pytest.raises(ValueError, match="given to a mover of device 0"):
            mover.submit_read(file, 0, DeviceSpan(1, 4096, MIB, None))
        with pytest.raises(ValueError, match="not inside"):
            mover.submit_read(file, 7 * MIB, DeviceSpan(0, 4096, 2 * MIB, None))
    with pytest.raises(RuntimeError, match="mover is closed"):
        mover.submit_read(file, 0, span_of(values))


@pytest.mark.gpu
def test_an_arena_is_pinned_for_torch_too() -> None:
    with PinnedArena(5 * MIB, device=0) as arena:
        assert arena.cuda_refusal is None
        whole = arena.whole()
        tensor = torch.frombuffer(whole.view(), dtype=torch.uint8)
        assert tensor.is_pinned()
        tensor.fill_(3)
        assert int(tensor.to("cuda", non_blocking=True).sum()) == 15 * MIB
        del tensor, whole


def test_without_a_device_there_is_no_mover(real_kind: str) -> None:
    if open_cuda(0)[0] is not None:
        pytest.skip("there is a CUDA device here")
    with make_engine(real_kind) as engine:
        if not isinstance(engine, NativeEngine):
            pytest.skip("only native engines can move device memory")
        with pytest.raises(OSError, match="CUDA device 0 cannot be used: there is no CUDA driver"):
            DeviceMover(engine, 0)


@pytest.mark.parametrize(("slot_bytes", "slot_count"), [(0, 4), (100, 4), (4096, 1)])
def test_slots_that_cannot_be_are_refused(slot_bytes: int, slot_count: int) -> None:
    with make_engine("threads") as engine:
        assert isinstance(engine, NativeEngine)
        with pytest.raises(ValueError, match="bounce slots must be at least two"):
            DeviceMover(engine, 0, slot_bytes=slot_bytes, slot_count=slot_count)


def test_device_memory_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot start at address 0"):
        DeviceSpan(0, 0, 1, None)
