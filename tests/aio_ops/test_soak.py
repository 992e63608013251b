"""Every engine in turn, under faults, for a while: nothing may be left over and nothing wrong."""

import contextlib
import dataclasses
import gc
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aio_ops import Engine, HostArena, Span, SwapFile, Ticket, TransferError
from aio_ops.kernel_engines import IoUringEngine
from tests.aio_ops.support import SECTOR, contents, make_engine, pattern

KINDS = ("io_uring", "kernel_aio", "threads", "python")
EXTENT_BYTES = 5 * SECTOR
EXTENTS = 16
NOWHERE = Span(SECTOR, SECTOR, None)  # the kernel never maps the first pages
RSS_SLACK_BYTES = 48 << 20


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What this process holds of the machine."""

    descriptors: int
    threads: int
    locked_kib: int
    rss_bytes: int


def holdings() -> Holdings:
    gc.collect()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    kib = {name: int(status[name].split()[0]) for name in ("VmLck", "VmPin", "VmRSS")}
    return Holdings(
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=len(list(Path("/proc/self/task").iterdir())),
        locked_kib=kib["VmLck"] + kib["VmPin"],
        rss_bytes=kib["VmRSS"] << 10,
    )


class Session:
    """One engine's life with random transfers, right and wrong ones."""

    def __init__(self, engine: Engine, directory: Path, arena: HostArena, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.file = engine.create_file(directory, EXTENTS * EXTENT_BYTES, any_alignment=True)
        self.short_file = engine.create_file(directory, EXTENT_BYTES)
        os.ftruncate(self.short_file.fileno(), SECTOR)
        self.spans = [arena.carve(EXTENT_BYTES) for _ in range(EXTENTS)]
        self.expected = bytearray(EXTENTS * EXTENT_BYTES)
        self.writes: dict[int, Ticket] = {}
        self.failures = 0

    def step(self) -> None:
        actions: list[Callable[[int], None]] = [self.write] * 6 + [self.read] * 4
        actions += [self.fail_memory, self.fail_short, self.drop, self.register]
        self.random.choice(actions)(self.random.randrange(EXTENTS))

    def settle(self, extent: int) -> None:
        ticket = self.writes.pop(extent, None)
        if ticket is not None:
            ticket.wait()

    def part(self) -> tuple[int, int]:
        """Return a start and a size inside an extent, in whole sectors as often as not."""
        if self.random.random() < 0.5:
            return 0, EXTENT_BYTES
        start = self.random.randrange(EXTENT_BYTES)
        return start, self.random.randint(1, EXTENT_BYTES - start)

    def write(self, extent: int) -> None:
        self.settle(extent)
        start, size_bytes = self.part()
        at = extent * EXTENT_BYTES + start
        data = pattern(self.random.randrange(1000), size_bytes)
        self.expected[at : at + size_bytes] = data
        span = self.spans[extent].sub(start, size_bytes)
        span.view()[:] = data
        self.writes[extent] = self.engine.submit_write(self.file, at, span)

    def read(self, extent: int) -> None:
        self.settle(extent)
        start, size_bytes = self.part()
        at = extent * EXTENT_BYTES + start
        span = self.spans[extent].sub(start, size_bytes)
        span.view()[:] = bytes(size_bytes)
        self.engine.submit_read(self.file, at, span).wait()
        assert bytes(span.view()) == self.expected[at : at + size_bytes]

    def fail_memory(self, extent: int) -> None:
        with pytest.raises(TransferError):
            self.engine.submit_read(self.short_file, 0, NOWHERE).wait()
        self.failures += 1

    def fail_short(self, extent: int) -> None:
        self.settle(extent)
        ticket = self.engine.submit_read(self.short_file, 0, self.spans[extent])
        with pytest.raises(TransferError, match="the file ended early"):
            ticket.wait()
        self.failures += 1

    def drop(self, extent: int) -> None:
        """Start a transfer of memory and a file that nobody else holds."""
        with HostArena(EXTENT_BYTES) as arena:
            file = self.engine.create_file(self.file.path.parent, EXTENT_BYTES)
            self.engine.submit_write(file, 0, arena.carve(EXTENT_BYTES))
            file.close()

    def register(self, extent: int) -> None:
        if isinstance(self.engine, IoUringEngine):
            verb = self.random.choice([self.engine.register, self.engine.unregister])
            verb(self.spans[extent])

    def finish(self) -> None:
        self.engine.close()  # with writes in flight
        for extent in list(self.writes):
            self.settle(extent)
        assert contents(self.file, 0, len(self.expected)) == bytes(self.expected)
        self.file.close()
        self.short_file.close()


def live(kind: str, directory: Path, seed: int, stop: float) -> int:
    with contextlib.closing(make_engine(kind)) as engine, HostArena(1 << 20) as arena:
        session = Session(engine, directory, arena, seed)
        steps = 0
        while steps < 60 or (steps < 600 and time.monotonic() < stop):
            session.step()
            steps += 1
        session.finish()
        return session.failures


@pytest.mark.parametrize(
    "seconds", [30, pytest.param(600, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_nothing_is_left_after_a_soak(
    scratch: Path, seconds: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for kind in KINDS:  # what is made once and kept is made now
        live(kind, scratch, 0, 0)
    before = holdings()
    stop = time.monotonic() + seconds
    failures = seed = 0
    while time.monotonic() < stop:
        for kind in KINDS:
            seed += 1
            failures += live(kind, scratch, seed, stop)
    assert failures > 0
    patience = time.monotonic() + 30
    after = holdings()
    while after.threads > before.threads and time.monotonic() < patience:
        after = holdings()  # the kernel ends the workers of a ring a moment after it
    assert after.descriptors == before.descriptors
    assert after.threads == before.threads
    assert after.locked_kib <= before.locked_kib
    assert after.rss_bytes <= before.rss_bytes + RSS_SLACK_BYTES
    assert list(scratch.iterdir()) == []


def test_a_soak_would_notice(scratch: Path) -> None:
    before = holdings()
    with make_engine("threads"), SwapFile.create(scratch, SECTOR), HostArena(64 << 20) as arena:
        arena.carve(64 << 20).view()[:] = bytes([1]) * (64 << 20)
        during = holdings()
    assert during.descriptors > before.descriptors
    assert during.threads > before.threads
    assert during.rss_bytes > before.rss_bytes + RSS_SLACK_BYTES
