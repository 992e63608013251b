"""Locked host memory, and the table that knows which addresses are in it.

[Note: one table of locked memory]
Whether a page is locked is a fact of the process, so all handles share one table: what one of them
has locked counts as pinned with every other, and any of them may free it. The table holds memory
weakly. A region lives as long as an array over it, or a transfer, refers to it; freeing it takes
the lock away at once, and the memory goes with the last view.
"""

import bisect
import ctypes
import itertools
import os
import threading
import weakref
from collections import deque

from aio_ops.linux import libc
from aio_ops.memory import Span, align_up
from aio_ops.pinned import PinnedArena


class LockedRegion:
    """Memory of one exact size on locked pages, which its views keep alive."""

    def __init__(self, size_bytes: int, serial: int, gone: deque[tuple[int, int]]) -> None:
        with PinnedArena(size_bytes) as arena:
            self._memory = arena.carve(size_bytes)
        self.address = self._memory.address
        self.size_bytes = size_bytes
        self.serial = serial
        self._gone = gone
        self._process_id = os.getpid()

    def span(self) -> Span:
        """Return the whole region, which it keeps alive."""
        return Span(self.address, self.size_bytes, self)

    def unlock(self) -> None:
        """Take the lock away; the memory stays until its last view is gone."""
        if os.getpid() == self._process_id:  # a forked child does not have the mapping
            libc().munlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self._locked_bytes()))

    def _locked_bytes(self) -> int:
        return align_up(self.size_bytes, os.sysconf("SC_PAGE_SIZE"))

    def __del__(self) -> None:
        # Before the mapping goes, so that the address cannot have a new owner yet. Only noted: the
        # collector may run this while the table's lock is held.
        if hasattr(self, "_process_id"):
            self._gone.append((self.address, self.serial))


class LockedMemory:
    """Which addresses are on locked pages; looking one up takes O(log regions)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []  # sorted
        self._regions: dict[int, tuple[int, weakref.ref[LockedRegion]]] = {}  # serial, region
        self._gone: deque[tuple[int, int]] = deque()  # address, serial
        self._serials = itertools.count()

    def allocate(self, size_bytes: int) -> Span:
        """Return zero bytes on locked pages of their own, or raise OSError with the remedy."""
        region = LockedRegion(size_bytes, next(self._serials), self._gone)
        with self._lock:
            self._purge()
            self._regions[region.address] = (region.serial, weakref.ref(region))
            bisect.insort(self._starts, region.address)
        return region.span()

    def free(self, address: int) -> bool:
        """Unlock the region that starts at `address`; False when there is none."""
        with self._lock:
            self._purge()
            _, reference = self._regions.get(address, (0, None))
            region = reference() if reference is not None else None
            if region is None:
                return False
            self._forget(address)
        region.unlock()
        return True

    def covers(self, address: int, size_bytes: int) -> bool:
        """Return whether all of these bytes are inside one locked region."""
        with self._lock:
            self._purge()
            index = bisect.bisect_right(self._starts, address) - 1
            if index < 0:
                return False
            region = self._regions[self._starts[index]][1]()
        if region is None:
            return False
        return address + size_bytes <= region.address + region.size_bytes

    def _purge(self) -> None:
        while self._gone:
            address, serial = self._gone.popleft()
            if self._regions.get(address, (None, None))[0] == serial:
                self._forget(address)

    def _forget(self, address: int) -> None:
        del self._regions[address]
        del self._starts[bisect.bisect_left(self._starts, address)]


LOCKED = LockedMemory()  # [Note: one table of locked memory]
