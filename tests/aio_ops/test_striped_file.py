"""A file over several directories: one ticket, every byte where the layout says, every failure."""

import contextlib
import ctypes
import errno
import gc
import logging
import random
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from aio_ops import (
    Engine,
    Fault,
    HostArena,
    SimulatedDisk,
    Span,
    StripedFile,
    Ticket,
    TransferError,
)
from aio_ops.schedule_measurement import Traffic
from aio_ops.striping import plan_stripes
from tests.aio_ops.disks import frozen, mounted, mounted_ext4
from tests.aio_ops.stripes import SIZE, UNIT, places, striped
from tests.aio_ops.support import SECTOR, contents, filled, make_engine, pattern
from tests.aio_ops.test_faults import unreserved_file


def merged(file: StripedFile, size_bytes: int) -> bytes:
    """Put the file together from its members, past the engine."""
    whole = bytearray(size_bytes)
    for piece in file.layout.pieces(0, size_bytes):
        member = file.members[piece.member]
        # Direct reads are of whole sectors.
        data = contents(member, piece.offset, -(-piece.size_bytes // SECTOR) * SECTOR)
        whole[piece.start : piece.start + piece.size_bytes] = data[: piece.size_bytes]
    return bytes(whole)


def test_a_transfer_over_all_members_is_one_ticket(
    engine: Engine, scratch: Path, arena: HostArena
) -> None:
    data = pattern(3, SIZE)
    with contextlib.closing(striped(engine, places(scratch))) as file:
        assert file.size_bytes == SIZE
        assert [round(own / SECTOR) for own in file.layout.member_bytes] == [19, 6, 12]
        ticket = engine.submit_write(file, 0, filled(arena, data))
        assert ticket.size_bytes == SIZE
        ticket.wait()
        assert ticket.done()
        assert ticket.moved_bytes == SIZE
        assert engine.in_flight == 0
        assert merged(file, SIZE) == data
        back = arena.carve(SIZE)
        engine.submit_read(file, 0, back).wait()
        assert bytes(back.view()) == data


def test_requests_of_any_place_and_size_reach_their_bytes(
    engine: Engine, scratch: Path, arena: HostArena
) -> None:
    choose = random.Random(5)
    model = bytearray(SIZE)
    with contextlib.closing(striped(engine, places(scratch))) as file:
        for number in range(20):
            start, stop = sorted(choose.sample(range(SIZE // SECTOR + 1), 2))
            offset, size_bytes = start * SECTOR, (stop - start) * SECTOR
            if number % 2:
                span = arena.carve(size_bytes)
                engine.submit_read(file, offset, span).wait()
                assert bytes(span.view()) == model[offset : offset + size_bytes]
            else:
                model[offset : offset + size_bytes] = pattern(number, size_bytes)
                span = filled(arena, bytes(model[offset : offset + size_bytes]))
                engine.submit_write(file, offset, span).wait()
        assert merged(file, SIZE) == model


def test_many_requests_in_one_call(engine: Engine, scratch: Path, arena: HostArena) -> None:
    data = pattern(4, SIZE)
    whole, back = filled(arena, data), arena.carve(SIZE)
    offsets = list(range(0, SIZE, 3 * SECTOR))
    random.Random(1).shuffle(offsets)

    def parts(span: Span) -> list[tuple[int, Span]]:
        return [(at, span.sub(at, min(3 * SECTOR, SIZE - at))) for at in offsets]

    with contextlib.closing(striped(engine, places(scratch))) as file:
        for ticket in engine.submit_writes(file, parts(whole)):
            ticket.wait()
        tickets = engine.submit_reads(file, parts(back))
        assert len(tickets) == len(offsets)
        engine.drain()
        assert all(ticket.done() for ticket in tickets)
        assert sum(ticket.moved_bytes for ticket in tickets) == SIZE
        assert bytes(back.view()) == data
        with pytest.raises(ValueError, match="are not inside"):
            engine.submit_reads(file, [(0, back.sub(0, SECTOR)), (SIZE, back.sub(0, SECTOR))])
        with pytest.raises(ValueError, match="needs offset to be a multiple of 4096, got 512"):
            engine.submit_read(file, 512, back.sub(0, SECTOR))
        assert engine.submit_reads(file, []) == []
        assert engine.in_flight == 0
    with pytest.raises(ValueError, match="is closed"):
        engine.submit_read(file, 0, back)


def test_requests_that_are_not_aligned(
    real_engine: Engine, scratch: Path, arena: HostArena
) -> None:
    size_bytes, (offset, part) = SIZE + 77, (SECTOR - 5, 9 * SECTOR + 13)
    with contextlib.closing(
        striped(real_engine, places(scratch), size_bytes, any_alignment=True)
    ) as file:
        assert sum(file.layout.member_bytes) == size_bytes
        model = bytearray(pattern(1, size_bytes))
        real_engine.submit_write(file, 0, filled(arena, bytes(model))).wait()
        model[offset : offset + part] = pattern(2, part)
        real_engine.submit_write(
            file, offset, filled(arena, bytes(model[offset : offset + part]))
        ).wait()
        back = arena.carve(size_bytes)
        real_engine.submit_read(file, 0, back).wait()
        assert bytes(back.view()) == model


# Failures


def member_of(file: StripedFile, error: TransferError) -> int:
    [index] = [index for index, each in enumerate(file.members) if each.path == error.path]
    return index


@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_fault_of_any_piece_names_the_member_and_both_places(kind: str, operation: str) -> None:
    with HostArena(2 * SIZE) as arena:
        count = len(striped(SimulatedDisk(0), [Path("/a"), Path("/b"), Path("/c")]).layout.starts)
        for at in range(count):
            disk = SimulatedDisk(at, fault=Fault(at, kind))  # type: ignore[arg-type]
            file = striped(disk, [Path("/a"), Path("/b"), Path("/c")])
            pieces = file.layout.pieces(0, SIZE)
            if at >= len(pieces):
                break
            span = arena.whole().sub(0, SIZE)
            verb = disk.submit_write if operation == "write" else disk.submit_read
            ticket = verb(file, 0, span)
            with pytest.raises(TransferError) as caught:
                ticket.wait()
            assert disk.in_flight == 0  # also the pieces that did not fail
            error, piece = caught.value, pieces[at]
            assert member_of(file, error) == piece.member
            assert (error.offset, error.wanted_bytes) == (piece.offset, piece.size_bytes)
            assert f"from offset {piece.start} on of <swap file striped over /a, /b, /c>" in str(
                error
            )
            assert error.errno == (errno.ENOSPC if kind == "enospc" else errno.EIO)
            assert ticket.moved_bytes == SIZE - piece.size_bytes + error.moved_bytes
            assert ticket.done()
            with pytest.raises(TransferError, match="striped over"):
                ticket.wait()


@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
def test_a_fault_anywhere_in_a_run_is_an_error_or_right_data(kind: str) -> None:
    raised = 0
    with HostArena(SIZE) as arena:
        span = arena.whole().sub(0, SIZE)
        for at in range(0, 45, 2):
            disk = SimulatedDisk(at, fault=Fault(at, kind))  # type: ignore[arg-type]
            file = striped(disk, [Path("/a"), Path("/b"), Path("/c")])
            data = pattern(at, SIZE)
            try:
                span.view()[:] = data
                disk.submit_write(file, 0, span).wait()
                span.view()[:] = bytes(SIZE)
                thirds = [
                    (i * 10 * SECTOR, span.sub(i * 10 * SECTOR, 10 * SECTOR)) for i in (2, 0, 1)
                ]
                for ticket in disk.submit_reads(file, thirds):
                    ticket.wait()
            except TransferError:
                raised += 1
                disk.drain()
            else:
                assert bytes(span.view())[: 30 * SECTOR] == data[: 30 * SECTOR]
                assert at >= disk.submitted  # nothing was swallowed
    assert raised > 10


def test_the_first_of_several_failures_is_raised_and_all_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = SimulatedDisk(1, fault=Fault(2, "eio", repeat=True))
    file = striped(disk, [Path("/a"), Path("/b"), Path("/c")])
    with HostArena(SIZE) as arena, caplog.at_level(logging.ERROR):
        ticket = disk.submit_write(file, 0, arena.carve(SIZE))
        third = file.layout.pieces(0, SIZE)[2]
        with pytest.raises(TransferError, match=f"from offset {third.start} on"):
            ticket.wait()
        del ticket
        gc.collect()
        assert not caplog.records  # who waited was told
        dropped = disk.submit_write(file, 0, arena.whole().sub(0, SIZE))
        del dropped
        disk.drain()
        gc.collect()
    assert "nobody waited for it" in caplog.text
    assert "drive" not in caplog.text
    for name in "/a", "/b", "/c":
        assert f"{name}/<simulated swap file>" in caplog.text


class Memory:
    """Owned bytes whose end can be watched."""

    def __init__(self, size_bytes: int) -> None:
        self.buffer = ctypes.create_string_buffer(size_bytes + SECTOR)

    def span(self, size_bytes: int) -> Span:
        address = -(-ctypes.addressof(self.buffer) // SECTOR) * SECTOR
        return Span(address, size_bytes, self)


@pytest.mark.parametrize("drop", [False, True])
def test_memory_is_kept_until_every_piece_is_over(*, drop: bool) -> None:
    disk = SimulatedDisk(3, fault=Fault(0, "eio"), reorder=False)
    file = striped(disk, [Path("/a"), Path("/b"), Path("/c")])
    memory = Memory(SIZE)
    alive = weakref.ref(memory)
    ticket = disk.submit_write(file, 0, memory.span(SIZE))
    del memory
    count = disk.in_flight
    assert count == len(file.layout.pieces(0, SIZE))
    if drop:
        del ticket
    gc.collect()
    while disk.in_flight:
        assert alive() is not None
        disk._complete_one()
    if not drop:
        with pytest.raises(TransferError):
            ticket.wait()
    gc.collect()
    assert alive() is None


def test_what_cannot_be_started_whole_leaves_nothing_in_flight(
    monkeypatch: pytest.MonkeyPatch, arena: HostArena
) -> None:
    disk = SimulatedDisk(5)
    file = striped(disk, [Path("/a"), Path("/b"), Path("/c")])
    start = disk._start
    calls = []

    def breaks(*arguments: Any) -> list[Ticket]:
        calls.append(disk.in_flight)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return start(*arguments)

    monkeypatch.setattr(disk, "_start", breaks)
    with pytest.raises(KeyboardInterrupt):
        disk.submit_write(file, 0, arena.carve(SIZE))
    assert calls == [0, 1, 2, 3]
    assert disk.in_flight == 0  # else the caller would reuse memory that is still being written


def test_a_single_directory_is_not_measured(
    engine: Engine, scratch: Path, arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Traffic, "go", lambda *_: pytest.fail("it measures"))
    with contextlib.closing(engine.create_striped_file([scratch], SIZE)) as file:
        engine.submit_write(file, SECTOR, filled(arena, pattern(2, SIZE - SECTOR))).wait()
        assert merged(file, SIZE) == bytes(SECTOR) + pattern(2, SIZE - SECTOR)
        assert len(file.members) == 1


def test_a_full_drive_is_the_error_of_its_member(
    real_engine: Engine, scratch: Path, arena: HostArena, tmp_path: Path
) -> None:
    with mounted(tmp_path / "small", "tmpfs", f"size={4 * SECTOR}") as small:
        layout = plan_stripes(SIZE, [1, 1], alignment_bytes=SECTOR, unit_bytes=UNIT)
        members = [
            unreserved_file(directory, own)
            for directory, own in zip((scratch, small), layout.member_bytes, strict=True)
        ]
        with contextlib.closing(StripedFile(members, layout)) as file:
            ticket = real_engine.submit_write(file, 0, filled(arena, pattern(1, SIZE)))
            with pytest.raises(TransferError) as caught:
                ticket.wait()
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.path == members[1].path
            assert f"on of <swap file striped over {scratch}, {small}>" in str(caught.value)
            assert ticket.moved_bytes == layout.member_bytes[0] + 4 * SECTOR


def test_pieces_take_one_place_in_the_queue(tmp_path: Path, real_kind: str) -> None:
    if real_kind == "kernel_aio":
        pytest.skip("io_submit itself waits for a frozen file system")
    with (
        mounted_ext4(tmp_path, 24 << 20) as slow,
        make_engine(real_kind, queue_depth=1) as engine,
        HostArena(SIZE) as arena,
        contextlib.closing(striped(engine, places(slow))) as file,
    ):
        with frozen(slow) as thaw:
            start = time.monotonic()
            ticket = engine.submit_write(file, 0, filled(arena, pattern(1, SIZE)))
            assert time.monotonic() - start < 5
            assert engine.in_flight == len(file.layout.pieces(0, SIZE))
            assert not ticket.done()
            with pytest.raises(TimeoutError, match=r"striped over .* is not done after 0.05 s"):
                ticket.wait(0.05)
            thaw()
            ticket.wait()
        assert merged(file, SIZE) == pattern(1, SIZE)
