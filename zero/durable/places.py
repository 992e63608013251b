"""Where one rank of a durable run keeps what: a directory on each path, a lock, one swap file.

<path>/<name>/rank-<r>/lock                the run is alive while this is locked
<path>/<name>/rank-<r>/commit-0, commit-1  manifests, on the first path only
<path>/<name>/rank-<r>/swap-<n>            the swap file, or this path's stripes of it
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aio_ops import (
    LOCK_NAME,
    Engine,
    RunLock,
    StripedFile,
    SyncedDirectory,
    TransferFile,
    make_run_directory,
    remove_file,
)
from offload import SwapDirectory

_SWAP_NAME = re.compile(r"swap-(\d+)")
_OWN_NAME = re.compile(rf"{LOCK_NAME}|swap-\d+|commit-[01](\.new)?")


class RankPlaces:
    """The directories of one rank, locked until they are released."""

    def __init__(self, paths: Sequence[Path], name: str, rank: int) -> None:
        """Make the directories if need be, and lock them.

        Raises:
            RunInUseError: if a living run has one.
            OSError: if one cannot be used.
        """
        self.directories = [path / name / f"rank-{rank}" for path in paths]
        self._locks: list[RunLock] = []
        self.is_new = False
        try:
            for index, directory in enumerate(self.directories):
                made = make_run_directory(directory)
                self.is_new = self.is_new or (made and index == 0)
                self._locks.append(RunLock(directory))
        except BaseException:
            self.release()
            raise
        self.main = SyncedDirectory(self.directories[0])

    def create_file(
        self, engine: Engine, size_bytes: int, stripes: Sequence[SwapDirectory]
    ) -> tuple[TransferFile, dict[str, Any]]:
        """Return a new swap file, and what finds it again; files of no commit are removed before.

        Raises:
            OSError: if the space cannot be reserved.
        """
        numbers = [int(match[1]) for each in self._swap_names() if (match := each)]
        name = f"swap-{max(numbers, default=0) + 1}"
        if len(self.directories) == 1:
            path = self.directories[0] / name
            file: TransferFile = engine.open_named_file(path, size_bytes, create=True)
            found: dict[str, Any] = {"name": name, "bytes": [size_bytes], "unit": 0, "of": [0]}
        else:
            weights = [each.weight for each in stripes if each.weight is not None]
            striped = engine.create_striped_file(
                self.directories,
                size_bytes,
                weights=weights if len(weights) == len(stripes) else "auto",
                capacities=[each.capacity_bytes for each in stripes],
                name=name,
            )
            file, found = striped, self._describe(striped, name)
        for directory in self.directories:
            SyncedDirectory(directory).sync_entries()
        return file, found

    def open_file(self, engine: Engine, found: Mapping[str, Any]) -> TransferFile:
        """Return the swap file that `create_file` described.

        Raises:
            OSError: if it is missing or has another size.
        """
        paths = [self.directories[index] / found["name"] for index in found["of"]]
        if not found["unit"]:
            return engine.open_named_file(paths[0], found["bytes"][0], create=False)
        return engine.open_striped_file(paths, found["bytes"], found["unit"])

    def remove_files_but(self, name: str | None) -> None:
        """Remove the swap files that no commit is in."""
        for directory in self.directories:
            entries = SyncedDirectory(directory)
            for each in entries.names():
                if _SWAP_NAME.fullmatch(each) and each != name:
                    remove_file(entries, each)

    def release(self) -> None:
        """Let another run have the directories."""
        for lock in self._locks:
            lock.release()

    def remove(self) -> None:
        """Remove everything that this rank keeps; the run's own directory goes with its last."""
        for directory in self.directories:
            for path in directory.iterdir():
                if _OWN_NAME.fullmatch(path.name):
                    path.unlink()
            with contextlib.suppress(OSError):  # somebody else has something in it
                directory.rmdir()
                directory.parent.rmdir()
        self.release()

    def _swap_names(self) -> list[re.Match[str] | None]:
        return [
            _SWAP_NAME.fullmatch(each)
            for directory in self.directories
            for each in SyncedDirectory(directory).names()
        ]

    def _describe(self, striped: StripedFile, name: str) -> dict[str, Any]:
        """Return which directories have members, and how large: one without bytes has none."""
        return {
            "name": name,
            "bytes": list(striped.layout.member_bytes),
            "unit": striped.layout.unit_bytes,
            "of": [self.directories.index(member.path.parent) for member in striped.members],
        }
