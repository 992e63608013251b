"""Slots: staging buffers in host memory, lent out one at a time, in states of one table."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from aio_ops import HostArena, Span
from estimators import Extent, Section, SlotPlan
from offload.device import PASSED, Fence


class SlotState(enum.Enum):
    """What a slot holds."""

    FREE = "free"
    PAGING_IN = "paging in"
    RESIDENT = "resident"
    PAGING_OUT = "paging out"


_NEXT = {
    SlotState.FREE: {SlotState.PAGING_IN, SlotState.RESIDENT},
    SlotState.PAGING_IN: {SlotState.RESIDENT, SlotState.FREE},
    SlotState.RESIDENT: {SlotState.PAGING_OUT, SlotState.FREE},
    SlotState.PAGING_OUT: {SlotState.FREE, SlotState.RESIDENT},
}


class Waitable(Protocol):
    """What is in flight for a slot: one transfer, or several at once."""

    def done(self) -> bool:
        """Return whether it is over, without waiting."""

    def wait(self) -> None:
        """Return once all bytes have moved, or raise."""


class Slot:
    """One staging buffer; byte k of the slot is byte k of the extent that it stages."""

    def __init__(self, index: int, span: Span) -> None:
        self.index = index
        self.span = span
        self.state = SlotState.FREE
        self.extent: Extent | None = None
        self.sections: frozenset[Section] = frozenset()
        self.ticket: Waitable | None = None
        self.fence: Fence = PASSED
        """The last copy between the slot and a device; [Note: copies]."""
        self.is_leased = False

    def move_to(self, state: SlotState) -> None:
        """Change state, refusing every step that the table does not allow."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"slot {self.index}: cannot go from {self.state} to {state}")
        self.state = state

    @property
    def is_read_ahead(self) -> bool:
        """Whether the slot was read, or is being read, for somebody who has not come yet."""
        return self.state in (SlotState.PAGING_IN, SlotState.RESIDENT) and not self.is_leased

    def clear(self) -> None:
        """Forget what the slot held."""
        self.move_to(SlotState.FREE)
        self.extent = None
        self.sections = frozenset()
        self.ticket = None
        self.is_leased = False

    def settle(self) -> None:
        """Wait until no copy uses the slot, so that its bytes can be read and written."""
        self.fence.wait()
        self.fence = PASSED

    def require_leased(self) -> Extent:
        """Return the extent that a lent slot stages, or raise if the slot is not lent out."""
        if self.extent is None or not self.is_leased or self.state is not SlotState.RESIDENT:
            raise RuntimeError(f"slot {self.index} is not lent out (state {self.state})")
        return self.extent

    def section(self, section: Section) -> Span:
        """Return the memory of one section of the extent that the slot stages."""
        if self.extent is None:
            raise RuntimeError(f"slot {self.index} stages nothing")
        offset = self.extent.offset_of(section)
        size = self.extent.bytes_of(frozenset({section}))[section]
        return self.span.sub(offset, size)


def carve_slots(arena: HostArena, plan: SlotPlan) -> Sequence[Slot]:
    """Carve the planned slots from an arena."""
    return [Slot(index, arena.carve(plan.size_bytes)) for index in range(plan.count)]
