"""Pages records between their extents and slots, with read-ahead and write-behind.

[Note: pager invariants]
1. A slot's memory belongs to the engine while its state is PAGING_IN or PAGING_OUT; nobody else
   touches it.
2. No read of an extent is submitted while a write of the same extent is in flight, and a clean
   slot that was read ahead is dropped when its extent is written, so a read never returns bytes
   older than the last write.
3. A failed page-out makes the pager FAILED: what is on the disk is no longer what was computed, so
   every later call refuses and says why.
4. Demand paging never fails for want of a slot: it waits for a write, then evicts what was read
   ahead. Only a pool whose slots are all leased raises, which is a fault of the caller.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from aio_ops import Engine, TransferError, TransferFile
from estimators import Extent, Section
from offload.ledger import Activity, Ledger, Link
from offload.slots import Slot, SlotState


class PageError(OSError):
    """A page-in or page-out failed; names the record, the extent and what the transfer said."""


class PagerFailedError(RuntimeError):
    """The pager refuses to work because an earlier page-out or update failed."""


class PagerState(enum.Enum):
    """Whether what the swap file holds can be trusted."""

    READY = "ready"
    FAILED = "failed"


class Pager:
    """Moves sections of extents through a fixed pool of slots."""

    def __init__(
        self, engine: Engine, file: TransferFile, slots: Sequence[Slot], ledger: Ledger
    ) -> None:
        self._engine = engine
        self._file = file
        self._slots = slots
        self._ledger = ledger
        self._write_order: list[Slot] = []
        self.state = PagerState.READY
        self._reason = ""

    def page_in(self, extent: Extent, sections: frozenset[Section]) -> Slot:
        """Lend a slot that holds the given sections of `extent`, reading them if need be.

        Raises:
            PageError: if the read fails; the slot is free again.
            PagerFailedError: if the pager has failed before.
        """
        self._check()
        slot = self._find_read_ahead(extent)
        if slot is not None and not sections <= slot.sections:
            self._evict(slot)
            slot = None
        if slot is None:
            self._settle_write(extent)
            slot = self._take_slot()
            self._submit_read(slot, extent, sections)
        with self._ledger.timing(Activity.READ_WAIT):
            self._finish_read(slot)
        slot.is_leased = True
        return slot

    def blank(self, extent: Extent) -> Slot:
        """Lend a slot for `extent` without reading: for state that was never written."""
        self._check()
        ahead = self._find_read_ahead(extent)
        if ahead is not None:
            self._evict(ahead)
        slot = self._take_slot()
        slot.move_to(SlotState.RESIDENT)
        slot.extent, slot.is_leased = extent, True
        return slot

    def read_ahead(self, extent: Extent, sections: frozenset[Section]) -> bool:
        """Start reading into a spare slot; return False if none is spare or a write is in flight.

        True also if the extent is already on its way.
        """
        self._check()
        self._reap_writes()
        if self._find_read_ahead(extent) is not None:
            return True
        if any(slot.extent is extent for slot in self._slots):
            return False  # being written or lent out
        if sum(slot.is_read_ahead for slot in self._slots) >= len(self._slots) - 1:
            return False  # one slot is kept for demand
        slot = next((slot for slot in self._slots if slot.state is SlotState.FREE), None)
        if slot is None:
            return False
        self._submit_read(slot, extent, sections)
        return True

    def page_out(self, slot: Slot, sections: frozenset[Section]) -> None:
        """Start writing the given sections from a leased slot; the slot returns when written.

        Raises:
            PagerFailedError: if the pager has failed before.
            PageError: if the write cannot even be submitted.
        """
        self._check()
        extent = slot.require_leased()
        self._settle_write(extent)
        ahead = self._find_read_ahead(extent)
        if ahead is not None:
            self._evict(ahead)
        start, size = extent.span(sections)
        slot.move_to(SlotState.PAGING_OUT)
        slot.sections = sections
        slot.is_leased = False
        self._ledger.submitted(Link.WRITE, extent.name)
        try:
            slot.ticket = self._engine.submit_write(
                self._file, extent.offset + start, slot.span.sub(start, size)
            )
        except OSError as error:
            raise self._write_failed(slot, extent, error) from error
        self._write_order.append(slot)

    def release(self, slot: Slot) -> None:
        """Take back a leased slot that was not changed."""
        slot.require_leased()
        slot.clear()

    def reclaim(self) -> None:
        """Bring every slot to rest after an interruption, wherever it struck.

        What was read or lent is dropped, writes that are in flight are waited for. A write that
        was interrupted before it began is lost, so the pager has FAILED.
        """
        if self.state is PagerState.FAILED:
            return
        self._engine.drain()
        self._write_order.clear()
        for slot in self._slots:
            if slot.state is SlotState.PAGING_OUT and slot.ticket is not None:
                self._write_order.append(slot)
                self._finish_write(slot)
            elif slot.state is SlotState.PAGING_OUT:
                self.fail("a page-out was interrupted before it began")
            elif slot.state is not SlotState.FREE:
                if slot.state is SlotState.PAGING_IN and slot.ticket is not None and slot.extent:
                    self._ledger.ended(Link.READ, slot.extent.name)
                slot.clear()

    def drain(self) -> None:
        """Wait until nothing is in flight; what was read ahead is dropped.

        Raises:
            PageError: if a write failed; the pager has FAILED.
        """
        self._check()
        with self._ledger.timing(Activity.WRITE_WAIT):
            while self._write_order:
                self._finish_write(self._write_order[0])
        for slot in self._slots:
            if slot.is_read_ahead:
                self._evict(slot)

    def fail(self, reason: str) -> None:
        """Refuse all further work: `reason` says what is torn, and adds to earlier reasons."""
        self.state = PagerState.FAILED
        self._reason = f"{self._reason}; {reason}" if self._reason else reason

    def close(self) -> None:
        """Wait for the engine and forget all slots; never raises for a transfer."""
        self._engine.drain()
        self._write_order.clear()
        self.fail("its engine was destroyed")

    def _check(self) -> None:
        if self.state is PagerState.FAILED:
            raise PagerFailedError(
                f"the pager refuses to work because {self._reason}; the state on NVMe cannot be"
                " trusted: start again from the last checkpoint"
            )

    def _find_read_ahead(self, extent: Extent) -> Slot | None:
        for slot in self._slots:
            if slot.extent is extent and slot.is_read_ahead:
                return slot
        return None

    def _take_slot(self) -> Slot:
        """Return a free slot: see invariant 4 of [Note: pager invariants]."""
        self._reap_writes()
        for slot in self._slots:
            if slot.state is SlotState.FREE:
                return slot
        with self._ledger.timing(Activity.SLOT_WAIT):
            if self._write_order:
                slot = self._write_order[0]
                self._finish_write(slot)
                return slot
            for slot in self._slots:
                if slot.is_read_ahead:
                    self._evict(slot)
                    return slot
        raise RuntimeError(
            f"all {len(self._slots)} slots are lent out at once; one page at a time is needed"
        )

    def _evict(self, slot: Slot) -> None:
        if slot.state is SlotState.PAGING_IN:
            self._finish_read(slot)
        slot.clear()

    def _submit_read(self, slot: Slot, extent: Extent, sections: frozenset[Section]) -> None:
        start, size = extent.span(sections)
        slot.move_to(SlotState.PAGING_IN)
        slot.extent, slot.sections = extent, sections
        self._ledger.submitted(Link.READ, extent.name)
        try:
            slot.ticket = self._engine.submit_read(
                self._file, extent.offset + start, slot.span.sub(start, size)
            )
        except OSError as error:
            self._ledger.ended(Link.READ, extent.name)
            slot.clear()
            raise _page_error(extent, SlotState.PAGING_IN, error) from error

    def _finish_read(self, slot: Slot) -> None:
        if slot.state is not SlotState.PAGING_IN or slot.ticket is None or slot.extent is None:
            return
        extent = slot.extent
        try:
            slot.ticket.wait()
        except OSError as error:
            self._ledger.ended(Link.READ, extent.name)
            slot.clear()
            raise _page_error(extent, SlotState.PAGING_IN, error) from error
        slot.ticket = None
        slot.move_to(SlotState.RESIDENT)
        self._ledger.completed(Link.READ, extent.name, extent.bytes_of(slot.sections))

    def _settle_write(self, extent: Extent) -> None:
        for slot in list(self._write_order):
            if slot.extent is extent:
                with self._ledger.timing(Activity.WRITE_WAIT):
                    self._finish_write(slot)

    def _reap_writes(self) -> None:
        for slot in list(self._write_order):
            if slot.ticket is not None and slot.ticket.done():
                self._finish_write(slot)

    def _finish_write(self, slot: Slot) -> None:
        self._write_order.remove(slot)
        if slot.ticket is None or slot.extent is None:
            raise RuntimeError(f"slot {slot.index} has no write in flight")
        extent = slot.extent
        try:
            slot.ticket.wait()
        except OSError as error:
            raise self._write_failed(slot, extent, error) from error
        self._ledger.completed(Link.WRITE, extent.name, extent.bytes_of(slot.sections))
        slot.clear()

    def _write_failed(self, slot: Slot, extent: Extent, error: OSError) -> PageError:
        """Keep the bytes in their slot and refuse all further work."""
        self._ledger.ended(Link.WRITE, extent.name)
        slot.move_to(SlotState.RESIDENT)
        slot.is_leased = True  # never reused: its bytes exist nowhere else
        failure = _page_error(extent, SlotState.PAGING_OUT, error)
        self.fail(f"a page-out failed ({failure})")
        return failure


def _page_error(extent: Extent, state: SlotState, error: OSError) -> PageError:
    cause = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
    return PageError(
        error.errno,
        f"record {extent.name}: {state.name} of Extent(offset={extent.offset},"
        f" size_bytes={extent.size_bytes}) failed: {cause}",
    )
