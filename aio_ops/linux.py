"""The few Linux calls that the standard library does not offer, looked up at first use."""

import ctypes
import functools
import os
import sys

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_SIZE_BYTES = 256
_DIO_MEMORY_ALIGN_AT = 152
_DIO_OFFSET_ALIGN_AT = 156


def require_linux() -> None:
    """Raise one clear ImportError where the kernel interfaces of this package do not exist."""
    if sys.platform != "linux":
        raise ImportError(f"aio_ops needs Linux (direct I/O, O_TMPFILE); this is {sys.platform}")


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library with the signatures that this package calls."""
    require_linux()
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def last_error(what: str) -> OSError:
    """Return what the C library reported for its last failed call."""
    error_number = ctypes.get_errno()
    return OSError(error_number, f"{what}: {os.strerror(error_number)}")


def stated_direct_alignment(descriptor: int) -> int | None:
    """Return the alignment that the file system states for direct I/O on an open file.

    None: the kernel does not say. 0: the file system says that direct I/O is not possible.
    """
    memory_bytes, offset_bytes = stated_direct_alignments(descriptor)
    if memory_bytes is None or offset_bytes is None:
        return None
    return max(memory_bytes, offset_bytes)


def stated_direct_alignments(descriptor: int) -> tuple[int | None, int | None]:
    """Return the same for memory addresses and for file offsets."""
    buffer = ctypes.create_string_buffer(_STATX_SIZE_BYTES)
    try:
        failed = libc().statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    except AttributeError:  # a C library older than the call
        return None, None
    mask = int.from_bytes(buffer.raw[:4], sys.byteorder)
    if failed or not mask & _STATX_DIOALIGN:
        return None, None
    memory = buffer.raw[_DIO_MEMORY_ALIGN_AT : _DIO_MEMORY_ALIGN_AT + 4]
    offset = buffer.raw[_DIO_OFFSET_ALIGN_AT : _DIO_OFFSET_ALIGN_AT + 4]
    return int.from_bytes(memory, sys.byteorder), int.from_bytes(offset, sys.byteorder)
