"""SimulatedDisk catches what it is there for: lost failures, and slots that are reused early."""

import errno
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from aio_ops import Fault, HostArena, SimulatedDisk, Span, Ticket, TransferError, open_engine
from aio_ops.simulated import SimulatedFile
from tests.aio_ops.support import SECTOR, filled, pattern

HERE = Path("/nowhere")
SIZE_BYTES = 2 * SECTOR
COUNT = 4  # writes, then as many reads


@pytest.fixture
def span(arena: HostArena) -> Span:
    return arena.carve(SIZE_BYTES)


def move(
    disk: SimulatedDisk, file: SimulatedFile, arena: HostArena
) -> Iterator[tuple[int, Ticket, Span]]:
    """Write each extent, then read each, waiting before what overlaps; yield what was submitted."""
    for number in range(2 * COUNT):
        offset = number % COUNT * SIZE_BYTES
        if number < COUNT:
            span = filled(arena, pattern(number, SIZE_BYTES))
            yield number, disk.submit_write(file, offset, span), span
        else:
            if number == COUNT:
                disk.drain()
            span = arena.carve(SIZE_BYTES)
            yield number, disk.submit_read(file, offset, span), span


def moved_part(kind: str) -> int:
    return {"eio": 0, "enospc": 0, "short": 512, "torn": SIZE_BYTES // 2}[kind]


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("at", range(2 * COUNT))
@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
def test_each_fault_hits_its_position_and_no_other(
    arena: HostArena, kind: str, at: int, *, repeat: bool
) -> None:
    with SimulatedDisk(at, fault=Fault(at, kind, repeat=repeat)) as disk:
        file = disk.create_file(HERE, COUNT * SIZE_BYTES)
        transfers = list(move(disk, file, arena))
        assert disk.submitted == 2 * COUNT
        for number, ticket, span in transfers:
            offset = number % COUNT * SIZE_BYTES
            if number != at and not (repeat and number > at):
                ticket.wait()
                assert ticket.moved_bytes == SIZE_BYTES
                if number >= COUNT:
                    stored = file.contents[offset : offset + SIZE_BYTES]
                    assert bytes(span.view()) == stored
                continue
            with pytest.raises(TransferError, match="simulated") as caught:
                ticket.wait()
            error = caught.value
            assert error.errno == (errno.ENOSPC if kind == "enospc" else errno.EIO)
            assert error.operation == ("write" if number < COUNT else "read")
            assert (error.path, error.offset) == (file.path, offset)
            assert (error.wanted_bytes, error.moved_bytes) == (SIZE_BYTES, moved_part(kind))
            check_partial(file, span, number, moved_part(kind))


def check_partial(file: SimulatedFile, span: Span, number: int, moved_bytes: int) -> None:
    """Exactly the moved part arrived; behind it is what was there before."""
    offset = number % COUNT * SIZE_BYTES
    stored = file.contents[offset : offset + SIZE_BYTES]
    if number < COUNT:
        data = pattern(number, SIZE_BYTES)
        assert stored == data[:moved_bytes] + bytes(SIZE_BYTES - moved_bytes)
    else:
        assert span.view()[:moved_bytes] == stored[:moved_bytes]
        assert set(span.view()[moved_bytes:]) == {0xA5}


@pytest.mark.parametrize("seed", range(20))
def test_a_slot_that_is_reused_early_is_caught(arena: HostArena, seed: int) -> None:
    for waits in (True, False):
        with SimulatedDisk(seed) as disk:
            file = disk.create_file(HERE, COUNT * SIZE_BYTES)
            slot = arena.carve(SIZE_BYTES)
            for number in range(COUNT):
                slot.view()[:] = pattern(number, SIZE_BYTES)
                ticket = disk.submit_write(file, number * SIZE_BYTES, slot)
                if waits:
                    ticket.wait()
            disk.drain()
            right = b"".join(pattern(number, SIZE_BYTES) for number in range(COUNT))
            assert (file.contents == right) == waits


def test_memory_that_is_looked_at_early_is_caught(span: Span) -> None:
    with SimulatedDisk(1) as disk:
        file = disk.create_file(HERE, SIZE_BYTES)
        file.contents[:] = pattern(1, SIZE_BYTES)
        ticket = disk.submit_read(file, 0, span)
        assert set(span.view()) == {0xA5}
        assert ticket.moved_bytes == 0
        ticket.wait()
        assert bytes(span.view()) == pattern(1, SIZE_BYTES)


def completion_order(disk: SimulatedDisk, arena: HostArena) -> list[int]:
    """Poll one ticket after another and note when each was found done."""
    with disk:
        file = disk.create_file(HERE, 8 * SECTOR)
        tickets = [
            disk.submit_write(file, index * SECTOR, arena.carve(SECTOR)) for index in range(8)
        ]
        order: list[int] = []
        assert disk.in_flight == 8
        while len(order) < 8:
            before = disk.in_flight
            pending = next(index for index in range(8) if index not in order)
            tickets[pending].done()
            assert disk.in_flight == before - 1  # a poll brings one completion, of any transfer
            order += [
                index
                for index, ticket in enumerate(tickets)
                if index not in order and ticket.moved_bytes
            ]
        return order


def test_the_order_is_random_and_comes_from_the_seed(arena: HostArena) -> None:
    orders = [completion_order(SimulatedDisk(seed), arena) for seed in range(10)]
    assert orders == [completion_order(SimulatedDisk(seed), arena) for seed in range(10)]
    assert len({tuple(order) for order in orders}) > 5
    assert completion_order(SimulatedDisk(0, reorder=False), arena) == list(range(8))


def test_there_is_no_descriptor_behind_it(arena: HostArena, tmp_path: Path) -> None:
    with SimulatedDisk(0) as disk:
        file = disk.create_file(HERE, SECTOR)
        assert (file.direct, file.alignment_bytes, file.size_bytes) == (True, 4096, SECTOR)
        assert file.path == HERE / "<simulated swap file>"
        with pytest.raises(io.UnsupportedOperation, match="has no descriptor"):
            file.fileno()
        with open_engine("python") as real:
            with pytest.raises(io.UnsupportedOperation, match="has no descriptor"):
                real.submit_read(file, 0, arena.carve(SECTOR))
            real_file = real.create_file(tmp_path, SECTOR)
            with pytest.raises(TypeError, match="use its create_file"):
                disk.submit_read(real_file, 0, arena.carve(SECTOR))
            real_file.close()
        with pytest.raises(ValueError, match="cannot have 0 bytes"):
            disk.create_file(HERE, 0)


def test_a_fault_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="counted from 0"):
        Fault(-1, "eio")
    with pytest.raises(
        ValueError, match="there is no fault 'fire'; use eio, enospc, short or torn"
    ):
        Fault(0, "fire")
