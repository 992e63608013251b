"""Whether two tuners measure in one directory: neither is stopped, both are told.

[Note: two tuners]
Each holds a shared advisory lock on the directory itself, so nothing is written and nothing is
left. From time to time each asks for the exclusive lock: who is refused is not alone. Taking it
for a moment lets go of the shared one, which the kernel does for us and which harms nobody.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self


class Presence:
    """Says that a tuner is at work in a directory, and whether another one is."""

    def __init__(self, directory: Path) -> None:
        self.disturbed = False
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):  # a directory that may be written but not read
            self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.look()

    def look(self) -> bool:
        """Return whether another tuner has been seen so far."""
        if self._descriptor is None:
            return self.disturbed
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.disturbed = True
        except OSError:  # a file system without such locks
            return self.disturbed
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return self.disturbed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
