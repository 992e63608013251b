"""What a handle has to do for one call: transfers, and what follows once their bytes have moved.

[Note: bounce slots]
Memory that the kernel cannot move directly goes through slots: aligned host memory of a fixed
amount, made at the first need. Such memory is on a device, or lies out of step with the sectors of
its file. A write copies into slots while it is started, and waits for the oldest chunk in flight
when none is free; so its tensor may change as soon as the call returns. A read starts as many
chunks as there are free slots; whoever waits for it, or needs a slot, copies out what has arrived
and starts the rest, so that copying one chunk overlaps reading the next ones.
"""

import contextlib
import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from aio_ops.engine import Engine
from aio_ops.handles.files import HandleFile
from aio_ops.handles.tensors import HostBytes, TensorBytes
from aio_ops.linux import libc
from aio_ops.memory import HostArena, Span, align_up
from aio_ops.pinned import PinnedArena
from aio_ops.python_engine import Block, move_block
from aio_ops.transfer import Operation, Ticket, Transfer

_PAGE_BYTES = 4096
_SLOT_COUNT = 4
_COMPARE_BYTES = 1 << 20


class Request(NamedTuple):
    """What one call wants moved."""

    operation: Operation
    file: HandleFile
    offset: int
    memory: TensorBytes


class Job(Protocol):
    """A call of a handle that is not over."""

    def finish(self) -> None:
        """Wait until it is over, or raise what came of it; may be called again if interrupted."""

    def moved(self) -> bool:
        """Return whether its transfers are over: if not, what `finish` raised is an interrupt."""


class EmptyJob:
    """A call for no bytes."""

    def finish(self) -> None:
        """Return at once."""

    def moved(self) -> bool:
        """Return that nothing is in flight."""
        return True


class DirectJob:
    """One transfer between a file and the tensor itself."""

    def __init__(self, engine: Engine, request: Request, span: Span) -> None:
        self._ticket = submit(engine, request, request.offset, span)

    def finish(self) -> None:
        """Wait for the transfer."""
        self._ticket.wait()

    def moved(self) -> bool:
        """Return whether the transfer is over."""
        return self._ticket.done()


class PlainJob:
    """One transfer by plain calls on the thread that waits for it.

    A small synchronous one has nothing to overlap with, and handing it to a queue costs more than
    moving it.
    """

    def __init__(self, request: Request, span: Span) -> None:
        self._request = request
        self._span = span
        self._started = False

    def finish(self) -> None:
        """Move the bytes; an interrupted call is not tried again."""
        if self._started:
            return
        self._started = True
        operation, file, offset, _ = self._request
        ragged = file.admit(offset, self._span)
        block = Block(
            file.edge_fileno() if ragged else file.fileno(),
            offset,
            self._span.view(),
            1 if ragged else file.alignment_bytes,
        )
        outcome = move_block(block, _read_once if operation is Operation.READ else _write_once)
        if outcome.error_number:
            transfer = Transfer(operation, file, offset, self._span, None)
            transfer.finish(outcome)
            file.close()
            Ticket(transfer, lambda _: None).wait()  # raises

    def moved(self) -> bool:
        """Return that nothing is in flight."""
        return True


def _read_once(descriptor: int, view: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [view], offset)


def _write_once(descriptor: int, view: memoryview, offset: int) -> int:
    return os.pwritev(descriptor, [view], offset)


class BouncedJob:
    """A transfer in chunks through the slots of a handle. [Note: bounce slots]"""

    def __init__(self, slots: "BounceSlots", request: Request) -> None:
        self.request = request
        self.error: OSError | RuntimeError | None = None
        self._slots = slots
        self._next_start = 0
        with slots.lock:
            writes = request.operation is Operation.WRITE
            while self._left() and (writes or slots.has_free()):
                self._start_next()

    def finish(self) -> None:
        """Move what is left, and wait for all of it."""
        with self._slots.lock:
            while self._left():
                self._start_next()
            while self._slots.is_busy_for(self):
                self._slots.finish_oldest()
        if self.error is not None:
            self.request.file.close()
            raise self.error

    def moved(self) -> bool:
        """Return whether no chunk is in flight and none is left to start."""
        with self._slots.lock:
            return not self._left() and not self._slots.is_busy_for(self)

    def _left(self) -> bool:
        return self.error is None and self._next_start < self.request.memory.size_bytes

    def _start_next(self) -> None:
        self._next_start += self._slots.start(self, self._next_start)


class SettledJob:
    """A job, and what is to be done once it has moved its bytes."""

    def __init__(self, job: Job, settle: Callable[[], object]) -> None:
        self._job = job
        self._settle = settle

    def finish(self) -> None:
        """Wait for the job, then do it."""
        self._job.finish()
        self._settle()

    def moved(self) -> bool:
        """Return whether the job's transfers are over."""
        return self._job.moved()


class _Chunk(NamedTuple):
    job: BouncedJob
    start: int
    slot: Span
    part: Span
    ticket: Ticket


class BounceSlots:
    """Lends aligned host memory to transfers that cannot use their own."""

    def __init__(self, engine: Engine, chunk_bytes: int) -> None:
        self.lock = threading.RLock()  # held while chunks start and finish
        self._engine = engine
        self._chunk_bytes = align_up(chunk_bytes, _PAGE_BYTES)
        self._free: list[Span] | None = None
        self._busy: deque[_Chunk] = deque()

    def has_free(self) -> bool:
        """Return whether a chunk can start without waiting."""
        return self._free is None or bool(self._free)

    def is_busy_for(self, job: BouncedJob) -> bool:
        """Return whether a chunk of the job is in flight."""
        return any(chunk.job is job for chunk in self._busy)

    def start(self, job: BouncedJob, start: int) -> int:
        """Start the chunk that begins at byte `start` of the job's memory; return its size."""
        request = job.request
        offset = request.offset + start
        # Every chunk but the first begins at a page of the file.
        reach = (offset + self._chunk_bytes) // _PAGE_BYTES * _PAGE_BYTES - offset
        size_bytes = min(reach, request.memory.size_bytes - start)
        slot = self._acquire(request.memory.device)
        try:
            part = slot.sub(offset % _PAGE_BYTES, size_bytes)  # in step with the file
            if request.operation is Operation.WRITE:
                request.memory.load(start, part)
            ticket = submit(self._engine, request, offset, part)
        except BaseException:
            self._release(slot)
            raise
        self._busy.append(_Chunk(job, start, slot, part, ticket))
        return size_bytes

    def finish_oldest(self) -> None:
        """Wait for the chunk that started first; what fails is its job's error."""
        chunk = self._busy[0]
        request = chunk.job.request
        try:
            chunk.ticket.wait()
            if request.operation is Operation.READ and chunk.job.error is None:
                request.memory.store(chunk.start, chunk.part)
        except (OSError, RuntimeError) as error:  # RuntimeError: what a device reports
            if not chunk.ticket.done():  # a signal handler raised it: the chunk stays in flight
                raise
            chunk.job.error = chunk.job.error or error
        self._busy.popleft()
        self._release(chunk.slot)

    def _acquire(self, device: int | None) -> Span:
        if self._free is None:
            slot_bytes = self._chunk_bytes + _PAGE_BYTES
            with _slot_arena(_SLOT_COUNT * slot_bytes, device) as arena:
                self._free = [arena.carve(slot_bytes) for _ in range(_SLOT_COUNT)]
        while not self._free:
            self.finish_oldest()
        return self._free.pop()

    def _release(self, slot: Span) -> None:
        if self._free is not None:
            self._free.append(slot)


def _slot_arena(size_bytes: int, device: int | None) -> HostArena:
    """Return memory for slots; for a device it is registered there, so that copies are fast."""
    if device is not None:
        with contextlib.suppress(OSError):  # what may not be locked is only slower
            return PinnedArena(size_bytes, device=device)
    return HostArena(size_bytes)


def submit(engine: Engine, request: Request, offset: int, span: Span) -> Ticket:
    """Start a transfer between a span and the file of a request."""
    request.file.admit(offset, span)
    if request.operation is Operation.READ:
        return engine.submit_read(request.file, offset, span)
    return engine.submit_write(request.file, offset, span)


def compare(request: Request) -> None:
    """Read the file again, through the page cache, and raise unless it holds the same bytes."""
    memory = request.memory
    file = request.file
    size_bytes = memory.size_bytes
    number = file.reopen(os.O_RDONLY)
    try:
        with HostArena(2 * _COMPARE_BYTES) as arena:
            stored, copy = arena.carve(_COMPARE_BYTES), arena.carve(_COMPARE_BYTES)
            for start in range(0, size_bytes, _COMPARE_BYTES):
                part_bytes = min(_COMPARE_BYTES, size_bytes - start)
                found = stored.sub(0, part_bytes)
                if isinstance(memory, HostBytes):
                    wanted = memory.span.sub(start, part_bytes)
                else:
                    wanted = copy.sub(0, part_bytes)
                    memory.load(start, wanted)
                moved_bytes = os.preadv(number, [found.view()], request.offset + start)
                if moved_bytes != part_bytes or not _same(found, wanted):
                    file.close()
                    raise _difference(request, start, found.sub(0, moved_bytes), wanted)
    finally:
        os.close(number)


def _same(left: Span, right: Span) -> bool:
    addresses = (ctypes.c_void_p(left.address), ctypes.c_void_p(right.address))
    return not libc().memcmp(*addresses, ctypes.c_size_t(left.size_bytes))


def _difference(request: Request, start: int, found: Span, wanted: Span) -> OSError:
    pairs = zip(bytes(found.view()), bytes(wanted.view()), strict=False)
    first = next((at for at, (left, right) in enumerate(pairs) if left != right), found.size_bytes)
    return OSError(
        errno.EIO,
        f"validation of a {request.operation} of {request.memory.size_bytes} bytes at offset "
        f"{request.offset} failed: the tensor and the file differ from byte {start + first} of the "
        "transfer on; did something else write to either?",
        str(request.file.path),
    )
