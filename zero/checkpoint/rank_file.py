"""Write one rank's file: pieces stream from where they rest into blocks, hashed on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from aio_ops import DataFile, Engine
from estimators import SubGroup
from offload import Field, tensor_span
from offload.span_writer import SpanWriter
from zero.checkpoint.layout import FilePlan, PieceSource, SmallSource
from zero.checkpoint.manifest import CHECKSUM_NUMEL, DTYPES, FileEntry, PieceEntry
from zero.replan import Moments
from zero.whole import LateTensor

_SMALLEST_BLOCK_BYTES = 64 << 10
_LARGEST_BLOCK_BYTES = 4 << 20
_BLOCK_COUNT = 16
"""Three streams of states and where they meet, and as many in flight."""

ReadField = Callable[[Field, int, torch.Tensor], None]
"""(field, first element of the sub-group, target): fills the target."""


class PieceHash:
    """Checksums of a piece, whose values come in order."""

    def __init__(self, piece: PieceEntry) -> None:
        self._block_bytes = CHECKSUM_NUMEL * DTYPES[piece.dtype].itemsize
        self._done: list[str] = []
        self._state = xxhash.xxh3_64()
        self._taken_bytes = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        while len(data):
            room = self._block_bytes - self._taken_bytes
            part, data = data[:room], data[room:]
            self._state.update(part)
            self._taken_bytes += len(part)
            if self._taken_bytes == self._block_bytes:
                self._close()

    def finish(self) -> tuple[str, ...]:
        """Return all checksums."""
        if self._taken_bytes:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(self._state.hexdigest())
        self._state.reset()
        self._taken_bytes = 0


class RankFile:
    """One file that is being written; its memory is smaller than its largest piece, or tiny."""

    def __init__(self, path: Path, plan: FilePlan, engine: Engine) -> None:
        self._plan = plan
        self._file = DataFile.create_new(path, plan.size_bytes)
        block = plan.largest_bytes // _BLOCK_COUNT
        self._writer = SpanWriter(
            engine,
            self._file,
            block_bytes=min(max(block, _SMALLEST_BLOCK_BYTES), _LARGEST_BLOCK_BYTES),
            block_count=_BLOCK_COUNT,
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
        """Write some fields of a sub-group; sub-groups of a segment come in order."""
        for source in self._by_segment.get(group.segment, ()):
            low = max(source.start, group.start)
            high = min(source.start + source.piece.numel, group.stop)
            if source.field in fields and low < high:
                self._stream(source, (low, high), group, read)

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
        self._writer.close()
        self._file.close()

    def _stream(
        self, source: PieceSource, elements: tuple[int, int], group: SubGroup, read: ReadField
    ) -> None:
        """Read elements of a shard straight into the blocks of the file."""
        low, high = elements
        piece, dtype = source.piece, DTYPES[source.piece.dtype]
        offset = piece.offset + (low - source.start) * dtype.itemsize
        hashed = self._hashes[piece.key]
        for span in self._writer.spans(offset, (high - low) * dtype.itemsize):
            view = span.view()
            target = torch.frombuffer(view, dtype=dtype)
            read(source.field, low - group.start, target)
            hashed.update(view)
            low += target.numel()

    def _put(self, piece: PieceEntry, data: bytes) -> None:
        self._writer.write(piece.offset, data)
        self._hashes[piece.key].update(memoryview(data))


def small_values(source: SmallSource) -> torch.Tensor:
    """Return the values of a piece that is not in a shard."""
    if isinstance(source.values, Moments):
        return source.values.states[source.piece.section].own.read()
    if isinstance(source.values, LateTensor):
        return source.values.read()
    return source.values
