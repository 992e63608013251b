"""What every engine does: one suite for all of them and for SimulatedDisk."""

import contextlib
import dataclasses
import random
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aio_ops import Engine, HostArena, Schedule, Span, Ticket, TransferFile
from tests.aio_ops.disks import storage_bytes
from tests.aio_ops.support import BLOCK_BYTES, SECTOR, contents, filled, make_engine, pattern, put

SIZES = [SECTOR, BLOCK_BYTES, BLOCK_BYTES + SECTOR, 7 * BLOCK_BYTES, 1 << 20]


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_write_lands_in_the_file(
    engine: Engine, scratch: Path, arena: HostArena, size_bytes: int
) -> None:
    data = pattern(size_bytes, size_bytes)
    with contextlib.closing(engine.create_file(scratch, size_bytes + 2 * SECTOR)) as file:
        assert file.direct
        before = storage_bytes()
        ticket = engine.submit_write(file, SECTOR, filled(arena, data))
        assert ticket.size_bytes == size_bytes
        ticket.wait()
        assert ticket.moved_bytes == size_bytes
        if engine.name != "simulated":
            assert storage_bytes()[1] - before[1] >= size_bytes
        whole = contents(file, 0, size_bytes + 2 * SECTOR)
    assert whole == bytes(SECTOR) + data + bytes(SECTOR)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_read_fills_the_span_and_nothing_else(
    engine: Engine, scratch: Path, arena: HostArena, size_bytes: int
) -> None:
    data = pattern(size_bytes + 1, size_bytes)
    around = filled(arena, b"\x11" * (size_bytes + 2 * SECTOR))
    with contextlib.closing(engine.create_file(scratch, size_bytes + SECTOR)) as file:
        put(file, SECTOR, data)
        before = storage_bytes()
        ticket = engine.submit_read(file, SECTOR, around.sub(SECTOR, size_bytes))
        ticket.wait()
        ticket.wait()  # and again
        assert ticket.moved_bytes == size_bytes
        if engine.name != "simulated":
            assert storage_bytes()[0] - before[0] >= size_bytes
    assert bytes(around.view()) == b"\x11" * SECTOR + data + b"\x11" * SECTOR


def test_a_new_file_is_all_zeros(engine: Engine, scratch: Path, arena: HostArena) -> None:
    span = filled(arena, b"\xff" * (1 << 20))
    with contextlib.closing(engine.create_file(scratch, 1 << 20)) as file:
        engine.submit_read(file, 0, span).wait()
    assert not any(span.view())
    assert list(scratch.iterdir()) == []


def test_polling_alone_gets_a_transfer_done(
    engine: Engine, scratch: Path, arena: HostArena
) -> None:
    data = pattern(3, 4 * BLOCK_BYTES)
    with contextlib.closing(engine.create_file(scratch, len(data))) as file:
        tickets = [
            engine.submit_write(file, start, filled(arena, data[start : start + BLOCK_BYTES]))
            for start in range(0, len(data), BLOCK_BYTES)
        ]
        while not all(ticket.done() for ticket in tickets):
            pass  # the time limit of the suite bounds it
        assert engine.in_flight == 0
        assert [ticket.moved_bytes for ticket in tickets] == [BLOCK_BYTES] * 4
        assert contents(file, 0, len(data)) == data


def test_tickets_may_be_waited_for_in_any_order(
    engine: Engine, scratch: Path, arena: HostArena
) -> None:
    size_bytes = 3 * SECTOR
    with contextlib.closing(engine.create_file(scratch, 20 * size_bytes)) as file:
        put(file, 0, pattern(5, 20 * size_bytes))
        spans = [arena.carve(size_bytes) for _ in range(20)]
        tickets = [
            engine.submit_read(file, index * size_bytes, span) for index, span in enumerate(spans)
        ]
        for index in random.Random(1).sample(range(20), 20):
            tickets[index].wait()
            assert bytes(spans[index].view()) == contents(file, index * size_bytes, size_bytes)
        assert engine.in_flight == 0


def test_two_engines_and_two_files_never_meet(
    engine_kind: str, scratch: Path, arena: HostArena
) -> None:
    with make_engine(engine_kind) as one, make_engine(engine_kind) as two:
        files = [one.create_file(scratch, BLOCK_BYTES) for _ in range(2)]
        files.append(two.create_file(scratch, BLOCK_BYTES))
        data = [pattern(seed, BLOCK_BYTES) for seed in range(3)]
        for owner, file, mine in zip([one, one, two], files, data, strict=True):
            owner.submit_write(file, 0, filled(arena, mine))
        one.close()
        two.drain()
        assert [contents(file, 0, BLOCK_BYTES) for file in files] == data
        for file in files:
            file.close()


def test_closing_finishes_what_nobody_waited_for(
    engine: Engine, scratch: Path, arena: HostArena
) -> None:
    data = pattern(8, 32 * BLOCK_BYTES)
    with contextlib.closing(engine.create_file(scratch, len(data))) as file:
        kept: list[Ticket] = []
        for start in range(0, len(data), BLOCK_BYTES):
            span = filled(arena, data[start : start + BLOCK_BYTES])
            kept.append(engine.submit_write(file, start, span))
            del kept[5:]  # most are dropped at once
        engine.close()
        assert contents(file, 0, len(data)) == data
        assert all(ticket.done() for ticket in kept)
        for ticket in kept:
            ticket.wait()


def test_a_closed_engine_refuses(engine: Engine, scratch: Path, arena: HostArena) -> None:
    span = arena.carve(SECTOR)
    with contextlib.closing(engine.create_file(scratch, SECTOR)) as file:
        engine.close()
        engine.close()
        engine.drain()
        for verb in (engine.submit_read, engine.submit_write):
            with pytest.raises(RuntimeError, match="engine is closed"):
                verb(file, 0, span)
        with pytest.raises(RuntimeError, match="engine is closed"):
            engine.create_file(scratch, SECTOR)


def test_a_closed_file_is_refused(engine: Engine, scratch: Path, arena: HostArena) -> None:
    file = engine.create_file(scratch, SECTOR)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="swap file> is closed"):
        engine.submit_read(file, 0, arena.carve(SECTOR))
    assert engine.in_flight == 0


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(
    ("offset", "start", "size_bytes", "message"),
    [
        (0, 0, 0, "at least one byte, got 0"),
        (4 * SECTOR, 0, SECTOR, "bytes 16384 to 20480 are not inside .*, which has 16384 bytes"),
        (2 * SECTOR, 0, 3 * SECTOR, "bytes 8192 to 20480 are not inside"),
        (-SECTOR, 0, SECTOR, "bytes -4096 to 0 are not inside"),
        (512, 0, SECTOR, r"needs offset to be a multiple of 4096, got 512 \(512 too many\)"),
        (0, 0, SECTOR + 1, r"needs size_bytes to be a multiple of 4096, got 4097 \(1 too many\)"),
        (0, 64, SECTOR, r"needs address to be a multiple of 4096, got \d+ \(64 too many\)"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_moves(
    engine: Engine,
    scratch: Path,
    arena: HostArena,
    *,
    writes: bool,
    offset: int,
    start: int,
    size_bytes: int,
    message: str,
) -> None:
    memory = filled(arena, b"\x22" * 4 * SECTOR)
    with contextlib.closing(engine.create_file(scratch, 4 * SECTOR)) as file:
        verb = engine.submit_write if writes else engine.submit_read
        with pytest.raises(ValueError, match=message):
            verb(file, offset, memory.sub(start, size_bytes))
        assert engine.in_flight == 0
        assert not any(contents(file, 0, 4 * SECTOR))
    assert set(memory.view()) == {0x22}


def test_several_threads_may_share_an_engine(
    real_engine: Engine, scratch: Path, arena: HostArena
) -> None:
    size_bytes = 3 * SECTOR
    spans = [arena.carve(size_bytes) for _ in range(4)]
    wrong: list[str] = []
    with contextlib.closing(real_engine.create_file(scratch, 4 * size_bytes)) as file:

        def use(owner: int) -> None:
            for step in range(40):
                data = pattern(100 * owner + step, size_bytes)
                spans[owner].view()[:] = data
                real_engine.submit_write(file, owner * size_bytes, spans[owner]).wait()
                spans[owner].view()[:] = bytes(size_bytes)
                real_engine.submit_read(file, owner * size_bytes, spans[owner]).wait()
                if bytes(spans[owner].view()) != data:
                    wrong.append(f"thread {owner}, step {step}")
                if step % 7 == owner:
                    real_engine.drain()

        threads = [threading.Thread(target=use, args=(owner,)) for owner in range(4)]
        before = storage_bytes()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert storage_bytes()[1] - before[1] >= 4 * 40 * size_bytes
        for owner in range(4):
            assert contents(file, owner * size_bytes, size_bytes) == pattern(
                100 * owner + 39, size_bytes
            )


EXTENT_SECTORS = [1, 2, 3, 5, 1]
EXTENT_STARTS = [sum(EXTENT_SECTORS[:index]) * SECTOR for index in range(len(EXTENT_SECTORS))]
FILE_BYTES = sum(EXTENT_SECTORS) * SECTOR

extents = st.integers(0, len(EXTENT_SECTORS) - 1)
actions = st.one_of(
    st.tuples(st.just("write"), extents, st.integers(0, 255)),
    st.tuples(st.just("read"), extents, st.just(0)),
    st.tuples(st.sampled_from(["wait", "poll"]), extents, st.just(0)),
    st.tuples(st.just("drain"), st.just(0), st.just(0)),
)


@dataclasses.dataclass
class Mover:
    """A careful user of an engine: it waits for whatever its next transfer would overlap."""

    engine: Engine
    file: TransferFile
    arena: HostArena
    expected: bytearray = dataclasses.field(default_factory=lambda: bytearray(FILE_BYTES))
    reads: dict[int, list[tuple[Ticket, Span, bytes]]] = dataclasses.field(default_factory=dict)
    writes: dict[int, Ticket] = dataclasses.field(default_factory=dict)
    written: set[int] = dataclasses.field(default_factory=set)
    stored_bytes_read: int = 0
    moved_bytes: list[int] = dataclasses.field(default_factory=lambda: [0, 0])

    def act(self, action: str, extent: int, seed: int) -> None:
        start, size_bytes = EXTENT_STARTS[extent], EXTENT_SECTORS[extent] * SECTOR
        if action == "write":
            self.settle(extent)
            data = pattern(seed, size_bytes)
            self.expected[start : start + size_bytes] = data
            ticket = self.engine.submit_write(self.file, start, filled(self.arena, data))
            self.writes[extent] = ticket
            self.written.add(extent)
        elif action == "read":
            self.settle_write(extent)
            span = self.arena.carve(size_bytes)
            ticket = self.engine.submit_read(self.file, start, span)
            data = bytes(self.expected[start : start + size_bytes])
            # The file system answers reads of what was never written without its disk.
            self.stored_bytes_read += size_bytes if extent in self.written else 0
            self.reads.setdefault(extent, []).append((ticket, span, data))
        elif action == "wait":
            self.settle(extent)
        elif action == "poll":
            if extent in self.writes and self.writes[extent].done():
                assert (
                    contents(self.file, start, size_bytes)
                    == self.expected[start : start + size_bytes]
                )
        else:
            self.engine.drain()
            assert self.engine.in_flight == 0

    def settle_write(self, extent: int) -> None:
        if extent in self.writes:
            ticket = self.writes.pop(extent)
            ticket.wait()
            self.moved_bytes[1] += ticket.moved_bytes

    def settle(self, extent: int) -> None:
        self.settle_write(extent)
        for ticket, span, data in self.reads.pop(extent, []):
            ticket.wait()
            assert bytes(span.view()) == data
            self.moved_bytes[0] += ticket.moved_bytes


def check_interleaving(
    engine_kind: str,
    scratch: Path,
    steps: list[tuple[str, int, int]],
    queue_depth: int,
    schedule: Schedule,
) -> None:
    with (
        make_engine(engine_kind, queue_depth=queue_depth, block_bytes=SECTOR) as engine,
        HostArena(40 * max(EXTENT_SECTORS) * SECTOR) as arena,
        contextlib.closing(engine.create_file(scratch, FILE_BYTES)) as file,
    ):
        before = storage_bytes()
        mover = Mover(engine, file, arena)
        for index, step in enumerate(steps):
            if index == len(steps) // 2:
                engine.set_schedule(schedule)  # with transfers in flight
            mover.act(*step)
        for extent in range(len(EXTENT_SECTORS)):
            mover.settle(extent)
        assert engine.in_flight == 0
        asked = [
            sum(EXTENT_SECTORS[extent] * SECTOR for name, extent, _ in steps if name == verb)
            for verb in ("read", "write")
        ]
        assert mover.moved_bytes == asked
        if engine_kind != "simulated":
            after = storage_bytes()
            assert after[0] - before[0] >= mover.stored_bytes_read
            assert after[1] - before[1] >= asked[1]
        assert contents(file, 0, FILE_BYTES) == bytes(mover.expected)


limits = st.one_of(st.none(), st.integers(1, 6 * SECTOR))
schedules = st.builds(Schedule, limits, limits, limits)
interleavings = given(st.lists(actions, min_size=1, max_size=40), st.integers(1, 6), schedules)
quiet = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=50, **quiet)
@interleavings
def test_any_interleaving_equals_the_oracle(
    engine_kind: str,
    scratch: Path,
    steps: list[tuple[str, int, int]],
    queue_depth: int,
    schedule: Schedule,
) -> None:
    check_interleaving(engine_kind, scratch, steps, queue_depth, schedule)


@pytest.mark.full
@settings(max_examples=1000, **quiet)
@interleavings
def test_any_interleaving_equals_the_oracle_1000_times(
    engine_kind: str,
    scratch: Path,
    steps: list[tuple[str, int, int]],
    queue_depth: int,
    schedule: Schedule,
) -> None:
    check_interleaving(engine_kind, scratch, steps, queue_depth, schedule)
