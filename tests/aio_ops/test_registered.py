"""What the io_uring engine registers with the kernel, and that it gives all of it back."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aio_ops import HostArena
from aio_ops.kernel_engines import IoUringEngine
from tests.aio_ops.disks import free_bytes
from tests.aio_ops.support import SECTOR, contents, filled, make_engine, pattern

SLOTS = 64  # files that a ring can have registered at once


@pytest.fixture
def ring() -> Iterator[IoUringEngine]:
    engine = make_engine("io_uring")
    assert isinstance(engine, IoUringEngine)
    with engine:
        yield engine


def pinned_kib() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmPin:"):
            return int(line.split()[1])
    raise AssertionError("no VmPin")


def register(ring: IoUringEngine, arena: HostArena, size_bytes: int) -> None:
    refusal = ring.register(arena.carve(size_bytes))
    if refusal is not None:
        pytest.skip(refusal)


def test_memory_that_is_registered_moves_the_same_bytes(
    ring: IoUringEngine, scratch: Path, arena: HostArena
) -> None:
    with contextlib.closing(ring.create_file(scratch, 8 * SECTOR)) as file:
        span = filled(arena, pattern(1, 8 * SECTOR))
        refusal = ring.register(span)
        if refusal is not None:
            pytest.skip(refusal)
        assert ring.register(span) is None  # once is enough
        ring.submit_write(file, 0, span).wait()
        assert contents(file, 0, 8 * SECTOR) == pattern(1, 8 * SECTOR)
        ring.submit_read(file, 4 * SECTOR, span.sub(0, 4 * SECTOR)).wait()
        assert bytes(span.view()) == pattern(1, 8 * SECTOR)[4 * SECTOR :] * 2
        ring.unregister(span)
        ring.unregister(span)
        ring.submit_write(file, 0, span).wait()


def test_memory_is_pinned_until_it_is_given_back(ring: IoUringEngine, arena: HostArena) -> None:
    before = pinned_kib()
    span = arena.carve(1 << 20)
    refusal = ring.register(span)
    if refusal is not None:
        pytest.skip(refusal)
    assert pinned_kib() >= before + 1024
    ring.unregister(span)
    assert pinned_kib() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_nothing_pinned(ring: IoUringEngine, arena: HostArena) -> None:
    before = pinned_kib()
    register(ring, arena, 1 << 20)
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        ring.unregister(arena.carve(SECTOR))  # does nothing here
        os.read(hold, 1)  # like a worker that outlives the engine, with the ring's descriptor
        os._exit(0)
    os.close(hold)
    ring.close()
    assert pinned_kib() == before
    os.close(release)
    assert os.waitpid(child, 0)[1] == 0


def test_a_registered_file_gives_its_space_back(
    ring: IoUringEngine, ext4: Path, arena: HostArena
) -> None:
    before = free_bytes(ext4)
    for number in range(3 * SLOTS):  # so every slot is used again
        with contextlib.closing(ring.create_file(ext4, SECTOR)) as file:
            span = filled(arena, pattern(number, SECTOR)) if number < 8 else arena.carve(SECTOR)
            ring.submit_write(file, 0, span).wait()
            assert contents(file, 0, SECTOR) == bytes(span.view())
        del file
    assert free_bytes(ext4) == before


def test_more_files_than_slots_all_work(
    ring: IoUringEngine, scratch: Path, arena: HostArena
) -> None:
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(contextlib.closing(ring.create_file(scratch, SECTOR)))
            for _ in range(SLOTS + 6)
        ]
        for number, file in enumerate(files):
            ring.submit_write(file, 0, filled(arena, pattern(number, SECTOR)))
        ring.drain()
        for number, file in enumerate(files):
            assert contents(file, 0, SECTOR) == pattern(number, SECTOR)


def test_a_registered_file_is_never_taken_for_another(
    ring: IoUringEngine, scratch: Path, arena: HostArena
) -> None:
    span = filled(arena, pattern(1, SECTOR))
    with contextlib.closing(ring.create_file(scratch, SECTOR)) as file:
        ring.submit_write(file, 0, span).wait()
        number = file.fileno()
        keeper = os.dup(number)
        victim = os.open(scratch / "victim", os.O_RDWR | os.O_CREAT)
        os.dup2(victim, number)  # closes the file underneath and puts another in its place
        span.view()[:] = pattern(2, SECTOR)
        ring.submit_write(file, 0, span).wait()
        assert os.fstat(victim).st_size == 0
        os.dup2(keeper, number)
        os.close(keeper)
        os.close(victim)
        assert contents(file, 0, SECTOR) == pattern(2, SECTOR)
