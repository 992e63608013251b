"""Folders that are about to be written to: what is wrong with one is said before work starts."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from zero.errors import CheckpointError

_REMEDIES = {
    errno.EROFS: "name a folder on a file system that is mounted for writing",
    errno.EACCES: "name one that this user may write to",
    errno.EPERM: "name one that this user may write to",
    errno.EEXIST: "a file is in the way: name another folder",
    errno.ENOTDIR: "a file is in the way: name another folder",
    errno.ENOSPC: "free some space, or name a folder on another drive",
    errno.EDQUOT: "free some of the quota, or name a folder on another drive",
}


def make_folder(folder: Path) -> None:
    """Make a folder, if it is not there, and see whether files can be written to it.

    Raises:
        CheckpointError: if not; it says why, and what to do.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "name another folder")
        raise CheckpointError(
            f"the folder {folder} cannot be written: {error.strerror}; {remedy}"
        ) from error
