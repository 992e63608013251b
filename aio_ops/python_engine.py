"""The engine of last resort: positioned reads and writes on a pool of Python threads."""

import errno
import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from aio_ops.engine import Engine
from aio_ops.memory import Span, align_up
from aio_ops.schedule import Chooser, Schedule
from aio_ops.transfer import Operation, Outcome, Ticket, Transfer, TransferFile
from aio_ops.watchdog import STALL_WARNING_S, Observed, warn_of_stall

_AGAIN_LIMIT = 1000
_SIGNAL_INTERVAL_S = 0.1
_ENDED_EARLY = "the file ended early"

MoveOnce = Callable[[int, memoryview, int], int]


@dataclass(frozen=True, slots=True)
class Block:
    """One queue entry of a transfer."""

    descriptor: int
    offset: int
    view: memoryview
    alignment_bytes: int


def move_block(block: Block, move_once: MoveOnce) -> Outcome:
    """Move a whole block, however many calls the kernel needs for it.

    Direct I/O can only go on from a sector boundary, so the rest of a short transfer starts at the
    last whole sector. A call that does not even move one sector has met the end of the file.
    """
    size_bytes = len(block.view)
    position = moved_bytes = again_count = 0
    while position < size_bytes:
        try:
            result = move_once(block.descriptor, block.view[position:], block.offset + position)
        except BlockingIOError:
            again_count += 1
            if again_count > _AGAIN_LIMIT:
                return Outcome(moved_bytes, errno.EAGAIN)
            os.sched_yield()
            continue
        except OSError as error:
            return Outcome(moved_bytes, error.errno or errno.EIO)
        again_count = 0
        moved_bytes = max(moved_bytes, position + result)
        whole = position + result == size_bytes
        advance = result if whole else result - result % block.alignment_bytes
        if advance == 0:
            return Outcome(moved_bytes, errno.EIO, _ENDED_EARLY)
        position += advance
    return Outcome(size_bytes)


def _read_once(descriptor: int, view: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [view], offset)


def _write_once(descriptor: int, view: memoryview, offset: int) -> int:
    return os.pwritev(descriptor, [view], offset)


def _cut(offset: int, file: TransferFile, span: Span, block_bytes: int) -> list[Block]:
    """Return the blocks of a transfer: of its ragged edges, if it has any, and of its middle."""
    alignment_bytes = file.alignment_bytes if file.direct else 1
    block_bytes = align_up(block_bytes, alignment_bytes)
    middle = range(span.size_bytes)
    edge_descriptor = file.edge_fileno()
    if edge_descriptor >= 0:
        middle = aligned_middle(offset, span.size_bytes, span.address, alignment_bytes)
    view = span.view()
    parts = (
        (range(middle.start), edge_descriptor, 1),
        (middle, file.fileno(), alignment_bytes),
        (range(middle.stop, span.size_bytes), edge_descriptor, 1),
    )
    return [
        Block(
            descriptor,
            offset + start,
            view[start : min(start + block_bytes, part.stop)],
            part_alignment_bytes,
        )
        for part, descriptor, part_alignment_bytes in parts
        for start in range(part.start, part.stop, block_bytes)
    ]


def aligned_middle(offset: int, size_bytes: int, address: int, alignment_bytes: int) -> range:
    """Return the bytes of a transfer that can be direct: all those in whole sectors, or none."""
    first = align_up(offset, alignment_bytes) - offset
    last = (offset + size_bytes) // alignment_bytes * alignment_bytes - offset
    in_step = (address - offset) % alignment_bytes == 0
    return range(first, last) if in_step and first < last else range(0)


class _Progress:
    """The blocks of a transfer: those that no thread has taken, and what came of the others."""

    @property
    def next_bytes(self) -> int:
        """The size of the block that is taken next."""
        return len(self._blocks[0].view)

    @property
    def all_taken(self) -> bool:
        return not self._blocks

    def __init__(self, transfer: Transfer, blocks: list[Block], move_once: MoveOnce) -> None:
        self.transfer = transfer
        self.move_once = move_once
        self.blocks_left = len(blocks)
        self._blocks = deque(blocks)
        self._moved_bytes = 0
        self._first_failure: Outcome | None = None

    def take_block(self) -> Block:
        return self._blocks.popleft()

    def add(self, outcome: Outcome) -> None:
        self.blocks_left -= 1
        self._moved_bytes += outcome.moved_bytes
        if outcome.error_number and self._first_failure is None:
            self._first_failure = outcome

    def total(self) -> Outcome:
        if self._first_failure is None:
            return Outcome(self._moved_bytes)
        return replace(self._first_failure, moved_bytes=self._moved_bytes)


class PythonEngine(Engine):
    """Works wherever Python does; the interpreter lock is released while the kernel moves bytes."""

    name = "python"

    def __init__(
        self, thread_count: int, block_bytes: int, queue_depth: int, reason: str = ""
    ) -> None:
        super().__init__(thread_count * block_bytes)
        self.reason = reason
        self._thread_count = thread_count
        self._block_bytes = block_bytes
        self._queue_depth = queue_depth
        self._changed = threading.Condition()  # guards what follows and every _Progress
        self._active: set[_Progress] = set()
        self._places_used = 0  # of the queue depth, by those active that are no further pieces
        self._waiting: dict[Operation, deque[_Progress]] = {kind: deque() for kind in Operation}
        self._chooser = Chooser(self._schedule)
        self._held_back = False  # a thread left what waits alone until something else is over
        self._blocks_taken = self._moved_bytes = 0
        self._busy_s = self._busy_since = self._progress_at = 0.0
        self._stall_s = self._warn_from_s = STALL_WARNING_S
        self._pool = ThreadPoolExecutor(thread_count, thread_name_prefix="aio_ops")
        self._start_threads()

    def watch(self, stall_s: float) -> None:
        """Warn those who wait whenever nothing has completed for `stall_s` seconds."""
        self._stall_s = self._warn_from_s = stall_s

    def _look(self) -> None:
        """Warn of a stall; the lock is held."""
        now = time.monotonic()
        since_progress_s = now - self._progress_at if self._active else 0.0
        if since_progress_s < self._stall_s:
            self._warn_from_s = self._stall_s
        elif since_progress_s >= self._warn_from_s:
            self._warn_from_s = since_progress_s + self._stall_s
            busy_s = self._busy_s + now - self._busy_since
            taken = (len(self._active), self._blocks_taken, self._moved_bytes)
            warn_of_stall(self.name, Observed(*taken, busy_s, since_progress_s))

    @property
    def in_flight(self) -> int:
        """The number of transfers that are not done."""
        self._require_same_process()
        return len(self._active)

    def drain(self) -> None:
        """Wait until nothing is in flight; failures stay with their tickets."""
        self._require_same_process()
        with self._changed:
            self._wait_until(lambda: not self._active)

    def _start_threads(self) -> None:
        """Start every thread now, so that a submit cannot fail for want of one."""
        everyone = threading.Barrier(self._thread_count + 1)
        try:
            for _ in range(self._thread_count):
                self._pool.submit(everyone.wait)
            everyone.wait()
        except BaseException:
            everyone.abort()
            self._pool.shutdown(wait=True)
            raise

    def set_schedule(self, schedule: Schedule) -> None:
        """Send reads and writes to the kernel in another order from here on."""
        super().set_schedule(schedule)
        with self._changed:
            self._chooser.set(schedule)
            self._wake_threads()

    def _start(
        self, transfers: list[Transfer], file: TransferFile, pieces: Sequence[tuple[int, Span]]
    ) -> list[Ticket]:
        for transfer, (offset, span) in zip(transfers, pieces, strict=True):
            blocks = _cut(offset, file, span, self._block_bytes)
            move_once = _read_once if transfer.operation is Operation.READ else _write_once
            self._queue(_Progress(transfer, blocks, move_once), len(blocks))
        return [
            Ticket(transfer, functools.partial(self._advance, transfer)) for transfer in transfers
        ]

    def _queue(self, progress: _Progress, block_count: int) -> None:
        with self._changed:
            if not progress.transfer.further:
                self._wait_until(lambda: self._places_used < self._queue_depth)
            self._require_usable()
            if not self._active:
                self._busy_since = self._progress_at = time.monotonic()
            self._active.add(progress)
            self._places_used += not progress.transfer.further
            self._waiting[progress.transfer.operation].append(progress)
            for _ in range(min(block_count, self._thread_count)):
                self._pool.submit(self._move_blocks)

    def _wake_threads(self) -> None:
        """Look again at what was held back; the lock is held."""
        if self._held_back:
            self._held_back = False
            for _ in range(self._thread_count):
                self._pool.submit(self._move_blocks)

    def _take(self) -> tuple[_Progress, Block] | None:
        """Take the block that goes next, or None if none may; the lock is held."""
        reads, writes = self._waiting[Operation.READ], self._waiting[Operation.WRITE]
        sizes = [queue[0].next_bytes if queue else 0 for queue in (reads, writes)]
        operation = self._chooser.choose(*sizes)
        if operation is None:
            self._held_back = self._held_back or any(sizes)
            return None
        queue = self._waiting[operation]
        progress = queue[0]
        block = progress.take_block()
        if progress.all_taken:
            queue.popleft()
        self._chooser.taken(operation, len(block.view))
        self._blocks_taken += 1
        return progress, block

    def _move_blocks(self) -> None:
        """Move blocks until this thread may take no more."""
        while True:
            with self._changed:
                taken = self._take()
                if taken is None:
                    return
            progress, block = taken
            size_bytes = len(block.view)
            try:
                outcome = move_block(block, progress.move_once)
            except BaseException as error:  # noqa: BLE001  the ticket reports it, whatever it is
                outcome = Outcome(0, errno.EIO, repr(error), error)
            del block, taken  # they refer to memory that the ticket is about to let go
            self._finish(progress, outcome, size_bytes)
            del progress

    def _finish(self, progress: _Progress, outcome: Outcome, size_bytes: int) -> None:
        with self._changed:
            progress.add(outcome)
            self._chooser.over(progress.transfer.operation, size_bytes)
            self._blocks_taken -= 1
            self._moved_bytes += outcome.moved_bytes
            self._progress_at = time.monotonic()
            if progress.blocks_left == 0:
                progress.transfer.finish(progress.total())
                self._active.discard(progress)
                self._places_used -= not progress.transfer.further
                if not self._active:
                    self._busy_s += self._progress_at - self._busy_since
                self._changed.notify_all()
            self._wake_threads()

    def _advance(self, transfer: Transfer, timeout_s: float | None) -> None:
        self._require_same_process()
        with self._changed:
            self._wait_until(lambda: transfer.outcome is not None, timeout_s)

    def _wait_until(self, holds: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait in slices: a signal that arrives just before a lock blocks is only seen after it."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._changed.wait_for(
            holds, min(_SIGNAL_INTERVAL_S, deadline - time.monotonic())
        ):
            self._look()
            if time.monotonic() >= deadline:
                return

    def _stop(self) -> None:
        self._pool.shutdown(wait=True)
