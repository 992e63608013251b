"""Whether a directory can hold swap files: found out before anything is loaded or allocated."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from aio_ops import file_systems
from zero.errors import ConfigError

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_TMPFILE = getattr(os, "O_TMPFILE", 0)


class PreflightWarning(UserWarning):
    """A directory that works for swap files, but not as a drive does."""


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """What was found out about a directory for swap files."""

    path: Path
    file_system: str
    """Type of the file system, "unknown" where the kernel does not tell."""
    device: str
    free_bytes: int
    direct: bool
    """Whether the file system takes direct transfers (O_DIRECT)."""


def preflight(
    path: str | os.PathLike[str], needed_bytes: int, *, allow_any_file_system: bool = False
) -> PreflightReport:
    """Check a directory for swap files and report on it.

    Free bytes are looked at only for an early word: the space is reserved when the file is made.

    Args:
        path: Directory of the swap files.
        needed_bytes: What the plan will write there.
        allow_any_file_system: Accept a network file system, and do not warn of memory.

    Raises:
        ConfigError: The directory is on a network file system.
        OSError: It does not exist, is no directory, cannot be written, or is too full.
    """
    directory = Path(path)
    direct = require_writable(directory)
    file_system, device = _mount_of(directory)
    if not allow_any_file_system:
        _check_file_system(directory, file_system)
    free_bytes = _free_bytes(directory)
    if needed_bytes > free_bytes:
        raise OSError(
            errno.ENOSPC,
            f"nvme_path {directory}: the plan needs {needed_bytes} bytes, {free_bytes} are free; "
            "free some space, name another directory, or raise tiers.host_memory",
        )
    return PreflightReport(directory, file_system, device, free_bytes, direct)


def require_writable(directory: Path) -> bool:
    """Find out whether swap files can be made in a directory; return whether they can be direct.

    Raises:
        OSError: It does not exist, is no directory, or cannot be written.
    """
    _check_directory(directory)
    return _probe(directory)


def _check_directory(directory: Path) -> None:
    try:
        mode = directory.stat().st_mode
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT,
            f"nvme_path {directory} does not exist (working directory {Path.cwd()}); make it with "
            f"`mkdir -p {directory}`, or name another",
        ) from None
    except OSError as error:
        raise OSError(
            error.errno, f"nvme_path {directory}: {error.strerror}; name a directory you can reach"
        ) from None
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(
            errno.ENOTDIR, f"nvme_path {directory} is not a directory; name the one it lies in"
        )


def _check_file_system(directory: Path, file_system: str) -> None:
    if file_system in file_systems.NETWORK:
        raise ConfigError(
            f"nvme_path {directory} lies on {file_system}, a network file system; name a directory "
            "on a local drive, or allow it with "
            f'"tiers": {{"nvme": [{{"path": "{directory}", "allow_any_file_system": true}}]}}'
        )
    if file_system in file_systems.MEMORY:
        warnings.warn(
            f"nvme_path {directory} lies on {file_system}, which is memory: swap files there save "
            "none; name a directory on a drive",
            PreflightWarning,
            stacklevel=3,
        )
    if file_system in file_systems.STACKED:
        warnings.warn(
            f"nvme_path {directory} lies on {file_system}, a container's layered file system, and "
            "may be slow; mount a drive into the container and name it",
            PreflightWarning,
            stacklevel=3,
        )


def _probe(directory: Path) -> bool:
    """Make a nameless file as the engine will; return whether direct transfers are taken."""
    try:
        os.close(_open_nameless(directory, _O_DIRECT))
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR}:
            raise _unwritable(directory, error) from None
    else:
        return bool(_O_DIRECT)
    try:
        with tempfile.TemporaryFile(dir=directory):
            return False
    except OSError as error:
        raise _unwritable(directory, error) from None


def _open_nameless(directory: Path, flags: int) -> int:
    if not _O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return os.open(directory, os.O_RDWR | _O_TMPFILE | flags, 0o600)


def _unwritable(directory: Path, error: OSError) -> OSError:
    remedy = f"give user {os.geteuid()} the right to write there, or name another directory"
    if error.errno == errno.ENOENT:  # /proc, for one
        remedy = "nobody can make files there: name another directory"
    if error.errno == errno.EROFS:
        remedy = "name a directory on a file system that is mounted for writing"
    return type(error)(
        error.errno, f"nvme_path {directory} cannot be written: {error.strerror}; {remedy}"
    )


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


_mount_of = file_systems.mount_of
