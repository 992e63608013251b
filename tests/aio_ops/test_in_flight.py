"""Transfers in flight for certain: a frozen file system holds every write in the kernel."""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from aio_ops import Engine, HostArena, SwapFile
from tests.aio_ops.disks import frozen
from tests.aio_ops.support import (
    BLOCK_BYTES,
    SECTOR,
    contents,
    filled,
    make_engine,
    pattern,
    put,
    stored,
)


def test_a_transfer_in_flight_is_not_done(
    real_engine: Engine, ext4: Path, arena: HostArena
) -> None:
    data = pattern(1, 3 * BLOCK_BYTES)
    with contextlib.closing(real_engine.create_file(ext4, len(data))) as file:
        with frozen(ext4) as thaw:
            ticket = real_engine.submit_write(file, 0, filled(arena, data))
            assert not ticket.done()
            assert real_engine.in_flight == 1
            assert ticket.moved_bytes == 0
            for timeout_s in (0, 0.01, -1):
                with pytest.raises(TimeoutError, match=r"write of 24576 bytes at offset 0 of .*"):
                    ticket.wait(timeout_s)
            thaw()
            ticket.wait(60)
        assert ticket.done()
        assert real_engine.in_flight == 0
        assert contents(file, 0, len(data)) == data


def test_whoever_waits_for_a_stalled_engine_is_told(
    real_kind: str, ext4: Path, arena: HostArena, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aio_ops.watchdog")
    with (
        make_engine(real_kind, queue_depth=2) as engine,
        contextlib.closing(engine.create_file(ext4, 4 * BLOCK_BYTES)) as file,
    ):
        span = filled(arena, pattern(1, 2 * BLOCK_BYTES))
        engine.submit_write(file, 0, span).wait()
        engine.watch(0.1)
        assert not caplog.records
        with frozen(ext4) as thaw:
            ticket = engine.submit_write(file, 2 * BLOCK_BYTES, span)
            with pytest.raises(TimeoutError):
                ticket.wait(1)
            told = [record.getMessage() for record in caplog.records]
            assert 1 <= len(told) <= 10
            assert f"the engine {real_kind} has completed nothing for 0." in told[0]
            assert "1 transfers are in flight" in told[0]
            assert f"it moved {2 * BLOCK_BYTES} bytes before" in told[0]
            thaw()
            ticket.wait()
        caplog.clear()
        engine.submit_read(file, 0, span).wait()
        engine.drain()
        assert not caplog.records


def test_a_read_overtakes_a_write_that_is_held(
    real_engine: Engine, ext4: Path, scratch: Path, arena: HostArena
) -> None:
    with (
        contextlib.closing(real_engine.create_file(ext4, SECTOR)) as held_file,
        contextlib.closing(real_engine.create_file(scratch, SECTOR)) as free_file,
        frozen(ext4) as thaw,
    ):
        put(free_file, 0, pattern(2, SECTOR))
        held = real_engine.submit_write(held_file, 0, filled(arena, pattern(1, SECTOR)))
        span = arena.carve(SECTOR)
        real_engine.submit_read(free_file, 0, span).wait()
        assert bytes(span.view()) == pattern(2, SECTOR)
        assert not held.done()
        thaw()
        held.wait()


def test_a_dropped_ticket_leaves_its_memory_and_file_to_the_engine(
    real_engine: Engine, ext4: Path
) -> None:
    data = pattern(4, 5 * BLOCK_BYTES)
    file = real_engine.create_file(ext4, len(data))
    look = os.dup(file.fileno())
    number = file.fileno()
    arena = HostArena(len(data))
    span = filled(arena, data)
    mapping = weakref.ref(span.owner)
    with frozen(ext4) as thaw:
        real_engine.submit_write(file, 0, span)
        arena.close()
        file.close()
        del span, arena, file
        gc.collect()
        assert mapping() is not None
        os.fstat(number)  # still open, so the number cannot become another file
        thaw()
        real_engine.drain()
    assert mapping() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert stored(look, 0, len(data)) == data
    os.close(look)


def test_a_ticket_that_is_kept_does_not_keep_the_memory(real_engine: Engine, ext4: Path) -> None:
    with contextlib.closing(real_engine.create_file(ext4, SECTOR)) as file:
        arena = HostArena(SECTOR)
        span = filled(arena, pattern(1, SECTOR))
        mapping = weakref.ref(span.owner)
        ticket = real_engine.submit_write(file, 0, span)
        ticket.wait()
        arena.close()
        del arena, span
        gc.collect()
        assert mapping() is None
        assert ticket.moved_bytes == SECTOR


def _drain(engine: Engine) -> None:
    engine.drain()


def _close(engine: Engine) -> None:
    engine.close()


@pytest.mark.parametrize("verb", [_drain, _close])
def test_drain_and_close_wait(
    real_engine: Engine, ext4: Path, arena: HostArena, verb: Callable[[Engine], None]
) -> None:
    events: list[str] = []
    with contextlib.closing(real_engine.create_file(ext4, 4 * BLOCK_BYTES)) as file:
        with frozen(ext4) as thaw:
            span = filled(arena, pattern(1, 4 * BLOCK_BYTES))
            ticket = real_engine.submit_write(file, 0, span)
            started = threading.Event()

            def wait() -> None:
                started.set()
                verb(real_engine)
                events.append(f"returned, done: {ticket.done()}")

            thread = threading.Thread(target=wait)
            thread.start()
            started.wait()
            assert not ticket.done()  # and the interpreter lock is free while the other waits
            events.append("thawed")
            thaw()
            thread.join()
        assert events == ["thawed", "returned, done: True"]
        assert contents(file, 0, 4 * BLOCK_BYTES) == pattern(1, 4 * BLOCK_BYTES)


def test_a_full_queue_makes_submit_wait(real_kind: str, ext4: Path, arena: HostArena) -> None:
    events: list[str] = []
    with (
        make_engine(real_kind, queue_depth=2) as engine,
        contextlib.closing(engine.create_file(ext4, 3 * SECTOR)) as file,
    ):
        spans = [filled(arena, pattern(index, SECTOR)) for index in range(3)]
        with frozen(ext4) as thaw:
            for index in range(2):
                engine.submit_write(file, index * SECTOR, spans[index])
            started = threading.Event()

            def submit() -> None:
                started.set()
                engine.submit_write(file, 2 * SECTOR, spans[2])
                events.append("submitted")

            thread = threading.Thread(target=submit)
            thread.start()
            started.wait()
            assert engine.in_flight == 2
            events.append("thawed")
            thaw()
            thread.join()
            engine.drain()
        assert events == ["thawed", "submitted"]
        assert contents(file, 0, 3 * SECTOR) == b"".join(pattern(i, SECTOR) for i in range(3))


class _InterruptedError(Exception):
    pass


def interrupt_in(wait: Callable[[], None]) -> None:
    """Send a signal from another thread once this one is inside `wait`, which must then raise."""
    main_thread = threading.get_ident()
    ready = threading.Event()

    def send() -> None:
        ready.wait()
        signal.pthread_kill(main_thread, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the sender runs only once `wait` lets the interpreter lock go
    try:
        with pytest.raises(_InterruptedError):
            ready.set()
            wait()
    finally:
        sys.setswitchinterval(interval_s)
        sender.join()


def test_a_long_wait_can_be_interrupted(real_engine: Engine, ext4: Path, arena: HostArena) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise _InterruptedError

    with contextlib.closing(real_engine.create_file(ext4, SECTOR)) as file:
        span = filled(arena, pattern(1, SECTOR))
        before = signal.signal(signal.SIGUSR1, interrupt)
        try:
            with frozen(ext4) as thaw:
                ticket = real_engine.submit_write(file, 0, span)
                for wait in (ticket.wait, real_engine.drain, real_engine.close):
                    interrupt_in(wait)
                    assert not ticket.done()
                thaw()
        finally:
            signal.signal(signal.SIGUSR1, before)
        real_engine.close()  # the interrupted one is taken up again
        ticket.wait()
        assert contents(file, 0, SECTOR) == pattern(1, SECTOR)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_cannot_use_the_engine_nor_harm_it(
    real_engine: Engine, ext4: Path, arena: HostArena
) -> None:
    data = pattern(6, 3 * BLOCK_BYTES)
    with contextlib.closing(real_engine.create_file(ext4, len(data))) as file:
        span = filled(arena, data)
        with frozen(ext4) as thaw:
            ticket = real_engine.submit_write(file, 0, span)
            child = os.fork()
            if child == 0:
                refusals = 0
                for call in (
                    lambda: real_engine.submit_write(file, 0, span),
                    lambda: real_engine.in_flight,
                    lambda: real_engine.create_file(ext4, SECTOR),
                    real_engine.drain,
                    ticket.done,
                    ticket.wait,
                ):
                    with contextlib.suppress(RuntimeError):
                        call()
                        os._exit(100)
                    refusals += 1
                real_engine.close()  # does nothing, and does not wait for threads that are not here
                core = real_engine.__dict__.pop("_core", None)
                del core  # runs the native destructor
                gc.collect()
                os._exit(refusals)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
            assert not ticket.done()
            thaw()
            ticket.wait()
        assert contents(file, 0, len(data)) == data


@pytest.mark.parametrize("native_kind", ["io_uring", "kernel_aio", "threads"])
@pytest.mark.parametrize("memory_too", [True, False])
def test_an_engine_that_becomes_garbage_drains_before_memory_goes(
    ext4: Path, native_kind: str, *, memory_too: bool
) -> None:
    data = pattern(7, 4 * BLOCK_BYTES)
    file = SwapFile.create(ext4, len(data))
    arena = HostArena(len(data))
    span = filled(arena, data)
    mapping = weakref.ref(span.owner)
    collecting = threading.Event()

    def on_collection(phase: str, info: dict[str, int]) -> None:
        collecting.set()

    with frozen(ext4) as thaw:

        def thaw_later() -> None:
            collecting.wait()
            thaw()

        thread = threading.Thread(target=thaw_later)
        thread.start()
        gc.disable()
        gc.callbacks.append(on_collection)
        try:
            engine = make_engine(native_kind)
            ticket = engine.submit_write(file, 0, span)
            garbage: list[object] = [engine, *([arena, span, ticket] if memory_too else [])]
            garbage.append(garbage)
            del engine, arena, span, ticket, garbage
            assert mapping() is not None
            gc.collect()  # a drain after the memory is unmapped would write nothing
        finally:
            gc.callbacks.remove(on_collection)
            gc.enable()
            collecting.set()
            thread.join()
    assert mapping() is None
    assert contents(file, 0, len(data)) == data
    file.close()
