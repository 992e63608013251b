"""What memory and disk are really used, as the kernel counts it: pages, blocks, locked bytes."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from aio_ops import Span, TransferFile

_PAGE_MAP = Path("/proc/self/pagemap")
_STATUS = Path("/proc/self/status")
_ENTRY_BYTES = 8
_ENTRIES_AT_ONCE = 1 << 16
"""Half a megabyte of entries, whatever the size of the memory that they describe."""
_PRESENT = np.uint64(1 << 63)
_BLOCK_BYTES = 512


def resident_set_bytes(spans: Iterable[Span]) -> int:
    """Return the bytes of the pages, touched by the spans, that are in memory.

    A page that was never written takes no memory, so this may be less than the spans' sizes.
    """
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    present = 0
    with _PAGE_MAP.open("rb", buffering=0) as file:
        for span in spans:
            if not span.size_bytes:
                continue
            first = span.address // page_bytes
            stop = -(-(span.address + span.size_bytes) // page_bytes)
            file.seek(first * _ENTRY_BYTES)
            for start in range(first, stop, _ENTRIES_AT_ONCE):
                count = min(_ENTRIES_AT_ONCE, stop - start)
                entries = np.frombuffer(file.read(count * _ENTRY_BYTES), np.uint64)
                present += int(np.count_nonzero(entries & _PRESENT))
    return present * page_bytes


def process_bytes(*names: str) -> dict[str, int]:
    """Return lines of /proc/self/status such as VmRSS, VmHWM, VmLck and VmPin, in bytes."""
    found = {}
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        name, _, text = line.partition(":")
        if name in names:
            found[name] = int(text.split()[0]) * 1024
    return found


def disk_bytes(file: TransferFile | None) -> int | None:
    """Return the bytes of the blocks that a file takes (no file: 0; one in memory: None)."""
    if file is None:
        return 0
    try:
        return os.fstat(file.fileno()).st_blocks * _BLOCK_BYTES
    except io.UnsupportedOperation:
        return None
