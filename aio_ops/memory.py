"""Addresses that keep their owner alive, and the arena that host memory is carved from.

[Note: memory outlives its users]
An arena's mapping is an object of its own. The arena, every span carved from it and every view of
such a span refer to it, and it is unmapped when the last of them is gone. So `HostArena.close`
never pulls memory from under a transfer or a tensor: it only gives up the arena's own reference.
"""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from aio_ops.linux import last_error, libc

_HUGEPAGE_BYTES = 2 << 20
_ADDRESS_SPACE_BYTES = 1 << 57  # with the page tables of five levels
_PROT_READ_WRITE = 0x1 | 0x2
_MAP_PRIVATE_ANONYMOUS = 0x02 | 0x20
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MAP_FAILED = ctypes.c_void_p(-1).value


def align_up(size_bytes: int, alignment_bytes: int) -> int:
    """Round up to a multiple of `alignment_bytes`."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes at an address, with the object that keeps them allocated."""

    address: int
    size_bytes: int
    owner: object = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size_bytes < 0:
            raise ValueError(f"a span cannot have {self.size_bytes} bytes")
        if self.address <= 0 < self.size_bytes:
            raise ValueError(
                f"a span of {self.size_bytes} bytes cannot start at address {self.address}; "
                "is its tensor empty or its storage freed?"
            )

    def sub(self, offset_bytes: int, size_bytes: int) -> "Span":
        """Return a part of this span, with the same owner."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {offset_bytes + size_bytes} are not inside a span of "
                f"{self.size_bytes} bytes"
            )
        return Span(self.address + offset_bytes, size_bytes, self.owner)

    def view(self) -> memoryview:
        """Return the bytes as a writable memoryview that keeps the owner alive."""
        array = (ctypes.c_char * self.size_bytes).from_address(self.address)
        array.owner = self.owner  # type: ignore[attr-defined]
        return memoryview(array).cast("B")


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """Bytes in the memory of a CUDA device, with the object that keeps them allocated."""

    device: int
    address: int
    size_bytes: int
    owner: object = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or self.address <= 0 < self.size_bytes:
            raise ValueError(
                f"{self.size_bytes} bytes cannot start at address {self.address} of a device"
            )

    def sub(self, offset_bytes: int, size_bytes: int) -> "DeviceSpan":
        """Return a part of this span, with the same owner."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {offset_bytes + size_bytes} are not inside a span of "
                f"{self.size_bytes} bytes of a device"
            )
        return DeviceSpan(self.device, self.address + offset_bytes, size_bytes, self.owner)


class Mapping:
    """Anonymous private memory, unmapped when nothing refers to it any more."""

    def __init__(self, size_bytes: int, alignment_bytes: int) -> None:
        self.before_unmap: list[Callable[[], None]] = []
        self._libc = libc()
        self._process_id = os.getpid()
        self.size_bytes = size_bytes
        self.address = 0
        # The kernel aligns to pages only: map more, then give back both ends.
        slack_bytes = alignment_bytes - os.sysconf("SC_PAGE_SIZE")
        start = self._libc.mmap(
            None, size_bytes + slack_bytes, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS, -1, 0
        )
        if start == _MAP_FAILED:
            raise MemoryError(
                f"cannot map {size_bytes} bytes of host memory ({last_error('mmap').strerror}); "
                "lower the host memory budget, or raise `ulimit -v` or the container's limit"
            )
        self.address = align_up(start, alignment_bytes)
        head_bytes = self.address - start
        self._unmap(start, head_bytes)
        self._unmap(self.address + size_bytes, slack_bytes - head_bytes)

    def advise(self, advice: int) -> None:
        """Tell the kernel how the memory will be used, or raise what it answers."""
        if self._libc.madvise(self.address, self.size_bytes, advice):
            raise last_error(f"madvise({advice}) on {self.size_bytes} bytes")

    def _unmap(self, address: int, size_bytes: int) -> None:
        if size_bytes and self._libc.munmap(address, size_bytes):
            raise last_error(f"munmap of {size_bytes} bytes")

    def __del__(self) -> None:
        # A forked child may not have the mapping (MADV_DONTFORK); something else may be there.
        if self.address and os.getpid() == self._process_id:
            for give_back in self.before_unmap:
                give_back()
            self._unmap(self.address, self.size_bytes)


class HostArena:
    """Host memory of one exact size, mapped at once and carved into spans.

    It is on 2 MiB pages where the kernel allows (the largest lever on direct I/O rates). Memory
    that transfers use is not inherited by forked children, so that a fork during direct I/O cannot
    move its pages, and a child must not touch it; `inherited` memory is, and must not be used for
    transfers. Memory is never given back to the arena: carve once, then reuse.
    """

    def __init__(self, size_bytes: int, *, hugepages: bool = True, inherited: bool = False) -> None:
        if size_bytes <= 0:
            raise ValueError(f"an arena needs at least one byte, {size_bytes} were asked for")
        if size_bytes >= _ADDRESS_SPACE_BYTES:
            raise MemoryError(
                f"cannot map {size_bytes} bytes of host memory (more than the address space of a "
                "process); lower the host memory budget"
            )
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        self.size_bytes = align_up(size_bytes, page_bytes)
        self.used_bytes = 0
        huge = hugepages and self.size_bytes >= _HUGEPAGE_BYTES
        mapping = Mapping(self.size_bytes, _HUGEPAGE_BYTES if huge else page_bytes)
        if not inherited:
            mapping.advise(_MADV_DONTFORK)
        self.hugepages = huge and _try_hugepages(mapping)
        self._mapping: Mapping | None = mapping

    def whole(self) -> Span:
        """Return all of the arena, whatever is carved from it: what an engine can register."""
        mapping = self._require_open()
        return Span(mapping.address, self.size_bytes, mapping)

    def _require_open(self) -> Mapping:
        if self._mapping is None:
            raise RuntimeError("the arena is closed; nothing can be carved from it")
        return self._mapping

    def carve(self, size_bytes: int, *, alignment_bytes: int = 4096) -> Span:
        """Return the next `size_bytes` of the arena, at a multiple of `alignment_bytes`."""
        mapping = self._require_open()
        if size_bytes <= 0:
            raise ValueError(f"a span needs at least one byte, {size_bytes} were asked for")
        if alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
            raise ValueError(f"alignment_bytes must be a power of two, got {alignment_bytes}")
        base = mapping.address
        start = align_up(base + self.used_bytes, alignment_bytes)
        stop_bytes = start - base + size_bytes
        if stop_bytes > self.size_bytes:
            raise MemoryError(
                f"{size_bytes} bytes aligned to {alignment_bytes} do not fit in the host arena: "
                f"{self.used_bytes} of its {self.size_bytes} bytes are used"
            )
        self.used_bytes = stop_bytes
        return Span(start, size_bytes, mapping)

    def close(self) -> None:
        """Give the memory up; it is unmapped once no span or view of it is left."""
        self._mapping = None  # [Note: memory outlives its users]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _try_hugepages(mapping: Mapping) -> bool:
    try:
        mapping.advise(_MADV_HUGEPAGE)
    except OSError:  # a kernel without transparent huge pages; small pages are slower, not wrong
        return False
    return True
