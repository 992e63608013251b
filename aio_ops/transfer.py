"""One request to move bytes: what was asked for, what came of it, and who waits for it.

[Note: who owns a transfer]
While a transfer is in flight the engine refers to its `Transfer`, which refers to the span and to
the file's descriptor; so dropping a ticket never frees memory that the kernel still uses. When the
result is known, `Transfer.finish` drops both. A failure that no one ever waited for is logged when
the last reference goes, so that it is not lost.
"""

import enum
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aio_ops.memory import DeviceSpan, Span

_log = logging.getLogger(__name__)


class Operation(enum.StrEnum):
    """Which way the bytes move: a read fills memory from the file."""

    READ = "read"
    WRITE = "write"


class TransferFile(Protocol):
    """What an engine needs to know of a file."""

    @property
    def path(self) -> Path:
        """A name for messages."""

    @property
    def size_bytes(self) -> int:
        """The file's fixed size."""

    @property
    def alignment_bytes(self) -> int:
        """What addresses, offsets and sizes must be multiples of when `direct` holds."""

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""

    @property
    def any_alignment(self) -> bool:
        """Whether requests of any offset, size and address are taken although `direct` holds."""

    def fileno(self) -> int:
        """Return the descriptor's number."""

    def edge_fileno(self) -> int:
        """Return a descriptor of the same file through the page cache, or -1 when there is none."""

    def lease(self) -> object:
        """Return an object that keeps the descriptor open as long as it is held."""

    def sync(self) -> None:
        """Return once everything that was written will be there after a crash."""

    def close(self) -> None:
        """Give the file up."""


class TransferError(OSError):
    """A transfer that did not move what was asked for; the message names all of its parts."""

    def __init__(
        self,
        error_number: int,
        operation: str,
        path: Path,
        offset: int,
        wanted_bytes: int,
        moved_bytes: int,
        detail: str = "",
    ) -> None:
        reason = os.strerror(error_number) + (f" ({detail})" if detail else "")
        super().__init__(
            error_number,
            f"{operation} of {wanted_bytes} bytes at offset {offset} of {path} moved "
            f"{moved_bytes} bytes: {reason}",
        )
        self.operation = operation
        self.path = path
        self.offset = offset
        self.wanted_bytes = wanted_bytes
        self.moved_bytes = moved_bytes
        self.detail = detail

    def __reduce__(self) -> tuple[type["TransferError"], tuple[object, ...]]:
        # OSError's own answer would rebuild from (errno, text), which is not our signature.
        return type(self), (
            self.errno,
            self.operation,
            self.path,
            self.offset,
            self.wanted_bytes,
            self.moved_bytes,
            self.detail,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a transfer; `error_number` is 0 when every byte moved."""

    moved_bytes: int
    error_number: int = 0
    detail: str = ""
    cause: BaseException | None = None


class Transfer:
    """The record that an engine keeps of a transfer, from submission to result."""

    def __init__(
        self,
        operation: Operation,
        file: TransferFile,
        offset: int,
        span: Span | DeviceSpan,
        lease: object,
    ) -> None:
        self.operation = operation
        self.path = file.path
        self.offset = offset
        self.size_bytes = span.size_bytes
        self.span: Span | DeviceSpan | None = span
        self.lease = lease
        self.outcome: Outcome | None = None
        self.reported = False
        self.further = False
        """Whether it is a piece of a transfer whose first piece counts in the queue depth."""

    def finish(self, outcome: Outcome) -> None:
        """Record the result and let go of the memory and the file."""
        if not outcome.error_number and outcome.moved_bytes != self.size_bytes:
            outcome = Outcome(outcome.moved_bytes, errno.EIO, "short without an error")
        self.outcome = outcome
        self.span = None  # [Note: who owns a transfer]
        self.lease = None

    def error(self) -> TransferError | None:
        """Return the failure as an exception, or None while there is none."""
        outcome = self.outcome
        if outcome is None or not outcome.error_number:
            return None
        error = TransferError(
            outcome.error_number,
            self.operation.value,
            self.path,
            self.offset,
            self.size_bytes,
            outcome.moved_bytes,
            outcome.detail,
        )
        error.__cause__ = outcome.cause
        return error

    def __del__(self) -> None:
        error = None if self.reported else self.error()
        if error is not None:
            _log.error("a transfer failed and nobody waited for it: %s", error)


class Ticket:
    """A transfer in flight. It may be dropped: the engine owns the memory until it is done."""

    def __init__(self, transfer: Transfer, advance: Callable[[float | None], None]) -> None:
        self._transfer = transfer
        self._advance = advance

    @property
    def size_bytes(self) -> int:
        """The bytes that were asked for."""
        return self._transfer.size_bytes

    @property
    def moved_bytes(self) -> int:
        """The bytes that have moved as far as the result is known, and 0 before."""
        outcome = self._transfer.outcome
        return 0 if outcome is None else outcome.moved_bytes

    def done(self) -> bool:
        """Return whether the transfer is over, successful or not, without waiting."""
        return self.settle(0.0)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until the transfer is over, successful or not, and return whether it is."""
        if self._transfer.outcome is None:
            self._advance(timeout_s)
        return self._transfer.outcome is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once every byte has moved; raise TransferError if that failed.

        TimeoutError says that the transfer is still in flight and still uses its memory.
        """
        transfer = self._transfer
        if not self.settle(timeout_s):
            raise TimeoutError(
                f"{transfer.operation} of {transfer.size_bytes} bytes at offset "
                f"{transfer.offset} of {transfer.path} is not done after {timeout_s} s"
            )
        error = transfer.error()
        if error is not None:
            transfer.reported = True
            raise error
