"""Give memory that was freed back to the system, so that a budget holds for the process.

[Note: freed memory] Unsharded parameters and gradients come and go through the C library's heap.
glibc keeps freed blocks of up to 32 MiB for later, and between blocks of other sizes they pile up:
a process of 320 MB was seen to hold 480 MB. Asking for the pages back changes no setting of the
process, and costs about two milliseconds, so it is done once enough has been freed.
"""

from __future__ import annotations

import ctypes

TRIM_BYTES = 8 << 20
"""Bytes that may be freed before the heap is asked for them: a small part of any real budget."""


class HeapTrimmer:
    """Counts what is freed and asks for the pages back now and then; see [Note: freed memory]."""

    def __init__(self, trim_bytes: int = TRIM_BYTES) -> None:
        self._trim_bytes = trim_bytes
        self._freed_bytes = 0
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it

    def freed(self, size_bytes: int) -> None:
        """Take note of bytes that were just freed."""
        self._freed_bytes += size_bytes
        if self._freed_bytes >= self._trim_bytes:
            self.trim()

    def trim(self) -> None:
        """Ask for the pages of all that was freed."""
        self._freed_bytes = 0
        if self._malloc_trim is not None:
            self._malloc_trim(ctypes.c_size_t(0))
