"""Which of the two copies of each section counts, in a durable run.

[Note: two places] All that a durable run keeps has two places in the swap file. The *committed*
copy is what a crash falls back to and is not written. The *current* copy is what was written last:
the committed one, until the first write after a commit goes to the other place; further writes stay
there. A commit makes all current copies the committed ones, which frees the others. Gradients have
one place: a commit is at a step boundary, where there are none.

A copy is named by where the file has the first one: no two sections share that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from aio_ops import Span
from estimators import Extent, Section


@dataclass(frozen=True, slots=True)
class CopyEntry:
    """What a commit says of one section or resident copy."""

    place: int
    """Where the file has the first of the two copies."""
    copy: int
    """Which of them counts: 0 or 1."""
    checksum: int
    """xxh3-128 of its bytes."""


class Copies:
    """Chooses the copy of each read and write, and remembers what was written."""

    def __init__(self) -> None:
        self._committed: dict[int, CopyEntry] = {}
        self._current: dict[int, CopyEntry] = {}

    def second(self, extent: Extent, sections: Iterable[Section]) -> frozenset[Section]:
        """Return those of which the second copy is current."""
        return frozenset(
            section
            for section in sections
            if extent.holds(section) and self._copy_of(_place(extent, section)) == 1
        )

    def begin_write(self, place: int, checksum: int) -> int:
        """Return the copy that a write goes to, which is current from now on."""
        committed = self._committed.get(place)
        copy = self._copy_of(place) if committed is None else 1 - committed.copy
        self._current[place] = CopyEntry(place, copy, checksum)
        return copy

    def forget(self, place: int) -> None:
        """Take what a failed write left as neither old nor new: the next one goes there again."""
        committed = self._committed.get(place)
        if committed is None:
            self._current.pop(place, None)
        else:
            self._current[place] = committed

    def current(self, place: int) -> CopyEntry | None:
        """Return what was written last of a section, or None if nothing ever was."""
        return self._current.get(place)

    def entries(self) -> list[CopyEntry]:
        """Return all current copies, in the order of the file."""
        return [self._current[place] for place in sorted(self._current)]

    def commit(self) -> None:
        """Make the current copies the committed ones; the others are free."""
        self._committed = dict(self._current)

    def restore(self, entries: Iterable[CopyEntry]) -> None:
        """Take the entries of a commit as committed and current."""
        self._committed = {entry.place: entry for entry in entries}
        self._current = dict(self._committed)

    def _copy_of(self, place: int) -> int:
        entry = self._current.get(place)
        return 0 if entry is None else entry.copy


def _place(extent: Extent, section: Section) -> int:
    return extent.copy_offset(section, 0)


def checksum_of(span: Span) -> int:
    """Return the checksum by which bytes are known again."""
    return xxhash.xxh3_128_intdigest(span.view())
