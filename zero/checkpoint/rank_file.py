"""Write one rank's file: pieces stream from where they rest into blocks, hashed on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import xxhash

from aio_ops import DataFile, Engine
from estimators import SubGroup
from offload import Field, tensor_span
from offload.crew import Crew
from offload.span_writer import SpanWriter
from zero.checkpoint.layout import FilePlan, PieceSource, SmallSource
from zero.checkpoint.manifest import CHECKSUM_NUMEL, DTYPES, FileEntry, PieceEntry
from zero.replan import Moments
from zero.whole import LateTensor

_SMALLEST_BLOCK_BYTES = 64 << 10
_LARGEST_BLOCK_BYTES = 4 << 20
BLOCK_COUNT = 32
"""Three streams of states and where they meet, two a thread, and as many in flight."""
_CHECKSUMS_A_PART = 4
_LEAST_WORK_BYTES = 1 << 20
"""What is worth handing to another thread."""

ReadField = Callable[[Field, int, torch.Tensor], None]
"""(field, first element of the sub-group, target): fills the target; any thread may call it."""


class PieceHash:
    """Checksums of a piece; several threads give it bytes, each in order of one checksum."""

    def __init__(self, piece: PieceEntry) -> None:
        self.block_bytes = CHECKSUM_NUMEL * DTYPES[piece.dtype].itemsize
        self._piece = piece
        self._begun: dict[int, tuple[xxhash.xxh3_64, int]] = {}
        self._done: dict[int, str] = {}

    def update(self, first: int, data: memoryview) -> None:
        """Take bytes from `first` of the piece on."""
        while len(data):
            number, inside = divmod(first, self.block_bytes)
            part, data = data[: self.block_bytes - inside], data[self.block_bytes - inside :]
            first += len(part)
            self._take(number, part)

    def finish(self) -> tuple[str, ...]:
        """Return all checksums."""
        count = -(-self._piece.size_bytes // self.block_bytes)
        if self._begun or len(self._done) != count:
            raise RuntimeError(f"{self._piece.key} was not written whole")
        return tuple(self._done[number] for number in range(count))

    def agrees(self, checksums: Sequence[str]) -> bool:
        """Tell whether what is done so far has the checksums that something else has."""
        return all(checksums[number] == found for number, found in self._done.items())

    def _take(self, number: int, part: memoryview) -> None:
        found = self._begun.pop(number) if number in self._begun else (xxhash.xxh3_64(), 0)
        state, taken_bytes = found
        state.update(part)
        taken_bytes += len(part)
        wanted = min(self.block_bytes, self._piece.size_bytes - number * self.block_bytes)
        if taken_bytes == wanted:
            self._done[number] = state.hexdigest()
        else:
            self._begun[number] = (state, taken_bytes)


class RankFile:
    """One file that is being written; its memory is smaller than its largest piece, or tiny."""

    def __init__(
        self,
        path: Path,
        plan: FilePlan,
        engine: Engine,
        thread_count: int,
        block_count: int = BLOCK_COUNT,
    ) -> None:
        self._plan = plan
        self._crew = Crew(thread_count)
        self._file = DataFile.create_new(path, plan.size_bytes)
        block = plan.largest_bytes // BLOCK_COUNT
        self._writer = SpanWriter(
            engine,
            self._file,
            block_bytes=min(max(block, _SMALLEST_BLOCK_BYTES), _LARGEST_BLOCK_BYTES),
            block_count=block_count,
        )
        self._hashes = {piece.key: PieceHash(piece) for piece in plan.pieces}
        self._by_segment: dict[int, list[PieceSource]] = {}
        for source in plan.sources:
            self._by_segment.setdefault(source.segment, []).append(source)

    def write_start(self) -> None:
        """Write the header and everything that is in memory already."""
        self._writer.write(0, self._plan.header)
        for small in self._plan.small:
            values = small_values(small).contiguous().reshape(-1)
            if values.numel():
                self._put(small.piece, bytes(tensor_span(values).view()))

    def fields(self, group: SubGroup) -> frozenset[Field]:
        """Return the fields of a sub-group that are saved."""
        return frozenset(source.field for source in self._by_segment.get(group.segment, ()))

    def write_group(self, group: SubGroup, read: ReadField, fields: Collection[Field]) -> None:
        """Write some fields of a sub-group; sub-groups of a segment come in order.

        Raises:
            OSError: if a write failed; what other threads wrote meanwhile is undefined.
        """
        small: list[Callable[[], None]] = []
        small_bytes = 0
        try:
            for source in self._by_segment.get(group.segment, ()):
                if source.field not in fields:
                    continue
                for low, high in parts_of(source, group):
                    small.append(partial(self._stream, source, (low, high), group, read))
                    small_bytes += (high - low) * DTYPES[source.piece.dtype].itemsize
                    if small_bytes >= _LEAST_WORK_BYTES:
                        self._crew.give(partial(self._do, small))
                        small, small_bytes = [], 0
            self._do(small)
        except BaseException as error:
            self._writer.fail(error)
            self._crew.settle()
            raise
        self._crew.wait()

    def finish(self) -> FileEntry:
        """Return what was written, once it will last.

        Raises:
            OSError: if a write failed.
        """
        self._writer.flush()
        self._file.finish()
        pieces = tuple(
            replace(piece, checksums=self._hashes[piece.key].finish())
            for piece in self._plan.pieces
        )
        return FileEntry(self._file.path.name, self._plan.size_bytes, pieces)

    def close(self) -> None:
        """Give memory and file up."""
        self._crew.close()
        self._writer.close()
        self._file.close()

    def _do(self, work: Sequence[Callable[[], None]]) -> None:
        """Do pieces of work; if one fails, no other thread waits for it."""
        try:
            for each in work:
                each()
        except BaseException as error:
            self._writer.fail(error)
            raise

    def _stream(
        self, source: PieceSource, elements: tuple[int, int], group: SubGroup, read: ReadField
    ) -> None:
        """Read elements of a piece straight into the blocks of the file."""
        low, high = elements
        piece, dtype = source.piece, DTYPES[source.piece.dtype]
        offset = piece.offset + low * dtype.itemsize
        hashed = self._hashes[piece.key]
        first = low * dtype.itemsize
        before = (group.start - source.start) // source.block_numel
        for span in self._writer.spans(offset, (high - low) * dtype.itemsize):
            view = span.view()
            target = torch.frombuffer(view, dtype=dtype)
            read(source.field, low - before, target)
            hashed.update(first, view)
            first += span.size_bytes
            low += target.numel()

    def _put(self, piece: PieceEntry, data: bytes) -> None:
        self._writer.write(piece.offset, data)
        self._hashes[piece.key].update(0, memoryview(data))


def parts_of(source: PieceSource, group: SubGroup) -> Iterator[tuple[int, int]]:
    """Yield what a sub-group has of a piece, cut where a checksum begins."""
    part = source.part(group)
    low = part.start
    while low < part.stop:
        number = low // CHECKSUM_NUMEL
        stop = min((number + _CHECKSUMS_A_PART) * CHECKSUM_NUMEL, part.stop)
        yield low, stop
        low = stop


def small_values(source: SmallSource) -> torch.Tensor:
    """Return the values of a piece that is not in a shard."""
    if isinstance(source.values, Moments):
        return source.values.states[source.piece.section].own.read()
    if isinstance(source.values, LateTensor):
        return source.values.read()
    return source.values


class RankFiles:
    """The files of one rank: one, and one of frozen shards, which may be linked already."""

    def __init__(self, main: RankFile, frozen: RankFile | None, linked: FileEntry | None) -> None:
        self._main = main
        self._frozen = frozen
        self._linked = linked
        self._all = [main] if frozen is None else [main, frozen]

    def write_start(self) -> None:
        """Write headers and everything that is in memory already."""
        for each in self._all:
            each.write_start()

    def fields(self, group: SubGroup) -> frozenset[Field]:
        """Return the fields of a sub-group that are saved."""
        return frozenset().union(*(each.fields(group) for each in self._all))

    def write_group(self, group: SubGroup, read: ReadField, fields: Collection[Field]) -> None:
        """Write some fields of a sub-group; sub-groups of a segment come in order.

        Raises:
            OSError: if a write failed.
        """
        for each in self._all:
            if each.fields(group):
                each.write_group(group, read, fields)

    def finish(self) -> tuple[FileEntry, FileEntry | None]:
        """Return what was written, and the file of frozen shards, once they will last.

        Raises:
            OSError: if a write failed.
        """
        frozen = self._linked if self._frozen is None else self._frozen.finish()
        return self._main.finish(), frozen

    def close(self) -> None:
        """Give memory and files up."""
        for each in self._all:
            each.close()
