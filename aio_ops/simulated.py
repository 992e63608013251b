"""A seeded hostile disk in memory, to test every mover of bytes on.

[Note: what makes it hostile]
A transfer stays pending until someone waits, polls, drains or closes, and pending transfers
complete in a random order that the seed repeats. A write takes its bytes when it completes, not
when it is submitted, and a read fills its span with 0xA5 at once: so a mover that reuses a slot
too early, or looks at it too early, gets wrong bytes every time and not only under load.
"""

import errno
import functools
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, assert_never

from aio_ops.engine import Engine
from aio_ops.memory import Span
from aio_ops.run_directory import RunClaim
from aio_ops.transfer import Operation, Outcome, Ticket, Transfer, TransferFile

if TYPE_CHECKING:
    from aio_ops.platter import Platter

FaultKind = Literal["eio", "enospc", "short", "torn"]

_SCRIBBLE = 0xA5
_SHORT_BYTES = 512
_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Fault:
    """Which transfer fails, counted from 0, and how; with `repeat` all later ones fail too.

    eio and enospc move nothing, short moves 512 bytes, torn moves the first half.
    """

    at: int
    kind: FaultKind
    repeat: bool = False

    def __post_init__(self) -> None:
        if self.at < 0:
            raise ValueError(f"transfers are counted from 0, a fault cannot be at {self.at}")
        if self.kind not in ("eio", "enospc", "short", "torn"):
            raise ValueError(f"there is no fault {self.kind!r}; use eio, enospc, short or torn")

    def hits(self, number: int) -> bool:
        """Return whether the transfer with this number fails."""
        return number == self.at or (self.repeat and number > self.at)

    def outcome(self, size_bytes: int) -> Outcome:
        """Return what comes of a transfer of `size_bytes` that fails like this."""
        match self.kind:
            case "eio":
                return Outcome(0, errno.EIO, "simulated")
            case "enospc":
                return Outcome(0, errno.ENOSPC, "simulated")
            case "short":
                return Outcome(min(_SHORT_BYTES, size_bytes - 1), errno.EIO, "simulated, short")
            case "torn":
                return Outcome(size_bytes // 2, errno.EIO, "simulated, torn")
            case _:
                assert_never(self.kind)


class SimulatedFile:
    """A file whose bytes are in memory; `contents` is what a test may look at."""

    direct = True
    alignment_bytes = _ALIGNMENT_BYTES

    def __init__(self, path: Path, size_bytes: int, *, any_alignment: bool = False) -> None:
        self.path = path
        self.any_alignment = any_alignment
        self.size_bytes = size_bytes
        self.contents = bytearray(size_bytes)
        self._closed = False

    def fileno(self) -> int:
        """Raise: there is no descriptor behind a simulated file."""
        raise io.UnsupportedOperation(f"{self.path} has no descriptor")

    def edge_fileno(self) -> int:
        """Return -1: there is no page cache either."""
        return -1

    def lease(self) -> object:
        """Return an object that keeps the bytes, or raise ValueError when the file is closed."""
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        return self.contents

    def store(self, start: int, data: bytes) -> None:
        """Take the bytes of a write that completes."""
        self.contents[start : start + len(data)] = data

    def sync(self) -> None:
        """Do nothing: these bytes are as safe as they get."""

    def close(self) -> None:
        """Give the file up."""
        self._closed = True


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    transfer: Transfer
    file: SimulatedFile
    span: Span
    fault: Outcome | None

    def complete(self) -> None:
        """Move the bytes and tell the transfer what came of it."""
        outcome = self.fault or Outcome(self.span.size_bytes)
        start, size_bytes = self.transfer.offset, outcome.moved_bytes
        memory = self.span.view()
        if self.transfer.operation is Operation.WRITE:
            self.file.store(start, bytes(memory[:size_bytes]))
        else:
            memory[:size_bytes] = self.file.contents[start : start + size_bytes]
        self.transfer.finish(outcome)


class SimulatedDisk(Engine):
    """An engine whose every order and failure is chosen by a seed and a fault."""

    name = "simulated"
    reason = "a test asked for it"

    def __init__(
        self,
        seed: int,
        *,
        fault: Fault | None = None,
        reorder: bool = True,
        platter: "Platter | None" = None,
    ) -> None:
        super().__init__()
        self._platter = platter
        self.submitted = 0
        self._random = random.Random(seed)
        self._fault = fault
        self._reorder = reorder
        self._pending: list[_Pending] = []

    def create_file(
        self, directory: Path, size_bytes: int, *, any_alignment: bool = False
    ) -> SimulatedFile:
        """Return a file of zero bytes in memory; the directory only serves messages."""
        self._require_usable()
        if size_bytes <= 0:
            raise ValueError(f"a swap file cannot have {size_bytes} bytes")
        path = Path(directory) / "<simulated swap file>"
        return SimulatedFile(path, size_bytes, any_alignment=any_alignment)

    def open_named_file(self, path: Path, size_bytes: int, *, create: bool) -> SimulatedFile:
        """Return a file of the platter, which outlives this engine."""
        self._require_usable()
        return self._require_platter().open_file(path, size_bytes, create=create)

    def claim_directory(self, path: Path) -> RunClaim:
        """Return a directory of the platter."""
        return self._require_platter().claim(path)

    @property
    def in_flight(self) -> int:
        """The number of transfers that are not done."""
        return len(self._pending)

    def watch(self, stall_s: float) -> None:
        """Do nothing: a simulated disk never stalls."""

    def drain(self) -> None:
        """Complete everything that is pending; failures stay with their tickets."""
        self._require_same_process()
        while self._pending:
            self._complete_one()

    def _start(
        self, transfers: list[Transfer], file: TransferFile, pieces: Sequence[tuple[int, Span]]
    ) -> list[Ticket]:
        spans = [span for _, span in pieces]
        return [
            self._start_one(transfer, file, span)
            for transfer, span in zip(transfers, spans, strict=True)
        ]

    def _start_one(self, transfer: Transfer, file: TransferFile, span: Span) -> Ticket:
        if not isinstance(file, SimulatedFile):
            raise TypeError(f"{file.path} is not a file of a SimulatedDisk; use its create_file")
        failing = self._fault is not None and self._fault.hits(self.submitted)
        fault = self._fault.outcome(span.size_bytes) if self._fault and failing else None
        self.submitted += 1
        if transfer.operation is Operation.READ:  # [Note: what makes it hostile]
            span.view()[:] = bytes([_SCRIBBLE]) * span.size_bytes
        self._pending.append(_Pending(transfer, file, span, fault))
        return Ticket(transfer, functools.partial(self._advance, transfer))

    def _complete_one(self) -> None:
        index = self._random.randrange(len(self._pending)) if self._reorder else 0
        self._pending[index].complete()  # the machine may stop here: then it stays pending
        self._pending.pop(index)

    def _advance(self, transfer: Transfer, timeout_s: float | None) -> None:
        self._require_same_process()
        if timeout_s is not None and timeout_s <= 0:  # a poll: one step of the disk
            self._complete_one()
            return
        while transfer.outcome is None:
            self._complete_one()

    def _stop(self) -> None:
        self._pending.clear()

    def _require_platter(self) -> "Platter":
        if self._platter is None:
            raise ValueError("a simulated disk keeps named files only if it is given a Platter")
        return self._platter
