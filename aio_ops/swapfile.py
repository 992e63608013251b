"""The swap file: reserved space, on direct I/O wherever the file system takes it.

It has no name and vanishes with its last descriptor; that of a durable run has one and stays.
"""

import contextlib
import errno
import os
import tempfile
import warnings
from pathlib import Path
from types import TracebackType
from typing import Self

from aio_ops.linux import require_linux, stated_direct_alignment
from aio_ops.memory import align_up

_MINIMUM_ALIGNMENT_BYTES = 4096
_NO_TMPFILE_ERRORS = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})


class Descriptor:
    """An open file descriptor, closed when nothing refers to it any more.

    Every transfer in flight refers to the descriptor it uses, so the number cannot be reused for
    another file while the kernel still moves bytes.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.edge: Descriptor | None = None  # the same file through the page cache

    def close(self) -> None:
        """Close it now; only right while no transfer can be using it."""
        if self.edge is not None:
            self.edge.close()
        number, self.number = self.number, -1
        if number >= 0:
            # If closed underneath: what had to last was synced, so there is nothing left to lose.
            with contextlib.suppress(OSError):
                os.close(number)

    def __del__(self) -> None:
        self.close()


class SwapFile:
    """A file of fixed size whose space is reserved."""

    def __init__(
        self,
        descriptor: Descriptor,
        path: Path,
        size_bytes: int,
        *,
        alignment_bytes: int,
        direct: bool,
    ) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.alignment_bytes = alignment_bytes
        self.direct = direct
        self._descriptor: Descriptor | None = descriptor

    @classmethod
    def create(cls, directory: Path, size_bytes: int, *, any_alignment: bool = False) -> "SwapFile":
        """Return a new file of `size_bytes` zero bytes in `directory`, or raise what is missing.

        Where direct I/O is refused the file is buffered and one warning says so. With
        `any_alignment` a direct file also takes requests that are not aligned: their aligned middle
        is direct and their ragged edges go through the page cache.
        """
        require_linux()
        if not 0 < size_bytes < 1 << 62:
            raise ValueError(f"a swap file cannot have {size_bytes} bytes")
        descriptor = Descriptor(_open_unnamed(directory))
        try:
            file = cls._prepare(descriptor, directory, size_bytes)
            if any_alignment and file.direct:
                descriptor.edge = _open_edge(descriptor.number)
            return file
        except BaseException:
            descriptor.close()  # not left to the frames of the error: they would keep the space
            raise

    @classmethod
    def create_named(cls, path: Path, size_bytes: int) -> "SwapFile":
        """Return a new file of zero bytes that stays, or raise; the path must be free.

        The caller syncs the directory. What cannot be reserved leaves no file.
        """
        require_linux()
        if not 0 < size_bytes < 1 << 62:
            raise ValueError(f"a swap file cannot have {size_bytes} bytes")
        flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC
        descriptor = Descriptor(os.open(path, flags, 0o600))
        try:
            return cls._prepare(descriptor, path.parent, size_bytes, path)
        except BaseException:
            descriptor.close()
            path.unlink()
            raise

    @classmethod
    def open_named(cls, path: Path, size_bytes: int) -> "SwapFile":
        """Return a file that `create_named` once made, with the bytes that it has.

        Raises:
            OSError: if there is none, or it has another size.
        """
        require_linux()
        descriptor = Descriptor(os.open(path, os.O_NOFOLLOW | os.O_RDWR | os.O_CLOEXEC))
        try:
            stated_bytes = stated_direct_alignment(descriptor.number)
            alignment_bytes = max(stated_bytes or 0, _MINIMUM_ALIGNMENT_BYTES)
            found_bytes = os.fstat(descriptor.number).st_size
            wanted_bytes = align_up(size_bytes, alignment_bytes)
            if found_bytes != wanted_bytes:
                raise OSError(
                    errno.EIO,
                    f"{path} has {found_bytes} bytes, and {wanted_bytes} are needed: it was cut or"
                    " belongs to something else",
                )
            refusal = _try_direct(descriptor.number, alignment_bytes, stated_bytes, writes=False)
        except BaseException:
            descriptor.close()
            raise
        return cls(
            descriptor, path, size_bytes, alignment_bytes=alignment_bytes, direct=refusal is None
        )

    @classmethod
    def _prepare(
        cls,
        descriptor: Descriptor,
        directory: Path,
        size_bytes: int,
        path: Path | None = None,
    ) -> "SwapFile":
        stated_bytes = stated_direct_alignment(descriptor.number)
        alignment_bytes = max(stated_bytes or 0, _MINIMUM_ALIGNMENT_BYTES)
        # Before O_DIRECT: the C library's emulation of fallocate writes single bytes.
        _reserve(descriptor.number, directory, align_up(size_bytes, alignment_bytes))
        refusal = _try_direct(descriptor.number, alignment_bytes, stated_bytes)
        if refusal is not None:
            warnings.warn(
                f"{directory} takes no direct I/O ({refusal}); the swap file is buffered: it "
                "competes for page cache and is slower. Use a directory on ext4, xfs or NVMe.",
                RuntimeWarning,
                stacklevel=3,
            )
        return cls(
            descriptor,
            path or Path(directory) / "<unlinked swap file>",
            size_bytes,
            alignment_bytes=alignment_bytes,
            direct=refusal is None,
        )

    def lease(self) -> Descriptor:
        """Return the descriptor; it stays open at least as long as the caller holds it."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        return self._descriptor

    def fileno(self) -> int:
        """Return the descriptor's number, or raise ValueError when the file is closed."""
        return self.lease().number

    @property
    def any_alignment(self) -> bool:
        """Whether requests that are not aligned are taken, too."""
        return not self.direct or self.edge_fileno() >= 0

    def edge_fileno(self) -> int:
        """Return the descriptor for what is not aligned, or -1 when there is none."""
        edge = self.lease().edge
        return -1 if edge is None else edge.number

    def sync(self) -> None:
        """Return once everything that was written will be there after a crash."""
        os.fdatasync(self.fileno())

    def close(self) -> None:
        """Give the file up; without a name its space is freed once no transfer uses it."""
        self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _open_unnamed(directory: Path) -> int:
    """Open a file that no directory names, so that even a killed process leaves nothing."""
    flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE_ERRORS:
            raise
    descriptor, name = tempfile.mkstemp(prefix=".tierzero-", dir=directory)
    Path(name).unlink()
    return descriptor


def _open_edge(descriptor: int) -> Descriptor:
    """Open a file again, without direct I/O: a flag of an open file holds for all who use it."""
    edge = Descriptor(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
    # No reading ahead: that would fill the page cache with what direct I/O is about to change.
    os.posix_fadvise(edge.number, 0, 0, os.POSIX_FADV_RANDOM)
    return edge


def _reserve(descriptor: int, directory: Path, size_bytes: int) -> None:
    """Reserve the space, because free bytes that are only looked at can be taken by others."""
    status = os.statvfs(directory)  # before: a failed attempt may leave the disk full for a moment
    free_bytes = status.f_bavail * status.f_frsize
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        remedy = {
            errno.ENOSPC: "free some space, or use another directory",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "raise the limit on file sizes (`ulimit -f`) or use another file system",
        }.get(error.errno or 0, "use another directory")
        raise OSError(
            error.errno,
            f"cannot reserve {size_bytes} bytes for a file in {directory}, which had "
            f"{free_bytes} bytes free: {error.strerror}; {remedy}",
        ) from error


def _try_direct(
    descriptor: int, alignment_bytes: int, stated_bytes: int | None, *, writes: bool = True
) -> str | None:
    """Switch the file to direct I/O and return None, or leave it buffered and return why.

    Without `writes` it is only tried to read: the file has bytes that count.
    """
    import fcntl  # not at the top: this package must import on every platform
    import mmap

    if stated_bytes == 0:
        return "the file system states that it has none"
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, alignment_bytes) as block:  # zeros at a page boundary, as the file has
            moved_bytes = os.pwrite(descriptor, block, 0) if writes else alignment_bytes
            if moved_bytes == alignment_bytes:
                moved_bytes = os.preadv(descriptor, [block], 0)
    except OSError as error:
        refusal = f"{error.strerror}"
    else:
        if moved_bytes == alignment_bytes:
            return None
        refusal = f"a test moved {moved_bytes} of {alignment_bytes} bytes"
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return refusal
