"""The named directory of a durable run, and who may use it.

[Note: living runs] A run lives while its lock file is locked by a POSIX record lock, or while this
process lists it. The kernel drops the lock with its process, however that ends; it is not judged by
a process number, which means nothing to another container on the same disk. A record lock belongs
to the process, so a forked worker that outlives it keeps nothing alive (a flock would be kept). But
a process can take its own lock twice, and loses it when it closes any descriptor of the file: so
this process lists what it holds, and looks there before it opens the lock file.
"""

import contextlib
import os
import stat
import threading
from pathlib import Path

from aio_ops.directories import Directory, SyncedDirectory, sync_directory

LOCK_NAME = "lock"
_OWNER_ONLY = 0o700

_held: dict[tuple[int, int], int] = {}  # (device, inode) of a directory: the process that holds it
_guard = threading.Lock()


class RunInUseError(RuntimeError):
    """The directory belongs to a run that is alive."""


def make_run_directory(path: Path) -> bool:
    """Make a directory for its owner alone, its parent too, and return whether it was new.

    Raises:
        OSError: if it cannot be made, or is not a directory of this user.
    """
    made = False
    for directory in (path.parent, path):
        try:
            directory.mkdir(mode=_OWNER_ONLY)
        except FileExistsError:
            found = directory.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise PermissionError(
                    f"{directory} is not a directory of user {os.geteuid()} (mode"
                    f" {stat.filemode(found.st_mode)}, owner {found.st_uid}); choose another"
                    " tiers.durable.name"
                ) from None
        else:
            sync_directory(directory.parent)
            made = directory == path
    return made


class RunClaim:
    """A directory that one run has for itself: its files, until it is released."""

    def __init__(self, path: Path) -> None:
        """Make a directory for its owner alone if need be, and lock it.

        Raises:
            RunInUseError: if a living run has it.
            OSError: if it cannot be used.
        """
        self.path = path
        self.is_new = make_run_directory(path)
        self._lock = RunLock(path)
        self.entries: Directory = SyncedDirectory(path)

    def release(self) -> None:
        """Let another run have the directory."""
        self._lock.release()

    def remove(self) -> None:
        """Remove the lock file and the directory, unless somebody has something in it."""
        self.entries.remove(LOCK_NAME)
        with contextlib.suppress(OSError):
            self.path.rmdir()
            self.path.parent.rmdir()
        self.release()


class RunLock:
    """Says that a run is alive, until it is released or the process ends [Note: living runs]."""

    def __init__(self, directory: Path) -> None:
        """Take the lock of a directory.

        Raises:
            RunInUseError: if a living run has it.
        """
        import fcntl  # not at the top: this package must import on every platform

        self.directory = directory
        found = directory.stat()
        self._key = (found.st_dev, found.st_ino)
        self._descriptor = -1
        with _guard:
            if _held.get(self._key) == os.getpid():
                raise RunInUseError(f"{directory} is in use by another engine of this process")
            path = directory / LOCK_NAME
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                os.close(descriptor)
                raise RunInUseError(f"{directory} is in use by a living run") from None
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            self._process_id = os.getpid()
            _held[self._key] = self._process_id

    def release(self) -> None:
        """Let another run have the directory; safe to call twice, and does nothing in a child."""
        with _guard:
            if self._descriptor < 0 or os.getpid() != self._process_id:
                return
            _held.pop(self._key, None)
            os.close(self._descriptor)
            self._descriptor = -1
