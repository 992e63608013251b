"""Where one rank of a durable run keeps what: a directory on each path, a lock, one swap file.

<path>/<name>/rank-<r>/lock                the run is alive while this is locked
<path>/<name>/rank-<r>/commit-0, commit-1  manifests, on the first path only
<path>/<name>/rank-<r>/swap-<n>            the swap file, or this path's stripes of it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aio_ops import Directory, Engine, RunClaim, StripedFile, TransferFile, remove_file
from offload import SwapDirectory

_SWAP_NAME = re.compile(r"swap-(\d+)")
_OWN_NAME = re.compile(r"swap-\d+|commit-[01](\.new)?")


class RankPlaces:
    """The directories of one rank, which are its own until they are released."""

    def __init__(self, engine: Engine, paths: Sequence[Path], name: str, rank: int) -> None:
        """Make the directories if need be, and claim them.

        Raises:
            RunInUseError: if a living run has one.
            OSError: if one cannot be used.
        """
        self.directories = [path / name / f"rank-{rank}" for path in paths]
        self._claims: list[RunClaim] = []
        try:
            for directory in self.directories:
                self._claims.append(engine.claim_directory(directory))
        except BaseException:
            self.release()
            raise
        self.main: Directory = self._claims[0].entries

    @property
    def is_new(self) -> bool:
        """Whether the directory of the manifests was not there before."""
        return self._claims[0].is_new

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
        for claim in self._claims:
            claim.entries.sync_entries()
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
        for claim in self._claims:
            for each in claim.entries.names():
                if _SWAP_NAME.fullmatch(each) and each != name:
                    remove_file(claim.entries, each)

    def release(self) -> None:
        """Let another run have the directories."""
        for claim in self._claims:
            claim.release()

    def remove(self) -> None:
        """Remove everything that this rank keeps; the run's own directory goes with its last."""
        for claim in self._claims:
            for each in claim.entries.names():
                if _OWN_NAME.fullmatch(each):
                    claim.entries.remove(each)
            claim.remove()

    def _swap_names(self) -> list[re.Match[str] | None]:
        return [
            _SWAP_NAME.fullmatch(each) for claim in self._claims for each in claim.entries.names()
        ]

    def _describe(self, striped: StripedFile, name: str) -> dict[str, Any]:
        """Return which directories have members, and how large: one without bytes has none."""
        return {
            "name": name,
            "bytes": list(striped.layout.member_bytes),
            "unit": striped.layout.unit_bytes,
            "of": [self.directories.index(member.path.parent) for member in striped.members],
        }
