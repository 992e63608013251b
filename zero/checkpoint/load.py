"""Load a checkpoint into an engine: every rank reads what its own shards need, block by block.

[Note: loading] Everything that can be known without reading data is checked before anything
changes: the manifest, the files and their sizes, names and shapes of the model. Then the blocks
stream from the files into sub-groups, each block compared with its checksum before it is used. An
engine that has trained has something to lose, so all blocks are read and compared once before.
Whoever fails midway leaves an engine that refuses everything but another load.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from aio_ops import DataFile, Engine, Span, TransferError
from estimators import CODE_BLOCK_NUMEL, SubGroup
from offload import Field, Store, ensure_gradient, has_field
from offload.block_reader import BlockReader, ReadBytes, ReadRequest
from offload.crew import Crew
from offload.groups import write_group
from zero.checkpoint.fill import BlockKey, CodeBases, Filler, Portion
from zero.checkpoint.manifest import (
    BASE,
    CHECKSUM_NUMEL,
    DTYPES,
    GRADIENT,
    WEIGHT,
    FileEntry,
    Manifest,
    PieceEntry,
)
from zero.errors import CheckpointError
from zero.replicated import gather_values
from zero.runtime import Runtime
from zero.unit import Segment

_READS_AHEAD = 16
_MOST_BYTES_AHEAD = 64 << 20
"""What reads take in memory, all together, or the largest piece if that is less."""


class CheckpointFiles:
    """The files of a checkpoint, open for reading."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._files: dict[str, DataFile] = {}
        self._stack = ExitStack()
        self._file_of = {id(piece): file for file, piece in manifest.pieces()}

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()
        self._files.clear()

    def request(self, block: BlockKey) -> ReadRequest:
        """Return where a block lies."""
        piece, number = block
        size = DTYPES[piece.dtype].itemsize
        first = number * CHECKSUM_NUMEL
        numel = min(CHECKSUM_NUMEL, piece.numel - first)
        entry = self._file_of[id(piece)]
        return ReadRequest(self._open(entry), piece.offset + first * size, numel * size, block)

    @contextmanager
    def reader(
        self, engine: Engine, blocks: Iterable[BlockKey], reads_ahead: int = _READS_AHEAD
    ) -> Iterator[BlockReader]:
        """Lend a reader of blocks in order; `stream` gives what it reads."""
        pieces = [piece for _, piece in self.manifest.pieces()]
        block = max((_block_bytes(piece) for piece in pieces), default=1)
        whole = max((piece.size_bytes for piece in pieces), default=1)
        ahead = min(whole, _MOST_BYTES_AHEAD) // reads_ahead
        found = BlockReader(
            engine,
            (self.request(block) for block in blocks),
            block_bytes=max(block, ahead),
            block_count=reads_ahead,
        )
        try:
            yield found
        finally:
            found.close()

    def stream(self, reader: BlockReader) -> Iterator[ReadBytes]:
        """Yield what a reader reads; none of it is compared yet.

        Raises:
            CheckpointError: if something cannot be read.
        """
        reads = reader.read()
        while True:
            try:
                read = next(reads, None)
            except TransferError as error:
                raise CheckpointError(
                    f"{self.folder} cannot be read: {error}; copy it again, or take another"
                    " checkpoint"
                ) from error
            if read is None:
                return
            yield read

    def read(
        self, engine: Engine, blocks: Iterator[BlockKey], reads_ahead: int = _READS_AHEAD
    ) -> Iterator[tuple[BlockKey, Span]]:
        """Yield blocks in order, each compared with its checksum; memory is used again.

        Raises:
            CheckpointError: if a block is damaged; it was not handed out.
        """
        with self.reader(engine, blocks, reads_ahead) as reader:
            for read in self.stream(reader):
                self.compare(read)
                yield read.request.key, read.span  # type: ignore[misc]
                reader.release(read)

    def compare(self, read: ReadBytes) -> None:
        """Compare a block with its checksum.

        Raises:
            CheckpointError: if it is damaged.
        """
        key: BlockKey = read.request.key  # type: ignore[assignment]
        piece, number = key
        found = xxhash.xxh3_64_hexdigest(read.span.view())
        if found != piece.checksums[number]:
            raise CheckpointError(
                f"{read.request.file.path}: {piece.key}, elements from"
                f" {number * CHECKSUM_NUMEL} on, at offset {read.request.offset}, has the checksum"
                f" {found} and was written with {piece.checksums[number]}: the file was damaged;"
                " take another checkpoint"
            )

    def _open(self, entry: FileEntry) -> DataFile:
        file = self._files.get(entry.name)
        if file is None:
            try:
                file = DataFile.open_existing(self.folder / entry.name)
            except OSError as error:
                raise CheckpointError(f"{self.folder / entry.name}: {error.strerror}") from error
            self._stack.callback(file.close)
            if file.size_bytes != entry.size_bytes:
                raise CheckpointError(f"{file.path} has changed its size")
            self._files[entry.name] = file
        return file


class PieceIndex:
    """Finds the blocks that hold a range of a tensor."""

    def __init__(self, manifest: Manifest) -> None:
        self._pieces: dict[tuple[str, str], list[PieceEntry]] = {}
        for _, piece in manifest.pieces():
            self._pieces.setdefault((piece.name, piece.section), []).append(piece)
        for pieces in self._pieces.values():
            pieces.sort(key=lambda each: each.first)

    def has(self, name: str, section: str) -> bool:
        """Tell whether a section of a tensor was saved."""
        return (name, section) in self._pieces

    def blocks(
        self, name: str, section: str, start: int, stop: int
    ) -> Iterator[tuple[BlockKey, int, int]]:
        """Yield (block, first element in it, elements) that make up `[start, stop)`."""
        for piece in self._pieces.get((name, section), ()):
            low, high = max(start, piece.first), min(stop, piece.first + piece.numel)
            while low < high:
                number, inside = divmod(low - piece.first, CHECKSUM_NUMEL)
                count = min(high - low, CHECKSUM_NUMEL - inside)
                yield (piece, number), inside, count
                low += count


class ShardLoader:
    """Streams saved values into the shards of one rank."""

    def __init__(
        self,
        runtime: Runtime,
        files: CheckpointFiles,
        names: Mapping[str, str],
        *,
        anew: bool = False,
    ) -> None:
        """Prepare.

        Args:
            runtime: the shards.
            files: the checkpoint.
            names: the saved name of each parameter of the model, by its own name.
            anew: let moments be zero, whatever was saved.
        """
        self._runtime = runtime
        self._store: Store = runtime.store
        self._files = files
        self._names = names
        self._index = PieceIndex(files.manifest)
        self._zeroed = frozenset(runtime.states) if anew else frozenset()

    def load(self, io: Engine, thread_count: int, *, states: bool, gradients: bool) -> None:
        """Set all weights that were saved, and what else is asked for.

        Raises:
            CheckpointError: if a block is damaged or cannot be read.
            PageError: if a transfer to a tier failed.
        """
        store = self._store
        plan: list[tuple[SubGroup, list[Portion]]] = []
        for segment in self._runtime.segments:
            has_gradients = gradients and self._has_gradients(segment)
            if has_gradients:
                ensure_gradient(store, segment.index)
            for group in store.plan.by_segment[segment.index]:
                fields = self._fields(segment, states=states, gradients=has_gradients)
                portions = [
                    portion for field in fields for portion in self._portions(segment, group, field)
                ]
                if portions:
                    plan.append((group, portions))
        uses = collections.Counter(
            portion.identity for _, portions in plan for portion in portions if portion.block
        )
        order = {
            portion.identity: portion.block
            for _, portions in plan
            for portion in portions
            if portion.block is not None
        }
        crew = Crew(thread_count)
        with self._files.reader(io, order.values()) as reader:
            try:
                filler = Filler(reader, self._files.stream(reader), self._files.compare, crew, uses)
                for group, portions in plan:
                    changed = {portion.field for portion in portions}
                    numel = sum(portion.numel for portion in portions if not portion.is_bases)
                    covered = numel == len(changed) * group.numel
                    with write_group(
                        store, group, changed, keeps=not states, is_covered=covered
                    ) as writer:
                        filler.fill(writer, portions)
            finally:
                crew.close()
        if store.pager is not None:
            store.pager.drain()
        for segment in self._runtime.segments:
            self._settle(segment)

    def _fields(
        self, segment: Segment, *, states: bool, gradients: bool
    ) -> list[tuple[str, Field]]:
        """Return sections to read and the fields that they go to."""
        if not has_field(self._store, segment.index, Field.MASTER):
            return [(WEIGHT, Field.PARAMETER)]
        found = [(WEIGHT, Field.MASTER)]
        if states:
            found += [
                (name, field)
                for name, field in self._runtime.states.items()
                if has_field(self._store, segment.index, field)
            ]
        if gradients:
            found.append((GRADIENT, Field.GRADIENT))
        return found

    def _has_gradients(self, segment: Segment) -> bool:
        return has_field(self._store, segment.index, Field.MASTER) and any(
            self._index.has(self._names.get(member.name, ""), GRADIENT)
            for member in segment.members
        )

    def _portions(
        self, segment: Segment, group: SubGroup, wanted: tuple[str, Field]
    ) -> Iterator[Portion]:
        """Yield what one field of a sub-group is made of, in order."""
        section, field = wanted
        for piece in segment.pieces:
            low, high = max(piece.start, group.start), min(piece.start + piece.numel, group.stop)
            name = self._names.get(segment.members[piece.index].name)
            if low >= high or name is None:
                continue
            first, target = piece.first + low - piece.start, low - group.start
            if section in self._zeroed or not self._index.has(name, section):
                yield from _zeros(field, target, high - low)
                continue
            bases = self._code_bases(name, section, first, first + high - low)
            if bases is not None:
                yield from self._base_portions(name, section, field, bases)
            for block, start, count in self._index.blocks(name, section, first, first + high - low):
                yield Portion(block, start, count, field, target, bases)
                target += count

    def _code_bases(self, name: str, section: str, start: int, stop: int) -> CodeBases | None:
        """Return room for the bases of codes, or None if a section has no codes."""
        if not self._index.has(name, section + BASE):
            return None
        first = start // CODE_BLOCK_NUMEL
        count = -(-stop // CODE_BLOCK_NUMEL) - first
        return CodeBases(first, np.empty(count, np.uint16))

    def _base_portions(
        self, name: str, section: str, field: Field, bases: CodeBases
    ) -> Iterator[Portion]:
        """Yield what bases are made of; it comes before their codes."""
        target = 0
        stop = bases.first + bases.values.size
        for block, start, count in self._index.blocks(name, section + BASE, bases.first, stop):
            yield Portion(block, start, count, field, target, bases, is_bases=True)
            target += count

    def _settle(self, segment: Segment) -> None:
        """Tell whoever depends on the values that they changed."""
        segment.forget_values()
        gather_values(segment, self._store.ledger)
        reducer = self._runtime.reducer
        if reducer is None or not self._store.has_gradient(segment.index):
            return
        for position, member in enumerate(segment.members):
            saved = self._index.has(self._names.get(member.name, ""), GRADIENT)
            if segment.layout.numels[position] and not saved:
                segment.dropped_gradients.add(position)
        reducer.take_stored(segment)


def verify_blocks(files: CheckpointFiles, io: Engine, thread_count: int) -> int:
    """Compare every block of a checkpoint with its checksum; return the bytes that were read.

    Raises:
        CheckpointError: naming the first damaged block.
    """
    blocks = (
        (piece, number)
        for rank in files.manifest.ranks
        for file in rank.files
        for piece in sorted(file.pieces, key=lambda each: each.offset)
        for number in range(len(piece.checksums))
    )
    crew, size_bytes = Crew(thread_count), 0

    def compare(batch: list[ReadBytes]) -> None:
        try:
            for each in batch:
                files.compare(each)
        finally:
            for each in batch:
                reader.release(each)

    with files.reader(io, blocks) as reader:
        try:
            for _, batch in itertools.groupby(files.stream(reader), lambda read: id(read.batch)):
                reads = list(batch)
                size_bytes += sum(each.span.size_bytes for each in reads)
                crew.give(partial(compare, reads))
            crew.wait()
        finally:
            crew.settle()
            crew.close()
    return size_bytes


def _block_bytes(piece: PieceEntry) -> int:
    """Return the bytes of the largest block of a piece."""
    return min(piece.numel, CHECKSUM_NUMEL) * DTYPES[piece.dtype].itemsize


def _zeros(field: Field, target: int, numel: int) -> Iterator[Portion]:
    for start in range(0, numel, CHECKSUM_NUMEL):
        yield Portion(None, 0, min(CHECKSUM_NUMEL, numel - start), field, target + start)
