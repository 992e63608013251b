"""The working part of a handle: jobs that are pending, and what they need.

[Note: who is told of a failure]
Every call that waits (`wait` and each synchronous one) waits for all that is pending on the handle,
as in the field, and raises the first failure when the last of it is over; notes name the others.
An operation is waited for once: threads that share a handle each get what the others left.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from aio_ops.engine import Engine, open_engine
from aio_ops.handles.files import FileOpener, HandleFile, Place
from aio_ops.handles.jobs import (
    BouncedJob,
    BounceSlots,
    DirectJob,
    EmptyJob,
    Job,
    PlainJob,
    Request,
    SettledJob,
    compare,
)
from aio_ops.handles.tensors import HostBytes, source_bytes, target_bytes
from aio_ops.memory import align_up
from aio_ops.transfer import Operation

_log = logging.getLogger(__name__)

_ENGINES = ("io_uring", "kernel_aio", "threads", "python")  # the best first
_ENGINE_BLOCK_BYTES = 4096  # what an engine's blocks are multiples of
_LARGEST_BLOCK_BYTES = 1 << 30
_LEAST_THREADS = 8  # on the thread engines, where one thread moves one block
_LEAST_CHUNK_BYTES = 4 << 20
_BOUNCE_FROM_BYTES = 64 << 10  # less goes through the page cache at once
_PLAIN_BYTES = 64 << 10  # a synchronous transfer up to this size needs no queue


class HandleSettings(NamedTuple):
    """What a handle was made with, under the field's names."""

    block_size: int
    queue_depth: int
    single_submit: bool
    overlap_events: bool
    intra_op_parallelism: int


class HandleCore:
    """What a handle works with; it outlives the handle until nothing is pending."""

    def __init__(self, settings: HandleSettings, engine: str) -> None:
        self.engine = _open_engine(settings, engine)
        self._files = FileOpener()
        self._slots = BounceSlots(self.engine, max(_LEAST_CHUNK_BYTES, settings.block_size))
        self._lock = threading.Lock()
        self._pending: list[Job] = []
        self._process_id = os.getpid()
        self.closed = False

    def read_job(
        self,
        tensor: Any,
        place: Place,
        offset: int,
        *,
        validate: bool = False,
        whole: bool = False,
        later: bool = False,
    ) -> Job:
        """Start to fill a tensor."""
        target = target_bytes(tensor)
        file = self._files.open(place, writes=False)
        request = Request(Operation.READ, file, offset, target.memory)
        try:
            _check_read(request, whole=whole)
        except ValueError:
            file.close()
            raise
        return self._start(request, target.settle, validate=validate, later=later)

    def write_job(
        self,
        tensor: Any,
        place: Place,
        offset: int,
        *,
        validate: bool = False,
        later: bool = False,
    ) -> Job:
        """Start to write a tensor."""
        memory = source_bytes(tensor)
        if offset < 0:
            raise ValueError(f"file_offset must not be negative, got {offset}")
        file = self._files.open(place, writes=True)
        try:
            file.reserve(offset, memory.size_bytes)
        except OSError:
            file.close()
            raise
        request = Request(Operation.WRITE, file, offset, memory)
        return self._start(request, validate=validate, later=later)

    def run(self, job: Job, *, later: bool) -> int:
        """Leave a job pending and return 0, or finish it and all others and count them."""
        if not later:
            return self.drain([job])
        with self._lock:
            self._pending.append(job)
        return 0

    def run_alone(self, job: Job) -> int:
        """Finish a job without waiting for others, and return 0."""
        job.finish()
        return 0

    def drain(self, jobs: list[Job]) -> int:
        """Finish what is pending and these jobs. [Note: who is told of a failure]"""
        with self._lock:
            left, self._pending = self._pending + jobs, []
        count = len(left)
        errors: list[Exception] = []
        try:
            while left:
                try:
                    left[0].finish()
                except (OSError, ValueError, RuntimeError) as error:
                    if not left[0].moved():  # a signal handler raised it
                        raise
                    errors.append(error)
                del left[0]
        finally:  # only an interrupt leaves any
            with self._lock:
                self._pending = left + self._pending
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"another operation of the same wait failed: {other}")
            raise errors[0]
        return count

    def end(self) -> None:
        """Finish what is pending when the handle is gone; failures can only be logged."""
        if os.getpid() != self._process_id:
            return
        try:
            self.drain([])
        except (OSError, ValueError, RuntimeError) as error:
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            _log.error("a handle was dropped before wait(), and: %s%s", error, notes)
        self.engine.close()

    def _start(
        self,
        request: Request,
        settle: Callable[[], object] | None = None,
        *,
        validate: bool,
        later: bool,
    ) -> Job:
        job = self._moving(request, later=later)
        if validate:
            job = SettledJob(job, functools.partial(compare, request))
        return job if settle is None else SettledJob(job, settle)

    def _moving(self, request: Request, *, later: bool) -> Job:
        self._require_usable()
        memory, file = request.memory, request.file
        if memory.size_bytes == 0:
            return EmptyJob()
        if not isinstance(memory, HostBytes) or _is_out_of_step(file, request.offset, memory):
            return BouncedJob(self._slots, request)
        if not later and memory.size_bytes <= _PLAIN_BYTES:
            return PlainJob(request, memory.span)
        return DirectJob(self.engine, request, memory.span)

    def _require_usable(self) -> None:
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"this handle belongs to process {self._process_id}; make one in the forked "
                f"process {os.getpid()}"
            )
        if self.closed:
            raise RuntimeError("the handle is closed")


def _is_out_of_step(file: HandleFile, offset: int, memory: HostBytes) -> bool:
    """Return whether the tensor's sectors are not the file's, and it is worth a copy."""
    if not file.direct or memory.size_bytes < _BOUNCE_FROM_BYTES:
        return False
    return (memory.span.address - offset) % file.alignment_bytes != 0


def _check_read(request: Request, *, whole: bool) -> None:
    """Raise ValueError unless the file has the bytes, and no more when `whole`."""
    file, offset, size_bytes = request.file, request.offset, request.memory.size_bytes
    if offset < 0:
        raise ValueError(f"file_offset must not be negative, got {offset}")
    left_bytes = file.size_bytes - offset
    if size_bytes > left_bytes:
        raise ValueError(
            f"cannot read {size_bytes} bytes at offset {offset} of {file.path}: it has "
            f"{file.size_bytes} bytes; read into a tensor of at most {max(left_bytes, 0)} bytes"
        )
    if whole and size_bytes != left_bytes:
        raise ValueError(
            f"{file.path} has {left_bytes} bytes from offset {offset} on, but the tensor has "
            f"{size_bytes}; read a part of a file with sync_pread"
        )


def _open_engine(settings: HandleSettings, kind: str) -> Engine:
    """Return the engine asked for, or the best that opens."""
    block_bytes = min(align_up(settings.block_size, _ENGINE_BLOCK_BYTES), _LARGEST_BLOCK_BYTES)
    thread_count = max(settings.intra_op_parallelism, min(settings.queue_depth, _LEAST_THREADS))

    def opened(kind: str) -> Engine:
        return open_engine(
            kind,
            thread_count=thread_count,
            block_bytes=block_bytes,
            queue_depth=settings.queue_depth,
        )

    if kind != "auto":
        return opened(kind)
    for better in _ENGINES[:-1]:
        try:
            return opened(better)
        except (OSError, RuntimeError) as error:
            _say_once(better, str(error))
    return opened(_ENGINES[-1])


@functools.cache
def _say_once(kind: str, reason: str) -> None:
    _log.warning("aio_handle goes without the engine %s: %s", kind, reason)
