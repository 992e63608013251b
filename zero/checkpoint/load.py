"""Load a checkpoint into an engine: every rank reads what its own shards need, block by block.

[Note: loading] Everything that can be known without reading data is checked before anything
changes: the manifest, the files and their sizes, names and shapes of the model. Then the blocks
stream from the files into sub-groups, each block compared with its checksum before it is used. An
engine that has trained has something to lose, so all blocks are read and compared once before.
Whoever fails midway leaves an engine that refuses everything but another load.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from aio_ops import DataFile, Engine, Span, TransferError
from estimators import SubGroup
from offload import Field, Store, ensure_gradient, has_field
from offload.block_reader import ReadRequest, read_blocks
from offload.groups import write_group
from zero.checkpoint.manifest import (
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

_READS_AHEAD = 8
_MOST_BYTES_AHEAD = 32 << 20
"""What reads take in memory, all together, or the largest piece if that is less."""

BlockKey = tuple[PieceEntry, int]
"""A piece and the number of a block of it."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Elements of a block that go to elements of a sub-group; without a block they are zero."""

    block: BlockKey | None
    start: int
    """First element, in the block."""
    numel: int
    field: Field
    target: int
    """First element, in the sub-group."""

    @property
    def identity(self) -> tuple[int, int]:
        """What names the block, without hashing all of it."""
        return (id(self.block[0]), self.block[1]) if self.block is not None else (0, 0)


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

    def read(
        self, engine: Engine, blocks: Iterator[BlockKey], reads_ahead: int = _READS_AHEAD
    ) -> Iterator[tuple[BlockKey, Span]]:
        """Yield blocks in order, each compared with its checksum; memory is used again.

        Raises:
            CheckpointError: if a block is damaged; it was not handed out.
        """
        pieces = [piece for _, piece in self.manifest.pieces()]
        block = max((_block_bytes(piece) for piece in pieces), default=1)
        whole = max((piece.size_bytes for piece in pieces), default=1)
        ahead = min(whole, _MOST_BYTES_AHEAD) // reads_ahead
        requests = (self.request(block) for block in blocks)
        try:
            for request, span in read_blocks(
                engine,
                requests,
                block_bytes=max(block, ahead),
                block_count=reads_ahead,
            ):
                key: BlockKey = request.key  # type: ignore[assignment]
                self._compare(request, key, span)
                yield key, span
        except TransferError as error:
            raise CheckpointError(
                f"{self.folder} cannot be read: {error}; copy it again, or take another checkpoint"
            ) from error

    def _compare(self, request: ReadRequest, block: BlockKey, span: Span) -> None:
        piece, number = block
        found = xxhash.xxh3_64_hexdigest(span.view())
        if found != piece.checksums[number]:
            raise CheckpointError(
                f"{request.file.path}: {piece.key}, elements from {number * CHECKSUM_NUMEL} on, at"
                f" offset {request.offset}, has the checksum {found} and was written with"
                f" {piece.checksums[number]}: the file was damaged; take another checkpoint"
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

    def load(self, io: Engine, *, states: bool, gradients: bool) -> None:
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
        blocks = _Blocks(self._files.read(io, iter(order.values())), uses)
        for group, portions in plan:
            changed = {portion.field for portion in portions}
            numel = sum(portion.numel for portion in portions)
            covered = numel == len(changed) * group.numel
            with write_group(store, group, changed, keeps=not states, is_covered=covered) as writer:
                for portion in portions:
                    writer.put(portion.field, portion.target, blocks.values(portion))
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
            for block, start, count in self._index.blocks(name, section, first, first + high - low):
                yield Portion(block, start, count, field, target)
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


class _Blocks:
    """Gives the values of portions in order; a block that several need is kept for them."""

    def __init__(
        self, stream: Iterator[tuple[BlockKey, Span]], uses: collections.Counter[tuple[int, int]]
    ) -> None:
        self._stream = stream
        self._uses = uses
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def values(self, portion: Portion) -> torch.Tensor:
        """Return the values of a portion; they are valid until the next one."""
        if portion.block is None:
            return torch.zeros(portion.numel)
        key = portion.identity
        block = self._kept.get(key)
        self._uses[key] -= 1
        if block is None:
            _, span = next(self._stream)
            block = torch.frombuffer(span.view(), dtype=DTYPES[portion.block[0].dtype])
            if self._uses[key]:
                block = self._kept[key] = block.clone()
        if not self._uses[key]:
            self._kept.pop(key, None)
        return block[portion.start : portion.start + portion.numel]


def verify_blocks(files: CheckpointFiles, io: Engine) -> int:
    """Compare every block of a checkpoint with its checksum; return the bytes that were read.

    Raises:
        CheckpointError: naming the first damaged block.
    """
    blocks = (
        (piece, number)
        for rank in files.manifest.ranks
        for piece in sorted(rank.file.pieces, key=lambda each: each.offset)
        for number in range(len(piece.checksums))
    )
    return sum(span.size_bytes for _, span in files.read(io, blocks))


def _block_bytes(piece: PieceEntry) -> int:
    """Return the bytes of the largest block of a piece."""
    return min(piece.numel, CHECKSUM_NUMEL) * DTYPES[piece.dtype].itemsize


def _zeros(field: Field, target: int, numel: int) -> Iterator[Portion]:
    for start in range(0, numel, CHECKSUM_NUMEL):
        yield Portion(None, 0, min(CHECKSUM_NUMEL, numel - start), field, target + start)
