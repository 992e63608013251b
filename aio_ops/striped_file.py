"""A file whose stripes lie in several others, each on a drive of its own, and its transfers.

[Note: pieces of a transfer]
A transfer of a striped file is one or more transfers of its members, its pieces. Each is submitted
like any other, so the engine owns its memory and descriptor; the transfer as a whole only knows of
them. It is over when all of them are, also when one failed: until then the drive may still be
writing to the memory. Only the first piece takes a place in the queue depth, lest a submit wait for
pieces of the very transfer that it starts. A call that cannot submit all drains the engine before
it raises: no memory is in use that the caller has no ticket for.
"""

import io
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Generic, TypeVar

from aio_ops.memory import DeviceSpan, Span
from aio_ops.striping import StripeLayout
from aio_ops.transfer import Operation, Outcome, Ticket, Transfer, TransferError, TransferFile


class StripedFile:
    """One file of fixed size over several directories; the engine's `submit` verbs take it."""

    def __init__(self, members: Sequence[TransferFile], layout: StripeLayout) -> None:
        self.members = tuple(members)
        self.layout = layout
        self.size_bytes = layout.size_bytes
        self.alignment_bytes = max(member.alignment_bytes for member in members)
        self.direct = any(member.direct for member in members)
        self.any_alignment = all(member.any_alignment for member in members)
        places = ", ".join(str(member.path.parent) for member in members)
        self.path = Path(f"<swap file striped over {places}>")

    def fileno(self) -> int:
        """Raise: every member has a descriptor of its own."""
        raise io.UnsupportedOperation(
            f"{self.path} has no descriptor of its own; give it to Engine.submit_read or "
            "submit_write, or take one of its members"
        )

    def edge_fileno(self) -> int:
        """Return -1: members have their own."""
        return -1

    def lease(self) -> object:
        """Return an object that keeps every member's descriptor open."""
        return tuple(member.lease() for member in self.members)

    def sync(self) -> None:
        """Sync every member: a file is as safe as all of its drives."""
        for member in self.members:
            member.sync()

    def close(self) -> None:
        """Give every member up."""
        for member in self.members:
            member.close()

    def __enter__(self) -> "StripedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StripedTransfer(Transfer):
    """What is known of a transfer as a whole [Note: pieces of a transfer]."""

    def __init__(
        self,
        operation: Operation,
        file: StripedFile,
        offset: int,
        span: Span | DeviceSpan,
        lease: object,
    ) -> None:
        super().__init__(operation, file, offset, span, lease)
        self._pieces: list[tuple[int, Transfer, Ticket]] = []
        self._failure: TransferError | None = None

    def add(self, start: int, piece: Transfer, ticket: Ticket) -> None:
        """Take a piece that was submitted, from a byte of the request on."""
        self._pieces.append((start, piece, ticket))

    def advance(self, timeout_s: float | None) -> None:
        """Wait for all pieces, and tell what came of them once they are over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for _, _, ticket in self._pieces:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not ticket.settle(left_s):
                return
        self._conclude()

    def error(self) -> TransferError | None:
        """Return the failure of the first piece that failed, or None while there is none."""
        return self._failure

    def _conclude(self) -> None:
        failure: tuple[int, TransferError] | None = None
        moved_bytes = 0
        for start, piece, ticket in sorted(self._pieces, key=lambda entry: entry[0]):
            moved_bytes += ticket.moved_bytes
            error = piece.error()
            if error is not None:
                piece.reported = True  # this transfer reports it from here on
                failure = failure or (start, error)
        if failure is None:
            self.finish(Outcome(moved_bytes))
            return
        start, error = failure
        self._failure = _with_place(error, self.offset + start, self.path)
        self.finish(Outcome(moved_bytes, error.errno or 0, error.detail))


def _with_place(error: TransferError, offset: int, path: Path) -> TransferError:
    """Return a member's failure with where its bytes are in the striped file."""
    place = f"from offset {offset} on of {path}"
    placed = TransferError(
        error.errno or 0,
        error.operation,
        error.path,
        error.offset,
        error.wanted_bytes,
        error.moved_bytes,
        f"{error.detail}, {place}" if error.detail else place,
    )
    placed.__cause__ = error.__cause__
    return placed


AnySpan = TypeVar("AnySpan", Span, DeviceSpan)
Start = Callable[[list[Transfer], TransferFile, Sequence[tuple[int, AnySpan]]], list[Ticket]]


@dataclass(frozen=True, slots=True)
class _Placed(Generic[AnySpan]):
    """A piece of one of several requests."""

    whole: StripedTransfer
    member: int
    further: bool
    offset: int
    start: int
    span: AnySpan


def start_striped(
    operation: Operation,
    file: StripedFile,
    requests: Sequence[tuple[int, AnySpan]],
    start: Start[AnySpan],
    drain: Callable[[], None],
) -> list[Ticket]:
    """Start the pieces of valid requests by `start`, and return a ticket for each request.

    `drain` is called when that fails on the way [Note: pieces of a transfer].
    """
    lease = file.lease()
    wholes = [StripedTransfer(operation, file, offset, span, lease) for offset, span in requests]
    placed = [
        _Placed(
            whole,
            piece.member,
            number > 0,
            piece.offset,
            piece.start,
            _part(span, piece.start, piece.size_bytes),
        )
        for whole, (offset, span) in zip(wholes, requests, strict=True)
        for number, piece in enumerate(file.layout.pieces(offset, span.size_bytes))
    ]
    try:
        for (member, further), group in groupby(placed, lambda each: (each.member, each.further)):
            _start_run(operation, file.members[member], list(group), start, further=further)
    except BaseException:
        drain()
        raise
    return [Ticket(whole, whole.advance) for whole in wholes]


def _part(span: AnySpan, start: int, size_bytes: int) -> AnySpan:
    return span if size_bytes == span.size_bytes else span.sub(start, size_bytes)


def _start_run(
    operation: Operation,
    member: TransferFile,
    run: list[_Placed[AnySpan]],
    start: Start[AnySpan],
    *,
    further: bool,
) -> None:
    """Start pieces that lie in one member, in one call."""
    lease = member.lease()
    transfers = [Transfer(operation, member, each.offset, each.span, lease) for each in run]
    for transfer in transfers:
        transfer.further = further
    tickets = start(transfers, member, [(each.offset, each.span) for each in run])
    for each, transfer, ticket in zip(run, transfers, tickets, strict=True):
        each.whole.add(each.start, transfer, ticket)


def check_directories(directories: Sequence[Path]) -> None:
    """Raise ValueError for no directory or one that is there twice; warn of one device for two."""
    if not directories:
        raise ValueError("a striped file needs at least one directory, and none was given")
    seen: dict[object, Path] = {}
    devices: dict[object, Path] = {}
    for directory in directories:
        place, device = _identity(directory)
        if place in seen:
            raise ValueError(
                f"{directory} and {seen[place]} are the same directory; give each drive's once"
            )
        if device is not None and device in devices:
            warnings.warn(
                f"{directory} and {devices[device]} lie on the same device: striping over them "
                "brings nothing; give one directory of each drive",
                RuntimeWarning,
                stacklevel=4,
            )
        seen[place] = directory
        if device is not None:
            devices[device] = directory


def _identity(directory: Path) -> tuple[object, object]:
    """Return what tells a directory, and its device, from others; None for an unknown device."""
    try:
        status = directory.stat()
    except OSError:  # whoever makes a file there says what is wrong
        return Path(os.path.abspath(directory)), None  # noqa: PTH100  resolve() may loop
    return (status.st_dev, status.st_ino), _drive_of(status.st_dev)


def _drive_of(device: int) -> object:
    """Return the drive that holds a file system, or the file system's number if that is unknown."""
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    try:
        resolved = node.resolve(strict=True)
    except OSError:
        return device
    return str(resolved.parent if (resolved / "partition").exists() else resolved)
