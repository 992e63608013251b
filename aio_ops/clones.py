"""A copy of a swap file that shares its bytes until either is written, where file systems can.

It takes as long as its extents have entries, whatever its size: XFS and btrfs can, ext4 cannot.
"""

import errno
import logging
import os
from pathlib import Path

from aio_ops.striped_file import StripedFile
from aio_ops.swapfile import Descriptor, SwapFile, _open_unnamed, _try_direct
from aio_ops.transfer import TransferFile

_FICLONE = 0x4004_9409
_CANNOT = frozenset(
    {
        errno.EOPNOTSUPP,
        errno.ENOTTY,
        errno.EINVAL,
        errno.EXDEV,
        errno.EPERM,
        errno.ENOSYS,
        errno.ETXTBSY,
    }
)
_ROOM_SHARE = 1.1
"""What must be free, of what is cloned: each byte that is written while the clone lives takes new
room, which nobody can reserve."""

_log = logging.getLogger(__name__)


def clone_file(file: TransferFile) -> TransferFile | None:
    """Return a file with the bytes that another has now, or None if they cannot be shared.

    Nothing may be in flight to it. The clone has no name; closing it gives its room back.
    """
    if isinstance(file, StripedFile):
        members: list[TransferFile] = []
        for member in file.members:
            clone = clone_file(member)
            if clone is None:
                for each in members:
                    each.close()
                return None
            members.append(clone)
        return StripedFile(members, file.layout)
    if not isinstance(file, SwapFile):
        return None
    return _clone(file)


def _clone(file: SwapFile) -> SwapFile | None:
    import fcntl  # not at the top: this package must import on every platform

    directory = file.path.parent
    if not _has_room(file, directory):
        return None
    try:
        descriptor = Descriptor(_open_unnamed(directory))
    except OSError as error:
        _log.info("%s is copied, not cloned: %s", file.path, error.strerror)
        return None
    try:
        fcntl.ioctl(descriptor.number, _FICLONE, file.fileno())
        direct = file.direct and (
            _try_direct(descriptor.number, file.alignment_bytes, None, writes=False) is None
        )
    except OSError as error:
        descriptor.close()
        if error.errno not in _CANNOT:
            _log.warning("%s is copied, not cloned: %s", file.path, error.strerror)
        return None
    return SwapFile(
        descriptor,
        directory / f"<clone of {file.path.name}>",
        file.size_bytes,
        alignment_bytes=file.alignment_bytes,
        direct=direct,
    )


def _has_room(file: SwapFile, directory: Path) -> bool:
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    return free_bytes >= _ROOM_SHARE * file.size_bytes
