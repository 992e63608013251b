"""The verbs that every engine has, and the one function that chooses an engine."""

import abc
import enum
import errno
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self, assert_never

from aio_ops.keeping import FileKeeper
from aio_ops.linux import require_linux
from aio_ops.memory import Span
from aio_ops.process import ProcessBound
from aio_ops.schedule import Schedule
from aio_ops.striped_file import StripedFile, start_striped
from aio_ops.swapfile import SwapFile
from aio_ops.transfer import Operation, Ticket, Transfer, TransferFile

_BLOCK_ALIGNMENT_BYTES = 4096
_MAXIMUM_BLOCK_BYTES = 1 << 30  # the kernel moves less than 2 GiB a call


class Engine(FileKeeper, ProcessBound, abc.ABC):
    """Moves bytes between files and memory without making the caller wait.

    One transfer completes on its own; nothing is ordered between transfers, so a caller that reads
    back what it wrote waits for the write first.
    """

    name: str
    reason: str

    def __init__(self, bytes_at_once: int = _MAXIMUM_BLOCK_BYTES) -> None:
        super().__init__()
        self.bytes_at_once = bytes_at_once
        """How much of what is in flight moves at one time; the rest waits in the engine."""
        self._closed = False
        self._stopped = False
        self._schedule = Schedule()

    def create_file(
        self, directory: Path, size_bytes: int, *, any_alignment: bool = False
    ) -> TransferFile:
        """Return a new file of `size_bytes` zero bytes in `directory`.

        With `any_alignment` its transfers may have any offset, size and address; what is not
        aligned costs a copy through the page cache.
        """
        self._require_usable()
        return SwapFile.create(directory, size_bytes, any_alignment=any_alignment)

    def create_striped_file(
        self,
        directories: Sequence[Path],
        size_bytes: int,
        *,
        weights: Sequence[float] | Literal["auto"] = "auto",
        capacities: Sequence[int | None] | None = None,
        unit_bytes: int | None = None,
        any_alignment: bool = False,
        name: str | None = None,
    ) -> StripedFile:
        """Return one new file of zero bytes over directories on different drives.

        Each gets bytes in proportion to its weight, but no more than its capacity, in stripes of
        `unit_bytes` (at most 4 MiB if left out) that alternate [Note: stripes]. "auto" measures
        each directory for about a second. All space is reserved here; an OSError names the
        directory that cannot, and then nothing is left in the others. With a `name` the members
        stay under it, and `open_striped_file` finds them again.
        """
        from aio_ops.stripe_creation import StripeRequest, create

        self._require_usable()
        request = StripeRequest(
            directories, size_bytes, weights, capacities, unit_bytes, any_alignment, name
        )
        return create(self, request)

    def submit_read(self, file: TransferFile, offset: int, span: Span) -> Ticket:
        """Start to fill `span` from the file; its bytes are undefined until the ticket is done."""
        return self._submit(Operation.READ, file, [(offset, span)])[0]

    def submit_write(self, file: TransferFile, offset: int, span: Span) -> Ticket:
        """Start to write `span` to the file; its bytes must not change until it is done."""
        return self._submit(Operation.WRITE, file, [(offset, span)])[0]

    def submit_reads(self, file: TransferFile, pieces: Sequence[tuple[int, Span]]) -> list[Ticket]:
        """Start a read for each (offset, span): for many small ones, cheaper than one by one.

        Either all of them are valid and started, or ValueError says which is not.
        """
        return self._submit(Operation.READ, file, pieces)

    def submit_writes(self, file: TransferFile, pieces: Sequence[tuple[int, Span]]) -> list[Ticket]:
        """Start a write for each (offset, span), like `submit_reads`."""
        return self._submit(Operation.WRITE, file, pieces)

    @property
    def schedule(self) -> Schedule:
        """In which order reads and writes go to the kernel."""
        return self._schedule

    def set_schedule(self, schedule: Schedule) -> None:
        """Send reads and writes to the kernel in another order from here on."""
        self._require_usable()
        self._schedule = schedule

    @property
    @abc.abstractmethod
    def in_flight(self) -> int:
        """The number of transfers that are not done."""

    @abc.abstractmethod
    def watch(self, stall_s: float) -> None:
        """Warn those who wait whenever nothing has completed for `stall_s` seconds."""

    @abc.abstractmethod
    def drain(self) -> None:
        """Wait until nothing is in flight; failures stay with their tickets."""

    def close(self) -> None:
        """Drain, then give up threads and queues; tickets stay readable."""
        if self._in_other_process() or self._stopped:
            return
        self._closed = True  # first, so that nothing new arrives while draining
        self.drain()
        self._stop()
        self._stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @abc.abstractmethod
    def _start(
        self, transfers: list[Transfer], file: TransferFile, pieces: Sequence[tuple[int, Span]]
    ) -> list[Ticket]:
        """Take transfers, all of one kind, whose requests are valid."""

    @abc.abstractmethod
    def _stop(self) -> None:
        """Give up what the engine holds, once nothing is in flight."""

    def _submit(
        self, operation: Operation, file: TransferFile, pieces: Sequence[tuple[int, Span]]
    ) -> list[Ticket]:
        self._require_usable()
        for offset, span in pieces:
            check_request(file, offset, span.size_bytes, span.address)
        if isinstance(file, StripedFile):
            return start_striped(operation, file, pieces, self._start, self.drain)
        lease = file.lease()
        transfers = [Transfer(operation, file, offset, span, lease) for offset, span in pieces]
        return self._start(transfers, file, pieces) if transfers else []

    def _require_usable(self) -> None:
        self._require_same_process()
        if self._closed:
            raise RuntimeError("engine is closed")


def check_request(file: TransferFile, offset: int, size_bytes: int, address: int = 0) -> None:
    """Raise ValueError unless the file can take a transfer between an offset and an address."""
    if size_bytes <= 0:
        raise ValueError(f"a transfer needs at least one byte, got {size_bytes}")
    if offset < 0 or offset + size_bytes > file.size_bytes:
        raise ValueError(
            f"bytes {offset} to {offset + size_bytes} are not inside {file.path}, which has "
            f"{file.size_bytes} bytes"
        )
    if not file.direct or file.any_alignment:
        return
    alignment_bytes = file.alignment_bytes
    for what, value in (
        ("offset", offset),
        ("size_bytes", size_bytes),
        ("address", address),
    ):
        if value % alignment_bytes:
            raise ValueError(
                f"direct I/O on {file.path} needs {what} to be a multiple of {alignment_bytes}, "
                f"got {value} ({value % alignment_bytes} too many); carve spans from a HostArena "
                "and round extents up with align_up, or create the file with any_alignment"
            )


class EngineKind(enum.StrEnum):
    """The names that `open_engine` takes."""

    AUTO = "auto"
    THREADS = "threads"
    PYTHON = "python"
    IO_URING = "io_uring"
    KERNEL_AIO = "kernel_aio"


class Polling(enum.StrEnum):
    """How an io_uring asks the kernel; each trades CPU time for latency.

    `SUBMISSION`: a thread of the kernel looks for requests. `COMPLETION`: the device is asked
    instead of waiting for its interrupt; it must have polled queues, and files must be direct.
    """

    NONE = "none"
    SUBMISSION = "submission"
    COMPLETION = "completion"
    BOTH = "both"

    @property
    def submission(self) -> bool:
        """Whether requests are looked for."""
        return self in (Polling.SUBMISSION, Polling.BOTH)

    @property
    def completion(self) -> bool:
        """Whether the device is asked."""
        return self in (Polling.COMPLETION, Polling.BOTH)


def open_engine(
    kind: str = "auto",
    *,
    directory: Path | None = None,
    thread_count: int = 4,
    block_bytes: int = 1 << 20,
    queue_depth: int = 32,
    polling: str = "none",
) -> Engine:
    """Return an engine of the kind asked for, or raise why that cannot be.

    `queue_depth` is the number of transfers that may be in flight; a further submit waits for one
    of them. `thread_count` blocks of `block_bytes` move at once on threads, `queue_depth` blocks
    on the kernel's own queues.

    "auto" takes the best engine that works in `directory`, where they are tried on a small file,
    the best first, and says in `Engine.reason` why it refused the better ones. Without a directory
    it takes threads, which work in every one.

    `polling` is for io_uring alone, asked for by name: "submission", "completion" or "both"
    [see Polling]. With a directory, an engine that cannot poll there is an OSError.
    """
    require_linux()
    _check_settings(thread_count, block_bytes, queue_depth)
    try:
        asked = EngineKind(kind)
    except ValueError:
        known = ", ".join(repr(known.value) for known in EngineKind)
        raise ValueError(f"there is no engine {kind!r}; choose one of {known}") from None
    sizes = _Sizes(thread_count, block_bytes, queue_depth)
    polls = _polling_of(polling)
    if polls is not Polling.NONE:
        return _open_polling(asked, sizes, polls, directory)
    if asked is EngineKind.AUTO:
        return _open_best(sizes, directory)
    return _open(asked, sizes, "asked for by name")


class _Sizes(NamedTuple):
    thread_count: int
    block_bytes: int
    queue_depth: int


def _open(kind: EngineKind, sizes: _Sizes, reason: str) -> Engine:
    match kind:
        case EngineKind.THREADS:
            from aio_ops.threads_engine import ThreadsEngine

            return ThreadsEngine(*sizes, reason)
        case EngineKind.PYTHON:
            from aio_ops.python_engine import PythonEngine

            return PythonEngine(*sizes, reason)
        case EngineKind.IO_URING:
            from aio_ops.kernel_engines import IoUringEngine

            return IoUringEngine(sizes.block_bytes, sizes.queue_depth, reason)
        case EngineKind.KERNEL_AIO:
            from aio_ops.kernel_engines import KernelAioEngine

            return KernelAioEngine(sizes.block_bytes, sizes.queue_depth, reason)
        case EngineKind.AUTO:
            raise ValueError("auto is not an engine but a choice of one")
        case _:
            assert_never(kind)


def _polling_of(polling: str) -> Polling:
    try:
        return Polling(polling)
    except ValueError:
        known = ", ".join(repr(known.value) for known in Polling)
        raise ValueError(f"there is no polling {polling!r}; choose one of {known}") from None


def _open_polling(
    asked: EngineKind, sizes: _Sizes, polling: Polling, directory: Path | None
) -> Engine:
    if asked is not EngineKind.IO_URING:
        raise ValueError(f"only the engine 'io_uring' can poll, and {asked.value!r} was asked for")
    from aio_ops.kernel_engines import IoUringEngine
    from aio_ops.probe import polling_refusal

    refusal = None if directory is None else polling_refusal(directory, polling)
    if refusal is not None:
        raise OSError(
            errno.EOPNOTSUPP,
            f"io_uring with {polling.value} polling does not work in {directory}: {refusal}; "
            "completion polling needs an NVMe drive with polled queues (the kernel parameter "
            "nvme.poll_queues) and a file system with direct I/O. Use polling='none'",
        )
    return IoUringEngine(sizes.block_bytes, sizes.queue_depth, "asked for by name", polling)


def _check_settings(thread_count: int, block_bytes: int, queue_depth: int) -> None:
    if not 1 <= thread_count <= 1024:
        raise ValueError(f"thread_count must be from 1 to 1024, got {thread_count}")
    if not 1 <= queue_depth <= 1 << 20:
        raise ValueError(f"queue_depth must be from 1 to {1 << 20}, got {queue_depth}")
    if not 0 < block_bytes <= _MAXIMUM_BLOCK_BYTES or block_bytes % _BLOCK_ALIGNMENT_BYTES:
        nearest = round(block_bytes / _BLOCK_ALIGNMENT_BYTES) * _BLOCK_ALIGNMENT_BYTES
        nearest = min(max(nearest, _BLOCK_ALIGNMENT_BYTES), _MAXIMUM_BLOCK_BYTES)
        raise ValueError(
            f"block_bytes must be a multiple of {_BLOCK_ALIGNMENT_BYTES} up to "
            f"{_MAXIMUM_BLOCK_BYTES}, got {block_bytes}; the nearest is {nearest}"
        )


def _open_best(sizes: _Sizes, directory: Path | None) -> Engine:
    from aio_ops.native_engine import native_unavailable_reason

    refusal = native_unavailable_reason()
    if refusal is None:
        return _open_probed(sizes, directory)
    if os.environ.get("TIERZERO_REQUIRE_NATIVE") == "1":
        raise RuntimeError(
            f"TIERZERO_REQUIRE_NATIVE=1, but the native engine does not load: {refusal}"
        )
    warnings.warn(
        f"the native engine does not load ({refusal}); the slower pure-Python engine is used",
        RuntimeWarning,
        stacklevel=3,
    )
    return _open(EngineKind.PYTHON, sizes, f"threads was refused: {refusal}")


def _open_probed(sizes: _Sizes, directory: Path | None) -> Engine:
    from aio_ops.probe import report

    if directory is None:
        reason = "io_uring and kernel_aio are only chosen for a directory, and none was given"
        return _open(EngineKind.THREADS, sizes, reason)
    found = report(directory, stops_at_best=True)
    best, reason = EngineKind(found.best), found.reason
    try:
        return _open(best, sizes, reason)
    except OSError as error:  # what was probed was smaller than what is needed
        return _open(EngineKind.THREADS, sizes, f"{reason}; {best.value} was refused: {error}")
