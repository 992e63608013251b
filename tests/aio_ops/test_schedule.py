"""Windows and bursts: which blocks go to the kernel first, and that none waits for ever."""

import contextlib
import dataclasses
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aio_ops import Engine, HostArena, Schedule
from aio_ops.schedule import Chooser
from aio_ops.transfer import Operation
from tests.aio_ops.support import BLOCK_BYTES, SECTOR, contents, filled, pattern

READ, WRITE = Operation.READ, Operation.WRITE
MIB = 1 << 20
limits = st.one_of(st.none(), st.integers(1, 40))
schedules = st.builds(Schedule, limits, limits, limits)
arrivals = st.tuples(st.just("arrive"), st.sampled_from(Operation), st.integers(1, 16))
ends = st.tuples(st.just("end"), st.just(READ), st.integers(0, 100))
events = st.lists(st.one_of(arrivals, arrivals, ends), max_size=60)


@dataclasses.dataclass
class Device:
    """Takes blocks as the chooser says, and checks each choice."""

    schedule: Schedule
    waiting: dict[Operation, deque[int]]
    with_kernel: list[tuple[Operation, int]] = dataclasses.field(default_factory=list)
    burst_bytes: int = 0

    def used_bytes(self, operation: Operation) -> int:
        return sum(size for kind, size in self.with_kernel if kind is operation)

    def first(self, operation: Operation) -> int:
        return self.waiting[operation][0] if self.waiting[operation] else 0

    def take_all(self, chooser: Chooser) -> None:
        while True:
            kind = chooser.choose(self.first(READ), self.first(WRITE))
            if kind is None:
                # Nothing waits for ever: something of ours is over some day.
                assert self.with_kernel or not any(self.waiting.values())
                return
            size_bytes = self.waiting[kind].popleft()
            self.check(kind, size_bytes)
            self.with_kernel.append((kind, size_bytes))
            chooser.taken(kind, size_bytes)

    def check(self, kind: Operation, size_bytes: int) -> None:
        other = WRITE if kind is READ else READ
        used_bytes, others_bytes = self.used_bytes(kind), self.used_bytes(other)
        assert used_bytes == 0 or used_bytes + size_bytes <= self.schedule.window_bytes(kind)
        if self.schedule.burst_bytes is not None:
            assert others_bytes == 0
        elif self.waiting[other] and self.first(other) + others_bytes <= self.schedule.window_bytes(
            other
        ):
            assert (used_bytes, kind is WRITE) <= (others_bytes, other is WRITE)


@given(schedules, events)
def test_every_choice_keeps_the_rules(
    schedule: Schedule, steps: list[tuple[str, Operation, int]]
) -> None:
    chooser = Chooser(schedule)
    device = Device(schedule, {kind: deque() for kind in Operation})
    for what, kind, number in steps:
        if what == "arrive":
            device.waiting[kind].append(number)
        elif device.with_kernel:
            chooser.over(*device.with_kernel.pop(number % len(device.with_kernel)))
        device.take_all(chooser)
    while device.with_kernel:
        chooser.over(*device.with_kernel.pop(0))
        device.take_all(chooser)
    assert not any(device.waiting.values())


def order(schedule: Schedule, reads: int, writes: int) -> str:
    """Return what goes when one block of a byte is with the kernel at a time."""
    chooser = Chooser(schedule)
    taken = ""
    while reads or writes:
        kind = chooser.choose(min(reads, 1), min(writes, 1))
        assert kind is not None
        chooser.taken(kind, 1)
        chooser.over(kind, 1)
        reads, writes = reads - (kind is READ), writes - (kind is WRITE)
        taken += "r" if kind is READ else "w"
    return taken


def test_bursts_alternate() -> None:
    assert order(Schedule(burst_bytes=3), 7, 5) == "rrrwwwrrrwwr"
    assert order(Schedule(burst_bytes=100), 3, 3) == "rrrwww"


def test_a_kind_that_is_alone_goes_on() -> None:
    assert order(Schedule(burst_bytes=2), 0, 5) == "wwwww"


@pytest.mark.parametrize("value", [0, -1, 1 << 64])
@pytest.mark.parametrize("name", ["read_window_bytes", "write_window_bytes", "burst_bytes"])
def test_a_limit_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive number"):
        Schedule(**{name: value})


SCHEDULES = {
    "mixed": Schedule(),
    "windows": Schedule(read_window_bytes=4 * BLOCK_BYTES, write_window_bytes=BLOCK_BYTES),
    "bursts": Schedule(burst_bytes=3 * BLOCK_BYTES, write_window_bytes=2 * BLOCK_BYTES),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_read_does_not_wait_for_the_writes_before_it(
    real_engine: Engine, scratch: Path, schedule: Schedule
) -> None:
    real_engine.set_schedule(schedule)
    assert real_engine.schedule == schedule
    with (
        contextlib.closing(real_engine.create_file(scratch, 33 * MIB)) as file,
        HostArena(34 * MIB) as arena,
    ):
        data = pattern(1, 32 * MIB)  # 4,096 blocks
        write = real_engine.submit_write(file, 0, filled(arena, data))
        read = real_engine.submit_read(file, 32 * MIB, arena.carve(SECTOR))
        read.wait()
        assert not write.done()
        write.wait()
        assert contents(file, 0, 32 * MIB) == data


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_many_pieces_at_once(
    engine: Engine, scratch: Path, arena: HostArena, schedule: Schedule
) -> None:
    engine.set_schedule(schedule)
    data = pattern(2, 100 * SECTOR)
    sources = filled(arena, data)
    targets = arena.carve(len(data))
    places = [(index * 37 % 100 * SECTOR, index * SECTOR) for index in range(100)]
    with contextlib.closing(engine.create_file(scratch, len(data))) as file:
        pieces = [(offset, sources.sub(start, SECTOR)) for offset, start in places]
        for ticket in engine.submit_writes(file, pieces):  # more than may be in flight
            ticket.wait()
        pieces = [(offset, targets.sub(start, SECTOR)) for offset, start in places]
        tickets = engine.submit_reads(file, pieces)
        assert len(tickets) == 100
        engine.drain()
        assert all(ticket.done() for ticket in tickets)
        assert engine.submit_reads(file, []) == []
        for offset, start in places:
            assert contents(file, offset, SECTOR) == data[start : start + SECTOR]
    assert bytes(targets.view()) == data


def test_one_bad_piece_starts_none(engine: Engine, scratch: Path, arena: HostArena) -> None:
    with contextlib.closing(engine.create_file(scratch, 2 * SECTOR)) as file:
        spans = [filled(arena, pattern(index, SECTOR)) for index in range(2)]
        with pytest.raises(ValueError, match="not inside"):
            engine.submit_writes(file, [(0, spans[0]), (2 * SECTOR, spans[1])])
        assert engine.in_flight == 0
        assert contents(file, 0, SECTOR) == bytes(SECTOR)
