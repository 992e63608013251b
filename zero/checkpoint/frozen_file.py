"""Shards of frozen parameters in a file of their own, which the next checkpoint links.

[Note: linked files] Files of a checkpoint are never written again once it is in its place. So where
the weights that are frozen have not changed since the newest checkpoint of the folder, the next one
gets a hard link to its file instead of another copy: no bytes are written, and no room is taken.
Whether they have changed is not remembered but looked at: all of them are hashed and compared with
the checksums of that file. Removing either checkpoint leaves the other whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from estimators import Section, SubGroup
from offload import Field, Store, tensor_span
from offload.crew import Crew
from offload.groups import read_group
from zero.checkpoint.directory import find, read_latest
from zero.checkpoint.layout import FilePlan, PieceSource
from zero.checkpoint.manifest import DTYPES, FileEntry, read_manifest
from zero.checkpoint.rank_file import PieceHash, parts_of
from zero.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class SameFile:
    """A file of an earlier checkpoint with the same content."""

    path: Path
    entry: FileEntry

    def link(self, target: Path) -> FileEntry | None:
        """Give it another name; return what a manifest says of it, or None if that cannot be."""
        try:
            os.link(self.path, target, follow_symlinks=False)
        except OSError:
            return None
        return replace(self.entry, name=target.name)


def find_same(
    store: Store, folder: Path, plan: FilePlan, ranks: tuple[int, int], thread_count: int
) -> SameFile | None:
    """Return the file of the newest checkpoint that has what a plan says, or None.

    Args:
        store: the shards of this rank.
        folder: of checkpoints.
        plan: the file of frozen shards that would be written.
        ranks: this rank, and how many there are.
        thread_count: threads that hash.

    Raises:
        PageError: if a page-in failed.
    """
    found = _same_layout(folder, plan, ranks)
    if found is None:
        return None
    crew = Crew(thread_count)
    try:
        return found if _same_values(store, plan, found.entry, crew) else None
    finally:
        crew.close()


def rests_in_memory(store: Store, plan: FilePlan) -> bool:
    """Tell whether hashing what a plan has takes no page-ins."""
    segments = {source.segment for source in plan.sources}
    return not any(
        group.on_nvme(Section.PARAMETER)
        for segment in segments
        for group in store.plan.by_segment[segment]
    )


def _same_layout(folder: Path, plan: FilePlan, ranks: tuple[int, int]) -> SameFile | None:
    """Return the file of the newest checkpoint whose pieces lie where a plan has them."""
    rank, world_size = ranks
    try:
        tag = read_latest(folder)
        if tag is None:
            return None
        path = find(folder, tag)
        manifest = read_manifest(path)
    except (CheckpointError, OSError):
        return None
    if manifest.world_size != world_size:
        return None
    entry = manifest.ranks[rank].frozen
    if entry is None or entry.size_bytes != plan.size_bytes:
        return None
    if tuple(replace(piece, checksums=()) for piece in entry.pieces) != plan.pieces:
        return None
    return SameFile(path / entry.name, entry)


def _same_values(store: Store, plan: FilePlan, entry: FileEntry, crew: Crew) -> bool:
    """Compare what rests now with the checksums of a file, until something differs."""
    wanted = {piece.key: piece.checksums for piece in entry.pieces}
    hashes = {piece.key: PieceHash(piece) for piece in plan.pieces}
    by_segment: dict[int, list[PieceSource]] = {}
    for source in plan.sources:
        by_segment.setdefault(source.segment, []).append(source)
    groups = [group for group in store.plan.sub_groups if group.segment in by_segment]
    for position, group in enumerate(groups):
        following = groups[position + 1 :]
        with read_group(store, group, {Field.PARAMETER}, following) as reader:
            _hash(crew, by_segment[group.segment], group, reader.copy, hashes)
        keys = {source.piece.key for source in by_segment[group.segment]}
        if not all(hashes[key].agrees(wanted[key]) for key in keys):
            return False
    return all(hashes[key].finish() == wanted[key] for key in hashes)


def _hash(
    crew: Crew,
    sources: Sequence[PieceSource],
    group: SubGroup,
    read: Callable[[Field, int, torch.Tensor], None],
    hashes: dict[str, PieceHash],
) -> None:
    def hash_part(source: PieceSource, low: int, high: int) -> None:
        values = torch.empty(high - low, dtype=DTYPES[source.piece.dtype], device="cpu")
        read(source.field, low + source.start - group.start, values)
        hashes[source.piece.key].update(low * values.element_size(), tensor_span(values).view())

    try:
        for source in sources:
            for low, high in parts_of(source, group):
                crew.give(partial(hash_part, source, low, high))
    except BaseException:
        crew.settle()
        raise
    crew.wait()
