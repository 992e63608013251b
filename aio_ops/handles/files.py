"""Files that a caller names or has open, on direct I/O wherever their file system takes it.

[Note: growing a file]
A write past the end first has its space reserved, which sets the size, before any byte moves. So a
full disk or a limit on file sizes is found at once, and blocks do not wait for each other in the
kernel, as they do while a file grows. When it fails, the space is given back, but only that of this
very write, and the size is left as it is: others may be writing to the same file.
"""

import contextlib
import ctypes
import errno
import os
import stat
from pathlib import Path

from aio_ops.linux import libc, stated_direct_alignment
from aio_ops.memory import Span

_MINIMUM_ALIGNMENT_BYTES = 4096  # a page: no page is moved directly and through the cache at once
_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_SPACE_REMEDIES = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "raise the limit on file sizes (`ulimit -f`), or use another file system",
}

Place = str | bytes | os.PathLike[str] | os.PathLike[bytes] | int


class _Lease:
    """Descriptors that close with the last reference, and that no engine registers.

    An engine registers what it can watch; for one transfer that costs more than it saves.
    """

    __slots__ = ("edge_number", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.edge_number = -1

    def close(self) -> None:
        """Close them now; only right while no transfer uses them."""
        for number in (self.number, self.edge_number):
            if number >= 0:
                with contextlib.suppress(OSError):
                    os.close(number)
        self.number = self.edge_number = -1

    def __del__(self) -> None:
        self.close()


class HandleFile:
    """A file for the transfers of one operation; it is a `TransferFile`."""

    def __init__(self, lease: _Lease, name: str, size_bytes: int, alignment_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.direct = alignment_bytes > 0
        self.alignment_bytes = alignment_bytes or 1
        self._lease = lease

    @property
    def path(self) -> Path:
        """A name for messages."""
        return Path(self.name)

    @property
    def any_alignment(self) -> bool:
        """Whether requests that are not aligned are taken."""
        return not self.direct or self._lease.edge_number >= 0

    def fileno(self) -> int:
        """Return the descriptor's number."""
        return self._lease.number

    def edge_fileno(self) -> int:
        """Return the descriptor for what is not aligned, or -1 when there is none."""
        return self._lease.edge_number

    def lease(self) -> object:
        """Return an object that keeps the descriptors open as long as it is held."""
        return self._lease

    def sync(self) -> None:
        """Return once everything that was written will be there after a crash."""
        os.fdatasync(self._lease.number)

    def close(self) -> None:
        """Close the descriptors at once; only right while no transfer uses them.

        Where none ever did, this is not left to the frames of an error, which live on with it.
        """
        self._lease.close()

    def admit(self, offset: int, span: Span) -> bool:
        """Open what a transfer needs that is not aligned; return whether it is that."""
        ragged = (offset | span.size_bytes | span.address) % self.alignment_bytes != 0
        if ragged and self._lease.edge_number < 0:
            mode = _flags_of(self._lease.number) & os.O_ACCMODE
            self._lease.edge_number = self.reopen(mode)
            # No reading ahead: it would cache what direct I/O is about to change.
            os.posix_fadvise(self._lease.edge_number, 0, 0, os.POSIX_FADV_RANDOM)
        return ragged

    def reopen(self, mode: int) -> int:
        """Return a new descriptor of the same file, through the page cache."""
        return os.open(f"/proc/self/fd/{self._lease.number}", mode | os.O_CLOEXEC)

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Make the file hold these bytes, or raise what is missing. [Note: growing a file]"""
        stop = offset + size_bytes
        if stop <= self.size_bytes:
            return
        start = max(offset, self.size_bytes)
        number = self._allocate(0, start, stop)
        if number in _SPACE_REMEDIES:
            self._allocate(_PUNCH_HOLE | _KEEP_SIZE, start, stop)
            raise OSError(
                number,
                f"cannot grow the file from {self.size_bytes} to {stop} bytes: "
                f"{os.strerror(number)}; {_SPACE_REMEDIES[number]}",
                self.name,
            )
        # Any other answer means that the file system reserves nothing: the write itself grows it.
        self.size_bytes = stop

    def _allocate(self, mode: int, start: int, stop: int) -> int:
        """Return 0, or the errno."""
        numbers = (ctypes.c_int(self._lease.number), ctypes.c_int(mode))
        bounds = (ctypes.c_int64(start), ctypes.c_int64(stop - start))
        return ctypes.get_errno() if libc().fallocate(*numbers, *bounds) else 0


class FileOpener:
    """Opens files for one handle; it remembers what the file systems say of direct I/O."""

    def __init__(self) -> None:
        self._alignments: dict[int, int] = {}  # by device

    def open(self, place: Place, *, writes: bool) -> HandleFile:
        """Return an open file that a caller names, or whose descriptor it gives."""
        if isinstance(place, int):
            number, name, own = _duplicate(place, writes), _name_of(place), False
        else:
            name, own = os.fsdecode(place), True
            number = _open_path(name, writes)
        lease = _Lease(number)
        try:
            status = os.fstat(number)
            alignment_bytes = self._alignment(number, status.st_dev, own=own)
            return HandleFile(lease, name, _size_of(number, status, name), alignment_bytes)
        except BaseException:
            lease.close()
            raise

    def _alignment(self, number: int, device: int, *, own: bool) -> int:
        """Return what direct I/O on an open file needs, or 0 when it goes through the cache."""
        flags = _flags_of(number)
        if not flags & os.O_DIRECT:
            return 0
        if device not in self._alignments:
            stated_bytes = stated_direct_alignment(number)
            self._alignments[device] = (
                0 if stated_bytes == 0 else max(stated_bytes or 0, _MINIMUM_ALIGNMENT_BYTES)
            )
        alignment_bytes = self._alignments[device]
        if alignment_bytes == 0 and own:
            import fcntl

            fcntl.fcntl(number, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return 0
        return alignment_bytes or _MINIMUM_ALIGNMENT_BYTES


def _name_of(number: int) -> str:
    link = f"/proc/self/fd/{number}"
    with contextlib.suppress(OSError):
        return os.readlink(link)  # noqa: PTH115  a name, not a path to use
    return link


def _size_of(number: int, status: os.stat_result, name: str) -> int:
    """Return the size of an open file, or raise when it has none."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    if stat.S_ISBLK(status.st_mode):
        return os.lseek(number, 0, os.SEEK_END)
    raise ValueError(f"{name} is no regular file and no disk: it has no offsets")


def _open_path(name: str, writes: bool) -> int:
    flags = (os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY) | os.O_CLOEXEC
    try:
        return os.open(name, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return os.open(name, flags, 0o600)  # the file system takes no direct I/O


def _duplicate(number: int, writes: bool) -> int:
    """Return a descriptor of our own for one of the caller's, which it may then close."""
    import fcntl

    flags = _flags_of(number)
    mode = flags & os.O_ACCMODE
    if mode == (os.O_RDONLY if writes else os.O_WRONLY):
        verb, missing = (
            ("written to", "O_WRONLY or O_RDWR") if writes else ("read from", "O_RDONLY or O_RDWR")
        )
        raise OSError(errno.EBADF, f"descriptor {number} cannot be {verb}: open it with {missing}")
    if writes and flags & os.O_APPEND:
        raise ValueError(
            f"descriptor {number} was opened with O_APPEND: the kernel would append whatever the "
            "offset says; open it without"
        )
    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 0)


def _flags_of(number: int) -> int:
    import fcntl

    return fcntl.fcntl(number, fcntl.F_GETFL)
