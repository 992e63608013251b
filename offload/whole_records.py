"""What an optimizer of whole tensors keeps: a record a parameter, in memory or in the swap file.

[Note: whole records] The record of a parameter is its state tensors, of any shape and type, one
after the other. Records are admitted once, in one order, with the bytes that a trial found: those
that fit in what the plan leaves of host memory stay there, as torch made them; each of the others
has a place in the part of the swap file that the plan set aside. A record on NVMe is read as a
whole into one of two staging buffers and written from it, so the next one can be read, and the last
one written, while one is used. In a durable run all are in the file and each has two places, see
[Note: two places]; their checksums are in the commits.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aio_ops import Engine, HostArena, Span, Ticket, TransferError, TransferFile
from estimators import MemoryPlan, Section, Tier
from estimators.layout import align_up
from offload.copies import Copies, CopyEntry, checksum_of
from offload.ledger import Activity, Ledger, Link
from offload.transfers import CorruptionError, PageError

_TENSOR_ALIGNMENT_BYTES = 64

_WAITS = {Link.READ: Activity.READ_WAIT, Link.WRITE: Activity.WRITE_WAIT}

Form = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, type and shape of a tensor of a record."""


def record_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return what the record of these tensors takes; in a file it has whole sectors."""
    return sum(align_up(each.nbytes, _TENSOR_ALIGNMENT_BYTES) for each in tensors.values())


@dataclass(eq=False)
class _Record:
    """One parameter's."""

    name: str
    size_bytes: int
    place: int | None
    """Where the file has the first copy; None if it rests in memory."""
    forms: tuple[Form, ...] = ()
    resident: dict[str, Tensor] = field(default_factory=dict)
    checksum: int | None = None


@dataclass(eq=False)
class _Staging:
    """A buffer on its way to or from the file."""

    span: Span
    record: _Record | None = None
    ticket: Ticket | None = None
    link: Link = Link.READ


class WholeRecords:
    """The records of one rank."""

    def __init__(
        self,
        plan: MemoryPlan,
        io: tuple[Engine, TransferFile | None],
        ledger: Ledger,
        *,
        verify: bool = False,
        copies: Copies | None = None,
    ) -> None:
        self._engine, self._file = io
        self._ledger = ledger
        self._verifies = verify
        self._copies = copies
        self._left_bytes = plan.whole.resident_bytes
        self._end = plan.whole.area_offset
        self._stop = plan.whole.area_offset + plan.whole.area_bytes
        self._records: dict[str, _Record] = {}
        self._taken: _Record | None = None
        """The record whose buffer somebody is working in."""
        self._arena: HostArena | None = None
        self._buffers: list[_Staging] = []
        if plan.whole.area_bytes:
            size = plan.request.whole.record_bytes
            self._arena = HostArena(2 * size)
            whole = self._arena.whole()
            self._buffers = [_Staging(whole.sub(index * size, size)) for index in range(2)]

    def admit(self, name: str, size_bytes: int) -> None:
        """Make room for a record, which is empty; a name is admitted once.

        Raises:
            RuntimeError: if the plan has none.
        """
        if name in self._records:
            raise RuntimeError(f"the record of {name} was admitted already")
        if size_bytes <= self._left_bytes:
            self._left_bytes -= size_bytes
            self._records[name] = _Record(name, size_bytes, None)
            return
        place, copy_count = self._end, 1 if self._copies is None else 2
        self._end += copy_count * size_bytes
        if self._end > self._stop:
            raise RuntimeError(
                f"the record of {name} takes {size_bytes} bytes, and the plan has"
                f" {max(self._stop - place, 0)} left for those on NVMe"
            )
        self._records[name] = _Record(name, size_bytes, place)

    @property
    def paged_bytes(self) -> int:
        """Bytes of the records that rest in the file."""
        return sum(each.size_bytes for each in self._records.values() if each.place is not None)

    def forms(self, name: str) -> tuple[Form, ...]:
        """Return name, type and shape of each tensor of a record."""
        record = self._records.get(name)
        return record.forms if record is not None else ()

    def recall(self, name: str, forms: tuple[Form, ...]) -> None:
        """Take what an earlier process wrote, and `restore` has found whole; or nothing."""
        self._records[name].forms = forms
        self._records[name].resident = {}

    def start_reading(self, name: str) -> None:
        """Begin to read a record if it rests on NVMe and a buffer is free for it."""
        record = self._records.get(name)
        if record is None or record.place is None or not record.forms:
            return
        if self._read_of(record) is None and (buffer := self._spare(record)) is not None:
            self._submit(buffer, record, Link.READ)

    def take(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a record, which may be changed in place and are then put back.

        Those of a record on NVMe lie in a staging buffer until it is put, or another is taken.

        Raises:
            PageError: if the read failed.
            CorruptionError: if the bytes are not those that were written.
        """
        record = self._records[name]
        if record.place is None:
            size = sum(each.nbytes for each in record.resident.values())
            self._ledger.used_in_place(Tier.HOST, Section.STATE, size)
            return dict(record.resident)
        if not record.forms:
            return {}
        self._taken = None
        buffer = self._read_of(record) or self._require_spare(record)
        if buffer.record is not record:
            self._submit(buffer, record, Link.READ)
        self._finish(buffer)
        self._taken = record
        self._check(record, buffer)
        return dict(zip((form[0] for form in record.forms), _views(record, buffer), strict=True))

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors of a record; a write is in flight when this returns.

        Raises:
            RuntimeError: if they are more than the plan has room for; nothing has changed.
            PageError: if a write failed.
        """
        record = self._records[name]
        needed = record_bytes(tensors)
        if needed > record.size_bytes:
            raise RuntimeError(
                f"the optimizer keeps {needed} bytes of {name}, and its first steps on a tensor of"
                f" that shape kept at most {record.size_bytes}: make all state in the first steps"
            )
        record.forms = tuple((key, each.dtype, tuple(each.shape)) for key, each in tensors.items())
        if record.place is None:
            record.resident = dict(tensors)
            return
        buffer = self._read_of(record) or self._require_spare(record)
        self._finish(buffer)
        _fill(record, buffer, tensors)
        self._taken = None
        self._submit(buffer, record, Link.WRITE)

    def settle(self) -> None:
        """Wait for all writes.

        Raises:
            PageError: if one failed.
        """
        for buffer in self._buffers:
            self._free(buffer)

    def restore(self, by_place: dict[int, CopyEntry]) -> tuple[int, str]:
        """Read all that a commit has of the records; return the bytes, and what is wrong.

        Takes what it finds out of `by_place`.
        """
        moved = 0
        for record in self._records.values():
            record.forms, record.checksum = (), None
            entry = by_place.pop(record.place, None) if record.place is not None else None
            if entry is None or record.place is None:
                continue
            buffer = self._buffers[0]
            offset = record.place + entry.copy * record.size_bytes
            span = buffer.span.sub(0, record.size_bytes)
            self._engine.submit_read(_required(self._file), offset, span).wait()
            moved += record.size_bytes
            if checksum_of(span) != entry.checksum:
                return moved, f"the state of {record.name} at {offset} has another checksum"
            record.checksum = entry.checksum
        return moved, ""

    def close(self) -> None:
        """Give the memory back; nothing is in flight any more."""
        self._buffers = []
        self._records = {}
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _read_of(self, record: _Record) -> _Staging | None:
        """Return the buffer that a record was read into, or is being read into."""
        return next(
            (each for each in self._buffers if each.record is record and each.link is Link.READ),
            None,
        )

    def _spare(self, record: _Record) -> _Staging | None:
        """Return a buffer that nobody waits for, once what it wrote is written.

        The one that wrote the record comes first, so none is read before its last write is over;
        then one that writes nothing, then the older write: so the last one goes on meanwhile.
        """
        idle = [each for each in self._buffers if each.record is None or each.link is Link.WRITE]
        if not idle:
            return None
        buffer = min(idle, key=lambda each: (each.record is not record, each.record is not None))
        self._free(buffer)
        return buffer

    def _require_spare(self, record: _Record) -> _Staging:
        """Return a buffer in any case: what was read ahead into it is read again."""
        buffer = self._spare(record)
        if buffer is None:
            buffer = next(each for each in self._buffers if each.record is not self._taken)
            self._free(buffer)
        return buffer

    def _free(self, buffer: _Staging) -> None:
        self._finish(buffer)
        buffer.record = None

    def _submit(self, buffer: _Staging, record: _Record, link: Link) -> None:
        buffer.record, buffer.link = record, link
        self._buffers.sort(key=lambda each: each is buffer)  # the one used last is the last
        span = buffer.span.sub(0, record.size_bytes)
        place = self._place(record, span, link)
        submit = self._engine.submit_read if link is Link.READ else self._engine.submit_write
        self._ledger.submitted(link, record.name)
        try:
            buffer.ticket = submit(_required(self._file), place, span)
        except OSError as error:
            raise self._failed(buffer, record, error) from error

    def _place(self, record: _Record, span: Span, link: Link) -> int:
        """Return where a record is read, or written; what is written is hashed if anyone asks."""
        if record.place is None:
            raise RuntimeError(f"the record of {record.name} rests in memory")
        copy = 0
        if link is Link.READ:
            known = self._copies.current(record.place) if self._copies is not None else None
            copy = known.copy if known is not None else 0
        elif self._verifies or self._copies is not None:
            with self._ledger.timing(Activity.CHECKSUM):
                record.checksum = checksum_of(span)
            if self._copies is not None:
                copy = self._copies.begin_write(record.place, record.checksum)
        return record.place + copy * record.size_bytes

    def _finish(self, buffer: _Staging) -> None:
        record, ticket, buffer.ticket = buffer.record, buffer.ticket, None
        if record is None or ticket is None:
            return
        try:
            with self._ledger.timing(_WAITS[buffer.link]):
                ticket.wait()
        except OSError as error:
            raise self._failed(buffer, record, error) from error
        self._ledger.completed(buffer.link, record.name, {Section.STATE: record.size_bytes})

    def _failed(self, buffer: _Staging, record: _Record, error: OSError) -> PageError:
        self._ledger.ended(buffer.link, record.name)
        buffer.record = None
        if buffer.link is Link.WRITE and self._copies is not None and record.place is not None:
            self._copies.forget(record.place)
        cause = (
            str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
        )
        return PageError(
            error.errno,
            f"the {buffer.link.verb} of the state of {record.name}, {record.size_bytes} bytes,"
            f" failed: {cause}",
        )

    def _check(self, record: _Record, buffer: _Staging) -> None:
        if not self._verifies or record.checksum is None:
            return
        with self._ledger.timing(Activity.CHECKSUM):
            found = checksum_of(buffer.span.sub(0, record.size_bytes))
        if found != record.checksum:
            buffer.record = None
            raise CorruptionError(
                errno.EIO,
                f"the state of {record.name}, {record.size_bytes} bytes at {record.place}, was"
                f" written with the checksum {record.checksum:032x} and read back with"
                f" {found:032x}: bits changed on the drive or on the way; they were not used. Check"
                " the drive, and start again from the last checkpoint",
            )


def _required(file: TransferFile | None) -> TransferFile:
    if file is None:
        raise RuntimeError("records of whole tensors page, and there is no swap file")
    return file


def _fill(record: _Record, buffer: _Staging, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors where they belong in a buffer, some of which lie elsewhere in it.

    An optimizer may have exchanged them, so what moves within the buffer is copied out first.
    """
    memory = range(buffer.span.address, buffer.span.address + buffer.span.size_bytes)
    moves: list[tuple[Tensor, Tensor]] = []
    for target, source in zip(_views(record, buffer), tensors.values(), strict=True):
        if source.data_ptr() != target.data_ptr() or not source.is_contiguous():
            moves.append((target, source.clone() if source.data_ptr() in memory else source))
    for target, source in moves:
        target.copy_(source)


def _views(record: _Record, buffer: _Staging) -> list[Tensor]:
    """Return the tensors of a record where they lie in a buffer."""
    found = []
    start = 0
    memory = buffer.span.view()
    for _, dtype, shape in record.forms:
        numel = torch.Size(shape).numel()
        size = numel * dtype.itemsize
        if numel:
            values = torch.frombuffer(memory[start : start + size], dtype=dtype, count=numel)
        else:
            values = torch.empty(0, dtype=dtype, device="cpu")
        found.append(values.view(shape))
        start += align_up(size, _TENSOR_ALIGNMENT_BYTES)
    return found
