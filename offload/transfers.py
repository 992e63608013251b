"""Move sections between slots and the swap file: one transfer a slot, failures with their record.

[Note: checksums] With `verify` every section is hashed as it is handed to the drive, padding
included, and hashed again when it is back, before anybody sees the slot. The hashes are kept in
memory: they guard what this run has written against the drive and the way to it. A durable run
hashes what it writes in any case, for its commits; whether page-ins are checked is up to `verify`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from aio_ops import Engine, Span, Ticket, TransferError, TransferFile
from estimators import Extent, Section
from offload.copies import Copies, checksum_of
from offload.ledger import Activity, Ledger, Link
from offload.slots import Slot, SlotState


class PageError(OSError):
    """A page-in or page-out failed; names the record, the extent and what the transfer said."""


class CorruptionError(PageError):
    """A section came back from NVMe with other bytes than were written; nothing has used them."""


class JointTicket:
    """Several transfers of one slot, whose bytes do not lie together in the file."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    def done(self) -> bool:
        """Return whether all are over, without waiting."""
        return all(ticket.done() for ticket in self._tickets)

    def wait(self) -> None:
        """Return once all are over, and raise what came of the first that failed."""
        for ticket in self._tickets:
            ticket.settle()
        for ticket in self._tickets:
            ticket.wait()


class SlotTransfers:
    """Starts and finishes the transfers of slots; whoever calls decides which and when."""

    def __init__(
        self,
        engine: Engine,
        file: TransferFile,
        ledger: Ledger,
        *,
        verify: bool = False,
        copies: Copies | None = None,
    ) -> None:
        self._engine = engine
        self._file = file
        self._ledger = ledger
        self._verifies = verify
        self._copies = copies
        self._checksums: dict[tuple[int, Section], int] = {}

    def start_read(self, slot: Slot, extent: Extent, sections: frozenset[Section]) -> None:
        """Start filling a free slot.

        Raises:
            PageError: if the read cannot even be submitted; the slot is free again.
        """
        second = self._copies.second(extent, sections) if self._copies is not None else frozenset()
        slot.move_to(SlotState.PAGING_IN)
        slot.extent, slot.sections = extent, sections
        self._ledger.submitted(Link.READ, extent.name)
        try:
            slot.ticket = self._submit(
                self._engine.submit_read, slot, extent.pieces(sections, second)
            )
        except OSError as error:
            raise self._read_failed(slot, extent, error) from error

    def finish_read(self, slot: Slot) -> None:
        """Wait for the read of a slot, if one is under way, and check what it brought.

        Raises:
            PageError: if the read failed; the slot is free again.
            CorruptionError: if the bytes are not those that were written; likewise.
        """
        if slot.state is not SlotState.PAGING_IN or slot.ticket is None or slot.extent is None:
            return
        extent = slot.extent
        try:
            slot.ticket.wait()
        except OSError as error:
            raise self._read_failed(slot, extent, error) from error
        slot.ticket = None
        slot.move_to(SlotState.RESIDENT)
        self._ledger.completed(Link.READ, extent.name, extent.bytes_of(slot.sections))
        self._check(slot, extent)

    def abandon(self, slot: Slot) -> None:
        """Take a transfer that the engine has finished as over, though nobody waited for it."""
        if slot.ticket is not None and slot.extent is not None:
            if slot.state is SlotState.PAGING_IN:
                self._ledger.ended(Link.READ, slot.extent.name)
            elif slot.state is SlotState.PAGING_OUT:
                self._ledger.ended(Link.WRITE, slot.extent.name)

    def start_write(self, slot: Slot) -> None:
        """Start writing the sections of a slot that is PAGING_OUT.

        Raises:
            PageError: if the write cannot even be submitted; the slot keeps its bytes.
        """
        extent = _extent_of(slot)
        slot.settle()
        second = self._begin_write(slot, extent)
        self._ledger.submitted(Link.WRITE, extent.name)
        try:
            slot.ticket = self._submit(
                self._engine.submit_write, slot, extent.pieces(slot.sections, second)
            )
        except OSError as error:
            raise self._write_failed(slot, extent, error) from error

    def finish_write(self, slot: Slot) -> None:
        """Wait for the write of a slot; the slot is free then.

        Raises:
            PageError: if the write failed; the slot keeps its bytes.
        """
        if slot.ticket is None:
            raise RuntimeError(f"slot {slot.index} has no write in flight")
        extent = _extent_of(slot)
        try:
            slot.ticket.wait()
        except OSError as error:
            raise self._write_failed(slot, extent, error) from error
        self._ledger.completed(Link.WRITE, extent.name, extent.bytes_of(slot.sections))
        slot.clear()

    def drain(self) -> None:
        """Wait until nothing is in flight; failures stay with their slots."""
        self._engine.drain()

    def _read_failed(self, slot: Slot, extent: Extent, error: OSError) -> PageError:
        self._ledger.ended(Link.READ, extent.name)
        slot.clear()
        return _page_error(extent, SlotState.PAGING_IN, error)

    def _write_failed(self, slot: Slot, extent: Extent, error: OSError) -> PageError:
        self._ledger.ended(Link.WRITE, extent.name)
        slot.move_to(SlotState.RESIDENT)
        slot.is_leased = True  # never reused: its bytes exist nowhere else
        return _page_error(extent, SlotState.PAGING_OUT, error)

    def _submit(
        self,
        submit: Callable[[TransferFile, int, Span], Ticket],
        slot: Slot,
        pieces: Sequence[tuple[int, int, int]],
    ) -> Ticket | JointTicket:
        """Start the transfer of each piece of a slot; none is in flight if one cannot be."""
        tickets: list[Ticket] = []
        try:
            for place, start, size in pieces:
                tickets.append(submit(self._file, place, slot.span.sub(start, size)))
        except BaseException:
            self._engine.drain()
            raise
        return tickets[0] if len(tickets) == 1 else JointTicket(tickets)

    def _begin_write(self, slot: Slot, extent: Extent) -> frozenset[Section]:
        """Hash what is about to be written, and return what goes to a second copy."""
        if not self._verifies and self._copies is None:
            return frozenset()
        second = set()
        with self._ledger.timing(Activity.CHECKSUM):
            for section in sorted(slot.sections):
                is_kept = self._copies is not None and section is not Section.GRADIENT
                if not extent.holds(section) or not (self._verifies or is_kept):
                    continue
                checksum = checksum_of(slot.section(section))
                self._checksums[extent.offset, section] = checksum
                if self._copies is not None and is_kept:
                    place = extent.copy_offset(section, 0)
                    if self._copies.begin_write(place, checksum) == 1:
                        second.add(section)
        return frozenset(second)

    def recall(self, extent: Extent, section: Section, checksum: int) -> None:
        """Take the checksum of what an earlier process wrote."""
        self._checksums[extent.offset, section] = checksum

    def _check(self, slot: Slot, extent: Extent) -> None:
        """Compare what was read with what was written, see [Note: checksums]."""
        if not self._verifies:
            return
        with self._ledger.timing(Activity.CHECKSUM):
            for section in sorted(slot.sections):
                written = self._checksums.get((extent.offset, section))
                if written is None or not extent.holds(section):
                    continue
                found = checksum_of(slot.section(section))
                if found != written:
                    slot.clear()
                    raise self._corruption(extent, section, written, found)

    def _corruption(
        self, extent: Extent, section: Section, written: int, found: int
    ) -> CorruptionError:
        size = extent.bytes_of(frozenset({section}))[section]
        return CorruptionError(
            errno.EIO,
            f"record {extent.name}: the {section.name.lower()} of Extent(offset={extent.offset},"
            f" size_bytes={extent.size_bytes}), {size} bytes at offset"
            f" {extent.offset + extent.offset_of(section)} of {self._file.path}, was written with"
            f" the checksum {written:032x} and read back with {found:032x}: bits changed on the"
            " drive or on the way; they were not used. Check the drive, and start again from the"
            " last checkpoint",
        )


def _extent_of(slot: Slot) -> Extent:
    if slot.extent is None:
        raise RuntimeError(f"slot {slot.index} stages nothing")
    return slot.extent


def _page_error(extent: Extent, state: SlotState, error: OSError) -> PageError:
    cause = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
    return PageError(
        error.errno,
        f"record {extent.name}: {state.name} of Extent(offset={extent.offset},"
        f" size_bytes={extent.size_bytes}) failed: {cause}",
    )
