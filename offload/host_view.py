"""Sections of one sub-group as host memory, wherever they rest; for the processor's own work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aio_ops import Span
from estimators import Section, SubGroup
from offload.slots import Slot

if TYPE_CHECKING:
    from offload.store import Store

_ALIGNMENT_BYTES = 64


class HostView:
    """What rests on a device is copied out when it is asked for, and back when it was changed.

    Nothing else may be in flight between host and device meanwhile: making a view waits for it.
    """

    def __init__(
        self, store: Store, group: SubGroup, slot: Slot | None, staging: Span | None = None
    ) -> None:
        self._store = store
        self._group = group
        self._slot = slot
        self._staging = staging
        self._used_bytes = 0
        self._copies: dict[Section, Span] = {}
        if slot is not None:
            slot.settle()
        store.device.settle()

    def span(self, section: Section, *, reads: bool = True) -> Span:
        """Return the host memory of a section; without `reads` its bytes may be any."""
        memory = self._store.section_memory(self._group, section, self._slot)
        if isinstance(memory, Span):
            return memory
        if section not in self._copies:
            copy = self._copies[section] = self._allocate(memory.size_bytes)
            if reads:
                self._store.device.copy(memory, copy).wait()
        return self._copies[section]

    def put_back(self, section: Section) -> None:
        """Make what was changed of a section count."""
        copy = self._copies.get(section)
        if copy is None:
            return
        device = self._store.device
        target = self._store.section_memory(self._group, section, self._slot)
        fence = device.copy(copy, target)
        device.join(fence)
        fence.wait()

    def _allocate(self, size_bytes: int) -> Span:
        if self._staging is None:
            array = np.empty(size_bytes, np.uint8)
            return Span(array.ctypes.data, size_bytes, array)
        start = -(-self._used_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._used_bytes = start + size_bytes
        return self._staging.sub(start, size_bytes)
