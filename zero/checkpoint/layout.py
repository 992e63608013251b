"""What one rank's file holds and where: decided before a byte is written.

The file is a safetensors file: eight bytes of header length, the header, the pieces back to back.
The largest element types come first, so that every piece is aligned to its type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from estimators import CODE_BLOCK_NUMEL, SubGroup
from estimators.layout import align_up
from offload import Field, field_dtype, has_field, stored_dtype
from zero.checkpoint.manifest import (
    BASE,
    DTYPE_CODES,
    GRADIENT,
    SMALL_SECTIONS,
    WEIGHT,
    PieceEntry,
)
from zero.errors import CheckpointError
from zero.replan import Moments
from zero.runtime import Runtime
from zero.unit import Segment
from zero.whole import LateTensor

_HEADER_ALIGNMENT_BYTES = 4096
LEAST_FROZEN_BYTES = 1 << 20
"""What frozen shards have at least for a file of their own."""


@dataclass(frozen=True, slots=True)
class PieceSource:
    """Where the values of a piece rest: from element `start` of a segment's shard on."""

    piece: PieceEntry
    segment: int
    field: Field
    start: int
    block_numel: int = 1
    """Elements of the shard for one of the piece: bases of codes have more than one."""

    def part(self, group: SubGroup) -> range:
        """Return which elements of the piece a sub-group has."""
        numel = self.piece.numel * self.block_numel
        low, high = max(self.start, group.start), min(self.start + numel, group.stop)
        if low >= high:
            return range(0)
        first = (low - self.start) // self.block_numel
        return range(first, -(-(high - self.start) // self.block_numel))


@dataclass(frozen=True, slots=True)
class SmallSource:
    """A piece whose values are in memory, in a spool, or in a record of whole tensors."""

    piece: PieceEntry
    values: torch.Tensor | Moments | LateTensor


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One rank's file."""

    header: bytes
    size_bytes: int
    sources: tuple[PieceSource, ...]
    small: tuple[SmallSource, ...]

    @property
    def pieces(self) -> tuple[PieceEntry, ...]:
        """All pieces, without checksums."""
        return (*(each.piece for each in self.sources), *(each.piece for each in self.small))

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest piece."""
        return max((piece.size_bytes for piece in self.pieces), default=0)


def saved_fields(runtime: Runtime, segment: int) -> list[tuple[str, Field]]:
    """Return the sections of a segment that are saved now, and the field of each."""
    store = runtime.store
    if not has_field(store, segment, Field.MASTER):
        return [(WEIGHT, Field.PARAMETER)]
    found = [(WEIGHT, Field.MASTER)]
    found += [
        (name, field) for name, field in runtime.states.items() if has_field(store, segment, field)
    ]
    if store.has_gradient(segment):
        found.append((GRADIENT, Field.GRADIENT))
    return found


def plan_file(
    runtime: Runtime,
    small: Mapping[str, Mapping[str, torch.Tensor | LateTensor]],
    waiting: Mapping[str, Moments],
    *,
    exclude_frozen: bool,
    as_stored: bool = False,
) -> FilePlan:
    """Decide what this rank's file holds.

    Args:
        runtime: the shards.
        small: this rank's own tensors, by section and name.
        waiting: state of parameters that are frozen at the moment, by name.
        exclude_frozen: leave out the weights of frozen parameters.
        as_stored: save states in the types in which they rest.
    """
    sources: list[PieceSource | SmallSource] = []
    for segment in runtime.segments:
        if exclude_frozen and not segment.spec.trainable:
            continue
        for section, field in saved_fields(runtime, segment.index):
            dtype = (stored_dtype if as_stored else field_dtype)(
                runtime.store, segment.index, field
            )
            sources += _of_segment(segment, section, field, dtype)
            if dtype is torch.uint8 and field is not Field.PARAMETER:
                sources += _bases_of_segment(segment, section, field)
    for name, moments in waiting.items():
        sources += _of_moments(runtime, name, moments)
    for section, tensors in small.items():
        if section not in SMALL_SECTIONS:
            raise ValueError(f"section {section} is not of small tensors")
        sources += [_of_tensor(section, name, each) for name, each in tensors.items()]
    return _lay_out(sources)


def plan_frozen_file(runtime: Runtime) -> FilePlan | None:
    """Decide what a file of frozen shards alone holds, or None if they are too few for one."""
    sources = [
        source
        for segment in runtime.segments
        if not segment.spec.trainable
        for source in _of_segment(
            segment,
            WEIGHT,
            Field.PARAMETER,
            field_dtype(runtime.store, segment.index, Field.PARAMETER),
        )
    ]
    if sum(source.piece.size_bytes for source in sources) < LEAST_FROZEN_BYTES:
        return None
    return _lay_out(sources)


def _of_segment(
    segment: Segment, section: str, field: Field, dtype: torch.dtype
) -> Iterable[PieceSource]:
    for piece in segment.pieces:
        if field is Field.GRADIENT and piece.index in segment.dropped_gradients:
            continue
        member = segment.members[piece.index]
        shape = tuple(member.parameter.shape)
        is_whole = piece.numel == torch.Size(shape).numel()
        entry = PieceEntry(
            member.name,
            section,
            DTYPE_CODES[dtype],
            piece.first,
            shape if is_whole else (piece.numel,),
            0,
            f"{section}/{member.name}" + ("" if is_whole else f"@{piece.first}"),
        )
        yield PieceSource(entry, segment.index, field, piece.start)


def _bases_of_segment(segment: Segment, section: str, field: Field) -> Iterable[PieceSource]:
    """Return the bases of a section of codes, see `CODE_BLOCK_NUMEL`."""
    for piece in segment.pieces:
        member = segment.members[piece.index]
        first, count = piece.first // CODE_BLOCK_NUMEL, -(-piece.numel // CODE_BLOCK_NUMEL)
        if not count:
            continue
        is_whole = piece.numel == member.parameter.shape.numel()
        entry = PieceEntry(
            member.name,
            section + BASE,
            DTYPE_CODES[torch.uint16],
            first,
            (count,),
            0,
            f"{section}{BASE}/{member.name}" + ("" if is_whole else f"@{first}"),
        )
        yield PieceSource(entry, segment.index, field, piece.start, CODE_BLOCK_NUMEL)


def _of_moments(runtime: Runtime, name: str, moments: Moments) -> Iterable[SmallSource]:
    for section, shard in moments.states.items():
        start, stop = shard.bounds(runtime.communicator.rank)
        if start < stop:
            entry = PieceEntry(
                name, section, "F32", start, (stop - start,), 0, f"{section}/{name}@{start}"
            )
            yield SmallSource(entry, moments)


def _of_tensor(section: str, name: str, tensor: torch.Tensor | LateTensor) -> SmallSource:
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise CheckpointError(
            f"{section} tensor {name} is {tensor.dtype}, which safetensors cannot hold; convert it"
        )
    entry = PieceEntry(name, section, code, 0, tuple(tensor.shape), 0, f"{section}/{name}")
    return SmallSource(entry, tensor)


def _lay_out(sources: Sequence[PieceSource | SmallSource]) -> FilePlan:
    """Give every piece its place; the header comes first, padded to a page."""
    ordered = sorted(sources, key=lambda each: -each.piece.size_bytes // max(each.piece.numel, 1))
    places: list[tuple[PieceSource | SmallSource, int]] = []
    end = 0
    for source in ordered:
        places.append((source, end))
        end += source.piece.size_bytes
    header = safetensors_header((each.piece, offset) for each, offset in places)
    base = len(header)
    placed = [
        replace(each, piece=replace(each.piece, offset=base + offset)) for each, offset in places
    ]
    return FilePlan(
        header,
        base + end,
        tuple(each for each in placed if isinstance(each, PieceSource)),
        tuple(each for each in placed if isinstance(each, SmallSource)),
    )


def safetensors_header(pieces: Iterable[tuple[PieceEntry, int]]) -> bytes:
    """Return the first bytes of a safetensors file: length and header, padded to whole pages."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for piece, offset in pieces:
        if piece.key in entries:
            raise CheckpointError(f"two tensors of one file are called {piece.key!r}; rename one")
        entries[piece.key] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [offset, offset + piece.size_bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = align_up(len(text) + 8, _HEADER_ALIGNMENT_BYTES) - 8
    return length.to_bytes(8, "little") + text.ljust(length)
