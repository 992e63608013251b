"""Small files that are replaced as a whole and are there after a crash, or are not.

[Note: synced replacement] A file is written under another name, synced, renamed over the old one,
and the directory is synced. Until the rename is on the disk the old file counts, from then on the
new one: no moment has half of one.
"""

import contextlib
import os
from pathlib import Path
from typing import Protocol

_TEMPORARY = ".new"


class Directory(Protocol):
    """What replacing files safely asks of a directory; nothing lasts before it is synced."""

    @property
    def path(self) -> Path:
        """Where it is, for messages."""

    def names(self) -> list[str]:
        """Return the names in it."""

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file, or None if there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Make or overwrite a file."""

    def sync(self, name: str) -> None:
        """Return once the bytes of a file will last."""

    def rename(self, name: str, target: str) -> None:
        """Let a file take the place of another at once."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def sync_entries(self) -> None:
        """Return once the names in the directory will last."""


def replace_file(directory: Directory, name: str, data: bytes) -> None:
    """Replace a file as a whole, see [Note: synced replacement].

    Raises:
        OSError: if that fails; the old file is there, as it was.
    """
    temporary = name + _TEMPORARY
    try:
        directory.write(temporary, data)
        directory.sync(temporary)
        directory.rename(temporary, name)
    except OSError:
        with contextlib.suppress(OSError):
            directory.remove(temporary)
        raise
    directory.sync_entries()


def remove_file(directory: Directory, name: str) -> None:
    """Remove a file so that it is not there after a crash either."""
    directory.remove(name)
    directory.sync_entries()


class SyncedDirectory:
    """A directory of a real file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """Return the names in it, sorted."""
        return sorted(entry.name for entry in self.path.iterdir())

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a file, or None if there is none."""
        try:
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Make or overwrite a file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self.path / name, flags, 0o600), "wb") as file:
            file.write(data)

    def sync(self, name: str) -> None:
        """Return once the bytes of a file will last."""
        _sync(self.path / name, os.O_RDONLY)

    def rename(self, name: str, target: str) -> None:
        """Let a file take the place of another at once."""
        (self.path / name).replace(self.path / target)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def sync_entries(self) -> None:
        """Return once the names in the directory will last."""
        sync_directory(self.path)


def sync_directory(path: Path) -> None:
    """Return once the names in a directory will last."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
