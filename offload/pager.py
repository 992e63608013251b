"""Pages records between their extents and slots, with read-ahead and write-behind.

[Note: pager invariants]
1. A slot's memory belongs to the engine while its state is PAGING_IN or PAGING_OUT; nobody else
   touches it.
2. No read of an extent is submitted while a write of the same extent is in flight, and a clean
   slot that was read ahead is dropped when its extent is written, so a read never returns bytes
   older than the last write.
3. A failed page-out makes the pager FAILED: what is on the disk is no longer what was computed, so
   every later call refuses and says why.
4. A page-out is submitted at once, or held until `burst` of them go together (then no read-ahead
   starts while they are in flight: the drive alternates), or while a device copies into its slot.
   Whoever waits for a write, or for a slot, sends the held ones first.
5. Demand paging never fails for want of a slot: it waits for a write, then evicts what was read
   ahead. Only a pool whose slots are all leased raises, which is a fault of the caller.
6. A slot that was released or written to while a copy between it and a device is in flight keeps
   the fence: it is waited for before the slot is read into, lent or written out [Note: copies].
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from estimators import Extent, Section
from offload.ledger import Activity, Ledger
from offload.slots import Slot, SlotState
from offload.transfers import PageError, SlotTransfers


class PagerFailedError(RuntimeError):
    """The pager refuses to work because an earlier page-out or update failed."""


class PagerState(enum.Enum):
    """Whether what the swap file holds can be trusted."""

    READY = "ready"
    FAILED = "failed"


class Pager:
    """Moves sections of extents through a fixed pool of slots."""

    def __init__(
        self,
        transfers: SlotTransfers,
        slots: Sequence[Slot],
        ledger: Ledger,
        *,
        burst: int = 0,
    ) -> None:
        self._transfers = transfers
        self._slots = slots
        self._ledger = ledger
        self._burst = burst
        self._held: list[Slot] = []
        self._write_order: list[Slot] = []
        self.state = PagerState.READY
        self._reason = ""

    def page_in(
        self,
        extent: Extent,
        sections: frozenset[Section],
        then: Iterable[tuple[Extent, frozenset[Section]]] = (),
    ) -> Slot:
        """Lend a slot that holds the given sections of `extent`, reading them if need be.

        Args:
            extent: what to read.
            sections: which of its sections are needed.
            then: what to read ahead, in order, before this read is waited for.

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
            if self._burst > 1:
                self._finish_writes()
            slot = self._take_slot()
            self._transfers.start_read(slot, extent, sections)
        slot.is_leased = True  # not what read-ahead counts, nor what it may evict
        for following, wanted in then:
            if not self.read_ahead(following, wanted):
                break
        with self._ledger.timing(Activity.READ_WAIT):
            self._transfers.finish_read(slot)
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
        if self._find_read_ahead(extent) is not None:
            return True
        if self._burst > 1 or _free_slot(self._slots) is None or _holds(self._slots, extent):
            self._reap_writes()
        if _holds(self._slots, extent):
            return False  # being written or lent out
        if self._burst > 1 and self._write_order:
            return False  # the drive is writing a burst
        if sum(slot.is_read_ahead for slot in self._slots) >= len(self._slots) - 1:
            return False  # one slot is kept for demand
        slot = _free_slot(self._slots)
        if slot is None or not slot.fence.done():
            return False
        slot.settle()
        self._transfers.start_read(slot, extent, sections)
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
        slot.move_to(SlotState.PAGING_OUT)
        slot.sections = sections
        slot.is_leased = False
        self._held.append(slot)
        if self._burst <= 1:
            self._send_held(only_settled=True)
        elif len(self._held) >= self._burst:
            self._send_held()

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
        self._send_held()
        self._transfers.drain()
        self._write_order.clear()
        for slot in self._slots:
            if slot.state is SlotState.PAGING_OUT and slot.ticket is not None:
                self._write_order.append(slot)
                self._finish_write(slot)
            elif slot.state is SlotState.PAGING_OUT:
                self.fail("a page-out was interrupted before it began")
            elif slot.state is not SlotState.FREE:
                self._transfers.abandon(slot)
                slot.clear()

    def drain(self) -> None:
        """Wait until nothing is in flight; what was read ahead is dropped.

        Raises:
            PageError: if a write failed; the pager has FAILED.
        """
        self._check()
        self._finish_writes()
        for slot in self._slots:
            if slot.is_read_ahead:
                self._evict(slot)

    def fail(self, reason: str) -> None:
        """Refuse all further work: `reason` says what is torn, and adds to earlier reasons."""
        self.state = PagerState.FAILED
        self._reason = f"{self._reason}; {reason}" if self._reason else reason

    def close(self) -> None:
        """Wait for the engine and forget all slots; never raises for a transfer."""
        self._transfers.drain()
        for slot in self._slots:
            self._transfers.abandon(slot)
        self._slots = ()
        self._held.clear()
        self._write_order.clear()
        self.fail("its engine was destroyed")

    def _check(self) -> None:
        if self.state is PagerState.FAILED:
            raise PagerFailedError(
                f"the pager refuses to work because {self._reason}; the state on NVMe cannot be"
                " trusted: start again from the last checkpoint"
            )
        if self._held and self._burst <= 1:
            self._send_held(only_settled=True)

    def _find_read_ahead(self, extent: Extent) -> Slot | None:
        for slot in self._slots:
            if slot.extent is extent and slot.is_read_ahead:
                return slot
        return None

    def _take_slot(self) -> Slot:
        """Return a free slot: see invariant 5 of [Note: pager invariants]."""
        if _free_slot(self._slots) is None:
            self._reap_writes()
        free = _free_slot(self._slots)
        if free is not None:
            if not free.fence.done():
                with self._ledger.timing(Activity.SLOT_WAIT):
                    free.settle()
            return free
        self._send_held()
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
        self._transfers.finish_read(slot)
        slot.clear()

    def _send_held(self, *, only_settled: bool = False) -> None:
        """Submit the writes that were held to go together, or for a copy into their slots."""
        while self._held:
            slot = self._held[0]
            if only_settled and not slot.fence.done():
                return
            try:
                self._transfers.start_write(slot)
            except PageError as error:
                self._fail_write(error)
                raise
            self._held.pop(0)
            self._write_order.append(slot)

    def _finish_writes(self) -> None:
        """Wait for every write, held ones too."""
        self._send_held()
        with self._ledger.timing(Activity.WRITE_WAIT):
            while self._write_order:
                self._finish_write(self._write_order[0])

    def _settle_write(self, extent: Extent) -> None:
        if any(slot.extent is extent for slot in self._held):
            self._send_held()
        for slot in list(self._write_order):
            if slot.extent is extent:
                with self._ledger.timing(Activity.WRITE_WAIT):
                    self._finish_write(slot)

    def _reap_writes(self) -> None:
        """Take back the slots of writes that are over, as far as they end in order.

        Asking costs as much as a transfer of some 100 kB, so it is done only when it may help.
        """
        while self._write_order:
            slot = self._write_order[0]
            if slot.ticket is None or not slot.ticket.done():
                return
            self._finish_write(slot)

    def _finish_write(self, slot: Slot) -> None:
        self._write_order.remove(slot)
        try:
            self._transfers.finish_write(slot)
        except PageError as error:
            self._fail_write(error)
            raise

    def _fail_write(self, error: PageError) -> None:
        self.fail(f"a page-out failed ({error})")


def _free_slot(slots: Sequence[Slot]) -> Slot | None:
    """Return a free slot, one that no copy uses if there is one."""
    free = [slot for slot in slots if slot.state is SlotState.FREE]
    return next((slot for slot in free if slot.fence.done()), free[0] if free else None)


def _holds(slots: Sequence[Slot], extent: Extent) -> bool:
    return any(slot.extent is extent for slot in slots)
