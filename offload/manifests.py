"""The manifests of one rank: which commits its directory holds, newest and the one before.

[Note: two manifests] Each commit has a file of its own, replaced as a whole [Note: synced
replacement]. A new commit takes the place of the one that does not count any more, so at any moment
the last commit that all ranks have is described by a file that nobody is writing. A file begins
with a checksum of all the rest; one that is torn or changed holds nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from aio_ops import Directory, remove_file, replace_file
from offload.copies import CopyEntry

MANIFEST_NAMES = ("commit-0", "commit-1")
FORMAT_VERSION = 1

_MAGIC = b"tierzero commit\n"
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8


class ManifestError(ValueError):
    """A manifest that is not what a commit wrote."""


@dataclass(frozen=True, slots=True, order=True)
class CommitName:
    """Which commit: the commits of all ranks with one name belong together."""

    sequence: int
    """Counts the commits of a run; the newest has the largest."""
    token: str
    """Drawn when a process starts or resumes the run: what another history made differs."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What one rank committed."""

    name: CommitName
    step: int
    data_name: str
    """Which swap file its copies are in."""
    layout: str
    entries: tuple[CopyEntry, ...]
    header: dict[str, Any] = field(default_factory=dict)
    """What the layer above says of the run."""
    blob: bytes = b""
    """Bytes of the layer above."""

    def to_bytes(self) -> bytes:
        """Return the manifest file."""
        described = {
            "version": FORMAT_VERSION,
            "sequence": self.name.sequence,
            "token": self.name.token,
            "step": self.step,
            "data": self.data_name,
            "layout": self.layout,
            "entries": [[each.place, each.copy, f"{each.checksum:032x}"] for each in self.entries],
            "header": self.header,
        }
        text = json.dumps(described, separators=(",", ":")).encode()
        body = len(text).to_bytes(_LENGTH_BYTES, "little") + text + self.blob
        return _MAGIC + _digest(body) + body

    @classmethod
    def from_bytes(cls, raw: bytes) -> Commit:
        """Return what a manifest file says.

        Raises:
            ManifestError: if it is torn, changed, foreign or of another version.
        """
        start = len(_MAGIC) + _DIGEST_BYTES
        body = raw[start:]
        if not raw.startswith(_MAGIC) or raw[len(_MAGIC) : start] != _digest(body):
            raise ManifestError("it is torn or was changed")
        size = int.from_bytes(body[:_LENGTH_BYTES], "little")
        found = json.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + size])
        if found["version"] != FORMAT_VERSION:
            raise ManifestError(
                f"it has format version {found['version']}, and this version of tierzero reads"
                f" {FORMAT_VERSION}"
            )
        entries = tuple(
            CopyEntry(place, copy, int(checksum, 16)) for place, copy, checksum in found["entries"]
        )
        return cls(
            CommitName(found["sequence"], found["token"]),
            found["step"],
            found["data"],
            found["layout"],
            entries,
            found["header"],
            body[_LENGTH_BYTES + size :],
        )


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


class Manifests:
    """The two manifest files of a directory."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.problems: dict[str, str] = {}
        """By name: what is wrong with a manifest that cannot be used."""
        self._held: dict[str, Commit] = {}
        self._kept: CommitName | None = None
        for name in MANIFEST_NAMES:
            raw = directory.read(name)
            if raw is None:
                continue
            try:
                self._held[name] = Commit.from_bytes(raw)
            except ManifestError as error:
                self.problems[name] = str(error)

    @property
    def commits(self) -> list[Commit]:
        """The commits that are described here, newest first."""
        return sorted(self._held.values(), key=lambda commit: commit.name, reverse=True)

    def find(self, name: CommitName) -> Commit:
        """Return a commit that is described here."""
        return next(commit for commit in self._held.values() if commit.name == name)

    def withdraw(self, name: CommitName) -> None:
        """Remove the description of a commit that not every rank could make, if there is one."""
        for each, commit in list(self._held.items()):
            if commit.name == name:
                remove_file(self.directory, each)
                del self._held[each]

    def flip(self, commit: Commit) -> int:
        """Describe a new commit, in place of the one that does not count; return its bytes.

        Raises:
            OSError: if that failed; the commit that counts is still described.
        """
        name = next(each for each in MANIFEST_NAMES if not self._counts(each))
        raw = commit.to_bytes()
        replace_file(self.directory, name, raw)
        self._held[name] = commit
        self.problems.pop(name, None)
        return len(raw)

    def keep(self, name: CommitName) -> None:
        """Take a commit as the one that counts: every rank has it."""
        self._kept = name

    def discard_others(self) -> None:
        """Remove what describes any commit but the one that counts, so that it never comes back."""
        for each in MANIFEST_NAMES:
            if not self._counts(each) and self.directory.read(each) is not None:
                remove_file(self.directory, each)
                self._held.pop(each, None)
                self.problems.pop(each, None)

    def _counts(self, name: str) -> bool:
        commit = self._held.get(name)
        return commit is not None and commit.name == self._kept
