"""Folders of checkpoints: one a tag, made aside and moved into place at once.

[Note: commit] Everything is written into a temporary folder beside the final one, files and folder
are synced, and one rename puts it in place; where the tag exists already, both change places in
one call, so that at every moment one of them is there whole. `latest` is a file that is replaced
the same way, after that. A temporary folder is locked as long as its writer lives, so the next save
knows what a killed one has left, and removes it.

[Note: removal] A checkpoint that is replaced or pruned loses its name at once. Its files, which may
take seconds, are removed by a thread if they are large; the next save waits for that, because it
may need the room. What a process that ends leaves is removed by the next save.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
import time
from pathlib import Path

from zero.checkpoint.folders import make_folder
from zero.checkpoint.manifest import MANIFEST_NAME, read_manifest
from zero.checkpoint.script import SCRIPT_NAME
from zero.errors import CheckpointError

LATEST = "latest"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,200}")
_TEMPORARY = ".saving-"
_REPLACED = ".replaced-"
_REMOVED = ".removed-"
_LOCK = "lock"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV})

_DEAD_AFTER_S = 60.0
"""Age from which a temporary folder without a lock file is taken for left over."""

_REMOVED_AT_ONCE_BYTES = 64 << 20
"""Folders up to this size are gone sooner than a thread is there."""

_removals: list[threading.Thread] = []

_ACTIVE: set[Path] = set()
"""Temporary folders of this process: a record lock says nothing to its own holder."""

_log = logging.getLogger(__name__)


def check_tag(tag: object) -> str:
    """Return a tag that can name a folder.

    Raises:
        CheckpointError: if it is something else; a path, for one.
    """
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise CheckpointError(
            f"the tag {tag!r} cannot name a checkpoint: use letters, digits and _ . = + @ -, at"
            " most 200 of them, not beginning with a dot"
        )
    if tag in (LATEST, SCRIPT_NAME):
        raise CheckpointError(
            f"the tag {tag!r} cannot name a checkpoint: a file beside the checkpoints has that"
            " name; choose another one"
        )
    return tag


def read_latest(folder: Path) -> str | None:
    """Return the tag that `latest` names, or None if there is no such file.

    Raises:
        CheckpointError: if it holds something else than a tag.
    """
    path = folder / LATEST
    try:
        with path.open("rb") as file:
            text = file.read(300).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; name the folder that checkpoints were saved"
            " into"
        ) from error
    return check_tag(text)


def find(folder: Path, tag: str) -> Path:
    """Return the folder of a checkpoint: in its place, or where a killed save has put it aside."""
    path = folder / check_tag(tag)
    if (path / MANIFEST_NAME).is_file() or not folder.is_dir():
        return path
    aside = sorted(folder.glob(f"{_REPLACED}{tag}-*"))
    return next((each for each in aside if (each / MANIFEST_NAME).is_file()), path)


class PendingFolder:
    """A temporary folder that becomes a checkpoint."""

    def __init__(self, folder: Path, tag: str, nonce: str) -> None:
        self.folder = folder
        self.tag = tag
        self.path = folder / f"{_TEMPORARY}{tag}-{nonce}"
        self._lock: int | None = None

    @staticmethod
    def new_nonce() -> int:
        """Return a number that no other save has."""
        return secrets.randbits(62)

    def make(self) -> None:
        """Make the folder and lock it; what killed saves have left is removed."""
        make_folder(self.folder)
        finish_removals()
        final = self.folder / self.tag
        if final.is_symlink() or (final.exists() and not (final / MANIFEST_NAME).is_file()):
            raise CheckpointError(
                f"{final} is there and is no checkpoint of tierzero; it will not be replaced: save"
                " under another tag, or move it away"
            )
        remove_debris(self.folder)
        _ACTIVE.add(self.path)
        self.path.mkdir()
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def commit(self, *, save_latest: bool) -> Path:
        """Put the folder in place, see [Note: commit]; return its final path.

        Raises:
            OSError: if that fails; an earlier checkpoint of the tag is as it was.
        """
        sync_folder(self.path)
        final = self.folder / self.tag
        if final.exists():
            _exchange(self.path, final, self.folder / f"{_REPLACED}{self.path.name.lstrip('.')}")
        else:
            self.path.rename(final)
        (final / _LOCK).unlink(missing_ok=True)
        sync_folder(self.folder)
        if save_latest:
            replace_text(self.folder / LATEST, self.tag)
        for left in (self.path, *self.folder.glob(f"{_REPLACED}{self.tag}-*")):
            if left.exists():
                _remove(left)
        self.release()
        return final

    def abandon(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Give the lock up."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        _ACTIVE.discard(self.path)


def _exchange(new: Path, old: Path, aside: Path) -> None:
    """Let two folders change places; where the file system cannot, move the old one aside."""
    library = ctypes.CDLL(None, use_errno=True)
    names = (os.fsencode(new), os.fsencode(old))
    rename = getattr(library, "renameat2", None)
    if rename is not None:
        if not rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            return
        number = ctypes.get_errno()
        if number not in _NO_EXCHANGE:
            raise OSError(number, f"cannot exchange {new} and {old}: {os.strerror(number)}")
    aside = aside.with_name(f"{_REPLACED}{old.name}-{secrets.token_hex(4)}")
    old.rename(aside)
    sync_folder(old.parent)
    new.rename(old)


def remove_debris(folder: Path) -> None:
    """Remove the temporary folders of saves that were killed, and checkpoints half removed."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        if _is_dead(path):
            _log.warning("removing %s, which a save that was killed has left", path)
            _remove(path)
    for path in folder.glob(f"{_REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{_REPLACED}*"):
        tag = path.name.removeprefix(_REPLACED).rpartition("-")[0]
        if (folder / tag / MANIFEST_NAME).is_file():
            shutil.rmtree(path, ignore_errors=True)


def _is_dead(path: Path) -> bool:
    """Tell whether nobody who lives holds a temporary folder."""
    if path in _ACTIVE or path.is_symlink():
        return False
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if (path / MANIFEST_NAME).exists():
            return True  # a checkpoint that was replaced and not removed any more
        return time.time() - path.stat().st_mtime > _DEAD_AFTER_S
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def list_checkpoints(folder: Path) -> list[tuple[int, str]]:
    """Return (global steps, tag) of the checkpoints of a folder that can be read, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if not _TAG.fullmatch(path.name) or not (path / MANIFEST_NAME).is_file():
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        modified = (path / MANIFEST_NAME).stat().st_mtime_ns
        found.append((manifest.global_steps, modified, path.name))
    return [(steps, name) for steps, _, name in sorted(found)]


def prune(folder: Path, keep_last: int) -> list[str]:
    """Remove all but the newest checkpoints; never the one that `latest` names.

    What is no checkpoint of ours, or cannot be read, stays.
    """
    latest = read_latest(folder)
    known = [name for _, name in list_checkpoints(folder)]
    removed = [name for name in known[: max(len(known) - keep_last, 0)] if name != latest]
    for name in removed:
        _remove(folder / name)
    return removed


def finish_removals() -> None:
    """Return once the room of everything that was replaced or pruned is free."""
    while _removals:
        _removals.pop().join()


def _remove(path: Path) -> None:
    """Remove a checkpoint, its name first: half of one never has it. See [Note: removal]."""
    aside = path.with_name(f"{_REMOVED}{path.name.lstrip('.')}-{secrets.token_hex(4)}")
    path.rename(aside)
    try:
        size_bytes = sum(each.stat().st_size for each in aside.iterdir())
    except FileNotFoundError:
        size_bytes = 0  # somebody else who saves here removes it as well
    if size_bytes <= _REMOVED_AT_ONCE_BYTES:
        shutil.rmtree(aside, ignore_errors=True)
        return
    thread = threading.Thread(
        target=shutil.rmtree, args=(aside,), kwargs={"ignore_errors": True}, name="remove"
    )
    _removals.append(thread)
    thread.start()


def replace_text(path: Path, text: str) -> None:
    """Replace a small file as a whole, so that it is there after a crash."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    write_synced(temporary, text.encode())
    temporary.replace(path)
    sync_folder(path.parent)


def show_text(path: Path, text: str) -> None:
    """Let other processes see a small new file as a whole; it need not last."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    temporary.write_text(text, encoding="utf-8")
    temporary.rename(path)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and return once its bytes will last."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Return once the names in a folder will last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
