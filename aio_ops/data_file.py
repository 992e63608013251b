"""Files with a name and an exact size: written once from end to end, or read; direct I/O if it can.

Transfers may have any offset and size; what is not aligned costs a copy through the page cache. A
file that is written reaches to the next multiple of the alignment, and is cut to size at the end.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Self

from aio_ops.linux import require_linux, stated_direct_alignment
from aio_ops.memory import align_up
from aio_ops.swapfile import (
    _MINIMUM_ALIGNMENT_BYTES,
    Descriptor,
    SwapFile,
    _open_edge,
    _reserve,
    _try_direct,
)


class DataFile(SwapFile):
    """A named file for transfers; `exact_bytes` are what it holds once it is finished."""

    exact_bytes: int

    @classmethod
    def create_new(cls, path: Path, exact_bytes: int) -> Self:
        """Make a file and reserve its space.

        Raises:
            OSError: if it is there already, or there is no room for it; then nothing is left.
        """
        require_linux()
        if exact_bytes <= 0:
            raise ValueError(f"a data file cannot have {exact_bytes} bytes")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = Descriptor(os.open(path, flags, 0o666))
        try:
            stated_bytes = stated_direct_alignment(descriptor.number)
            alignment_bytes = max(stated_bytes or 0, _MINIMUM_ALIGNMENT_BYTES)
            size_bytes = align_up(exact_bytes, alignment_bytes)
            _reserve(descriptor.number, path.parent, size_bytes)
            refusal = _try_direct(descriptor.number, alignment_bytes, stated_bytes)
            if refusal is None:
                descriptor.edge = _open_edge(descriptor.number)
            file = cls(
                descriptor,
                path,
                size_bytes,
                alignment_bytes=alignment_bytes,
                direct=refusal is None,
            )
        except BaseException:
            descriptor.close()
            path.unlink(missing_ok=True)
            raise
        file.exact_bytes = exact_bytes
        return file

    @classmethod
    def open_existing(cls, path: Path) -> Self:
        """Open a regular file for reading; a link is refused.

        Raises:
            OSError: if it is not there, or is something else than a file.
        """
        require_linux()
        # O_NONBLOCK: opening a pipe that nobody writes must not wait for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = Descriptor(os.open(path, flags))
        try:
            status = os.fstat(descriptor.number)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, f"{path} is no regular file")
            alignment_bytes = _MINIMUM_ALIGNMENT_BYTES
            stated_bytes = stated_direct_alignment(descriptor.number)
            alignment_bytes = max(stated_bytes or 0, alignment_bytes)
            direct = stated_bytes != 0 and _switch_to_direct(descriptor, path, status.st_size)
            file = cls(
                descriptor, path, status.st_size, alignment_bytes=alignment_bytes, direct=direct
            )
        except BaseException:
            descriptor.close()
            raise
        file.exact_bytes = status.st_size
        return file

    def finish(self) -> None:
        """Cut a written file to its exact size and return once it will be there after a crash."""
        os.ftruncate(self.fileno(), self.exact_bytes)
        os.fsync(self.fileno())


def _switch_to_direct(descriptor: Descriptor, path: Path, size_bytes: int) -> bool:
    """Read around the page cache if the file system can, with its ragged end through the cache."""
    if size_bytes < _MINIMUM_ALIGNMENT_BYTES:
        return False
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT
    try:
        number = os.open(path, flags)
    except OSError:
        return False
    if not os.path.sameopenfile(number, descriptor.number):
        os.close(number)
        return False
    descriptor.edge = Descriptor(descriptor.number)
    descriptor.number = number
    return True
