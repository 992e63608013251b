"""One measurement: a setting moves bytes between a scratch file and memory for a short time."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from aio_ops.engine import Engine, open_engine
from aio_ops.kernel_engines import IoUringEngine
from aio_ops.memory import DeviceSpan, HostArena, Span
from aio_ops.schedule import Schedule
from aio_ops.swapfile import SwapFile
from aio_ops.transfer import Ticket, TransferFile
from aio_ops.tune.settings import LEAST_POOL_BYTES, MOST_POOL_BYTES, Setting, Workload

_NOISE_BYTES = 1 << 20
_POOL_S = 0.1
_TRANSFERS = 16  # of a pool, unless blocks are larger
_SpanT = TypeVar("_SpanT", Span, DeviceSpan)
_SpanIn_contra = TypeVar("_SpanIn_contra", Span, DeviceSpan, contravariant=True)


class Mover(Protocol[_SpanIn_contra]):
    """Whatever moves spans: an engine, or a mover of device memory."""

    def submit_read(self, file: TransferFile, offset: int, span: _SpanIn_contra) -> Ticket:
        """Start a read."""

    def submit_write(self, file: TransferFile, offset: int, span: _SpanIn_contra) -> Ticket:
        """Start a write."""


class WritesSpentError(Exception):
    """No more may be written: the limit that the user set is reached."""


class Allowance:
    """How many bytes may still be written, for all directories together."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.written_bytes = 0
        self._limit_bytes = most_bytes
        self._lock = threading.Lock()

    def stop_at(self, share: float, most_bytes: int | None = None) -> int:
        """Let what follows write a share of what is left below `most_bytes`; return that stop."""
        with self._lock:
            most_bytes = self.most_bytes if most_bytes is None else most_bytes
            left_bytes = max(most_bytes - self.written_bytes, 0)
            self._limit_bytes = self.written_bytes + int(share * left_bytes)
            return self._limit_bytes

    @property
    def left_bytes(self) -> int:
        """What may still be written until the present stop."""
        return max(self._limit_bytes - self.written_bytes, 0)

    def take(self, size_bytes: int) -> bool:
        """Count bytes that are about to be written, or say that they may not be."""
        with self._lock:
            if self.written_bytes + size_bytes > self._limit_bytes:
                return False
            self.written_bytes += size_bytes
            return True

    def require(self, size_bytes: int) -> None:
        """Raise unless so many bytes may still be written."""
        if self.written_bytes + size_bytes > self._limit_bytes:
            raise WritesSpentError


@dataclass(frozen=True, slots=True)
class Sample:
    """What one measurement moved, and how long each transfer took to be usable in its order."""

    read_bytes: int
    written_bytes: int
    seconds: float
    latencies_s: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Bytes a second, both ways together."""
        return (self.read_bytes + self.written_bytes) / self.seconds


class Bench:
    """A scratch file without a name and the memory that is moved, used for every setting alike.

    The first half of the file is written once, so that reads reach the disk; later writes go to
    the second half.
    """

    def __init__(self, directory: Path, half_bytes: int, allowance: Allowance) -> None:
        self.directory = directory
        self.half_bytes = half_bytes
        self.allowance = allowance
        self._closing = ExitStack()
        self._kept: dict[Setting, Engine] = {}
        self._refusals: dict[int, str | None] = {}
        with self._closing:
            self.file = self._closing.enter_context(SwapFile.create(directory, 2 * half_bytes))
            arena = self._closing.enter_context(HostArena(MOST_POOL_BYTES))
            self._closing = self._closing.pop_all()
        self.direct = self.file.direct
        self.pool = arena.carve(MOST_POOL_BYTES)
        noise, view = os.urandom(_NOISE_BYTES), self.pool.view()
        for start in range(0, MOST_POOL_BYTES, _NOISE_BYTES):
            view[start : start + _NOISE_BYTES] = noise
        self.fill_rate = 0.0
        self._position_bytes = dict.fromkeys((False, True), 0)

    def fill(self, engine_name: str) -> None:
        """Write the half that is read, and see how fast that is."""
        self.allowance.require(self.half_bytes)
        self.allowance.take(self.half_bytes)
        size_bytes = min(4 << 20, self.half_bytes)
        spans = self.spans(size_bytes)
        start = time.perf_counter()
        with open_engine(engine_name) as engine:  # not "auto": that wants a file of its own
            for offset in range(0, self.half_bytes, size_bytes * len(spans)):
                offsets = range(offset, self.half_bytes, size_bytes)
                pieces = list(zip(offsets, spans, strict=False))
                for ticket in engine.submit_writes(self.file, pieces):
                    ticket.wait()
        self.fill_rate = self.half_bytes / (time.perf_counter() - start)
        while self.pool.size_bytes > self.fill_rate * _POOL_S and self.shrink_pool():
            pass

    def shrink_pool(self) -> bool:
        """Keep half as much in flight: what a slow disk moves in a short time, or may be written.

        Returns whether it could be smaller.
        """
        if self.pool.size_bytes <= LEAST_POOL_BYTES:
            return False
        self.pool = self.pool.sub(0, self.pool.size_bytes // 2)
        return True

    def measure(self, setting: Setting, workload: Workload, seconds: float) -> Sample:
        """Move bytes for so long; engines are opened, and some closed, outside the time."""
        return self._with_engine(setting, workload, self._transfers(setting), seconds)

    def latency(self, setting: Setting, workload: Workload, seconds: float) -> Sample:
        """Move single blocks, `depth` at once, and no more."""
        spans = self.spans(setting.block_bytes)[: setting.depth]
        return self._with_engine(setting, workload, spans, seconds)

    def refusal(self, setting: Setting) -> str | None:
        """Return why the engine of a setting cannot be opened, or None; rings alone are tried."""
        if setting.engine != "io_uring":
            return None
        depth = setting.queue_depth
        if depth not in self._refusals:
            self._refusals[depth] = None
            try:
                open_setting(setting).close()
            except OSError as error:
                self._refusals[depth] = error.strerror or str(error)
        return self._refusals[depth]

    def sustain(
        self, setting: Setting, seconds: float, watch: Callable[[float, float], None]
    ) -> list[tuple[float, float, int]]:
        """Write on and on; return (start, end, bytes) of each quarter second.

        `watch` is told the time so far and the rate of that quarter.
        """
        pieces: list[tuple[float, float, int]] = []
        spans = self._transfers(setting)
        begin = time.perf_counter()
        while (start := time.perf_counter() - begin) < seconds:
            try:
                sample = self._with_engine(setting, Workload.WRITE, spans, 0.25)
            except WritesSpentError:
                break
            pieces.append((start, start + sample.seconds, sample.written_bytes))
            watch(pieces[-1][1], sample.rate)
        return pieces

    def spans(self, size_bytes: int) -> list[Span]:
        """Return the pool in pieces."""
        count = self.pool.size_bytes // size_bytes
        return [self.pool.sub(index * size_bytes, size_bytes) for index in range(count)]

    def _transfers(self, setting: Setting) -> list[Span]:
        """Return spans as large as records are, which the engine cuts into blocks."""
        return self.spans(max(setting.block_bytes, self.pool.size_bytes // _TRANSFERS))

    def forget_engines(self) -> None:
        """Close the engines that were kept, all at once."""
        kept, self._kept = list(self._kept.values()), {}
        if kept:
            with ThreadPoolExecutor(len(kept)) as threads:
                list(threads.map(lambda engine: engine.close(), kept))

    def close(self) -> None:
        """Give file and memory back."""
        self.forget_engines()
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _with_engine(
        self, setting: Setting, workload: Workload, spans: list[Span], seconds: float
    ) -> Sample:
        if workload.writes:
            moved_bytes = sum(span.size_bytes for span in spans)
            self.allowance.require(int(moved_bytes * workload.written_share))
        if setting.engine == "kernel_aio":  # closing one waits for the kernel, a long time
            engine = self._kept_engine(setting.configured)
            engine.set_schedule(self._schedule_of(setting, workload))
            return self.run(engine, spans, workload, seconds)
        with open_setting(setting) as engine:
            if setting.registered and isinstance(engine, IoUringEngine):
                refusal = engine.register(self.pool)
                if refusal is not None:
                    raise OSError(refusal)
            engine.set_schedule(self._schedule_of(setting, workload))
            return self.run(engine, spans, workload, seconds)

    def _schedule_of(self, setting: Setting, workload: Workload) -> Schedule:
        bursts = setting.alternates and workload is Workload.MIX
        return Schedule(burst_bytes=self.pool.size_bytes // 4 if bursts else None)

    def _kept_engine(self, setting: Setting) -> Engine:
        if setting not in self._kept:
            try:
                self._kept[setting] = open_setting(setting)
            except OSError:  # the kernel has no more events for those that are kept
                self.forget_engines()
                self._kept[setting] = open_setting(setting)
        return self._kept[setting]

    def run(
        self, mover: Mover[_SpanT], spans: list[_SpanT], workload: Workload, seconds: float
    ) -> Sample:
        """Keep every span in flight for so long, and finish what is under way."""
        return _Run(self, mover, workload).go(spans, seconds)

    def start(self, mover: Mover[_SpanT], span: _SpanT, *, writes: bool) -> Ticket:
        """Start a transfer at the next place in the half for its kind."""
        offset = self._position_bytes[writes]
        if offset + span.size_bytes > self.half_bytes:
            offset = 0
        self._position_bytes[writes] = offset + span.size_bytes
        if writes:
            return mover.submit_write(self.file, self.half_bytes + offset, span)
        return mover.submit_read(self.file, offset, span)


class _Run(Generic[_SpanT]):
    """One measurement under way."""

    def __init__(self, bench: Bench, mover: Mover[_SpanT], workload: Workload) -> None:
        self._bench = bench
        self._mover: Mover[_SpanT] = mover
        self._workload = workload
        self._turn = 0
        self._under_way: deque[tuple[Ticket, _SpanT, bool, float]] = deque()

    def go(self, spans: list[_SpanT], seconds: float) -> Sample:
        moved_bytes = dict.fromkeys((False, True), 0)
        latencies: list[float] = []
        start = now = time.perf_counter()
        for span in spans:
            self._submit(span)
        while self._under_way:
            ticket, span, writes, begin = self._under_way.popleft()
            ticket.wait()
            now = time.perf_counter()
            latencies.append(now - begin)
            moved_bytes[writes] += span.size_bytes
            if now - start < seconds:
                self._submit(span)
        return Sample(moved_bytes[False], moved_bytes[True], now - start, tuple(latencies))

    def _submit(self, span: _SpanT) -> None:
        mixed = self._workload is Workload.MIX
        writes = self._turn % 2 == 1 if mixed else self._workload is Workload.WRITE
        if writes and not self._bench.allowance.take(span.size_bytes):
            return
        self._turn += 1
        begin = time.perf_counter()
        ticket = self._bench.start(self._mover, span, writes=writes)
        self._under_way.append((ticket, span, writes, begin))


def open_setting(setting: Setting) -> Engine:
    """Open the engine of a setting."""
    return open_engine(
        setting.engine,
        thread_count=setting.thread_count,
        block_bytes=setting.block_bytes,
        queue_depth=setting.queue_depth,
    )
