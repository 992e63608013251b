"""Fill sub-groups with blocks of files, on several threads."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from aio_ops import Span
from estimators import CODE_BLOCK_NUMEL
from offload import Field
from offload.block_reader import BlockReader, ReadBytes
from offload.codes import Bases
from offload.crew import Crew
from offload.groups import GroupWriter
from offload.ranges import MOMENTS
from offload.state import decode_stored
from zero.checkpoint.manifest import CHECKSUM_NUMEL, DTYPES, PieceEntry

BlockKey = tuple[PieceEntry, int]
"""A piece and the number of a block of it."""


@dataclass(frozen=True, slots=True)
class CodeBases:
    """The bases of codes that one sub-group needs of one tensor."""

    first: int
    """Number of the first block of codes, in the tensor."""
    values: Bases


@dataclass(frozen=True, slots=True)
class Portion:
    """Elements of a block that go to elements of a sub-group; without a block they are zero."""

    block: BlockKey | None
    start: int
    """First element, in the block."""
    numel: int
    field: Field
    target: int
    """First element, in the sub-group; of bases, their first place among `bases`."""
    bases: CodeBases | None = None
    """Of codes: what they are decoded with. Of bases: where they go."""
    is_bases: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        """What names the block, without hashing all of it."""
        return (id(self.block[0]), self.block[1]) if self.block is not None else (0, 0)


class Filler:
    """Sets sub-groups from blocks, on several threads; each block is compared before it is used.

    Neighbours in a file that go to neighbours in a sub-group are one piece of work. A block that is
    needed more than once is copied for that.
    """

    def __init__(
        self,
        reader: BlockReader,
        stream: Iterator[ReadBytes],
        compare: Callable[[ReadBytes], None],
        crew: Crew,
        uses: collections.Counter[tuple[int, int]],
    ) -> None:
        """Prepare.

        Args:
            reader: lends the bytes of blocks.
            stream: its blocks, in the order in which portions need them first.
            compare: compares one with its checksum.
            crew: does the work.
            uses: how many portions need each block.
        """
        self._reader = reader
        self._stream = stream
        self._compare = compare
        self._crew = crew
        self._uses = uses
        self._kept: dict[tuple[int, int], torch.Tensor] = {}
        self._run: list[tuple[Portion, ReadBytes]] = []

    def fill(self, writer: GroupWriter, portions: Iterable[Portion]) -> None:
        """Set what portions say of a sub-group.

        Raises:
            CheckpointError: if a block is damaged; its bytes were not used.
        """
        try:
            for portion in portions:
                self._add(writer, portion)
            self._give(writer)
        except BaseException:
            self._crew.settle()
            raise
        self._crew.wait()

    def _add(self, writer: GroupWriter, portion: Portion) -> None:
        if portion.block is None:
            self._give(writer)
            writer.put(
                portion.field,
                portion.target,
                torch.zeros(portion.numel, dtype=torch.float32, device="cpu"),
            )
        elif portion.is_bases:
            self._give(writer)
            _keep_bases(portion, self._shared(portion))
        elif self._uses[portion.identity] > 1 or portion.identity in self._kept:
            self._give(writer)
            self._give_shared(writer, portion)
        else:
            if self._run and not self._follows(portion):
                self._give(writer)
            read = next(self._stream)
            if self._run and read.batch is not self._run[-1][1].batch:
                self._give(writer)
            self._run.append((portion, read))

    def _follows(self, portion: Portion) -> bool:
        """Tell whether a portion goes on where the run ends, in the sub-group and in the file."""
        last, _ = self._run[-1]
        return (
            portion.field is last.field
            and portion.target == last.target + last.numel
            and portion.start == 0
            and portion.bases is last.bases
            and last.start + last.numel == CHECKSUM_NUMEL
            and portion.block is not None
            and last.block is not None
            and portion.block[0] is last.block[0]
            and portion.block[1] == last.block[1] + 1
        )

    def _give(self, writer: GroupWriter) -> None:
        """Hand the run over; what must be set in order is set here."""
        run, self._run = self._run, []
        if not run:
            return
        work = partial(self._set, writer, run)
        if writer.is_ordered(run[0][0].field):
            work()
        else:
            self._crew.give(work)

    def _set(self, writer: GroupWriter, run: list[tuple[Portion, ReadBytes]]) -> None:
        try:
            for _, read in run:
                self._compare(read)
            portion, first = run[0]
            _, last = run[-1]
            size_bytes = last.span.address + last.span.size_bytes - first.span.address
            view = Span(first.span.address, size_bytes, first.span.owner).view()
            values = torch.frombuffer(view, dtype=_dtype_of(portion))
            stop = portion.start + sum(each.numel for each, _ in run)
            decoded = _decoded(portion, values[portion.start : stop])
            writer.put(portion.field, portion.target, decoded)
        finally:
            for _, read in run:
                self._reader.release(read)

    def _give_shared(self, writer: GroupWriter, portion: Portion) -> None:
        values = self._shared(portion)

        def work() -> None:
            writer.put(portion.field, portion.target, _decoded(portion, values))

        if writer.is_ordered(portion.field):
            work()
        else:
            self._crew.give(work)

    def _shared(self, portion: Portion) -> torch.Tensor:
        """Return the values of a portion of a block that others need as well."""
        key = portion.identity
        block = self._kept.get(key)
        if block is None:
            read = next(self._stream)
            self._compare(read)
            data = np.frombuffer(read.span.view(), np.uint8).copy()  # torch would start threads
            block = torch.from_numpy(data).view(_dtype_of(portion))
            self._kept[key] = block
            self._reader.release(read)
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._kept[key]
        return block[portion.start : portion.start + portion.numel]


def _keep_bases(portion: Portion, values: torch.Tensor) -> None:
    """Put bases where the codes that follow look for them."""
    if portion.bases is None:
        raise RuntimeError("nobody waits for these bases")
    stop = portion.target + portion.numel
    portion.bases.values[portion.target : stop] = values.numpy()


def _decoded(portion: Portion, values: torch.Tensor) -> torch.Tensor:
    """Return moments as fp32; whatever else is as it is."""
    moment = MOMENTS.get(portion.field)
    if moment is None:
        return values
    bases = portion.bases
    if bases is None or portion.block is None:
        return decode_stored(moment, values, None)
    piece, number = portion.block
    first = piece.first + number * CHECKSUM_NUMEL + portion.start
    before = first % CODE_BLOCK_NUMEL  # codes are decoded by whole blocks
    skipped = first // CODE_BLOCK_NUMEL - bases.first
    whole = torch.cat([values.new_zeros(before), values]) if before else values
    return decode_stored(moment, whole, bases.values[skipped:])[before:]


def _dtype_of(portion: Portion) -> torch.dtype:
    """Return the type in which a portion was saved."""
    if portion.block is None:
        return torch.float32
    return DTYPES[portion.block[0].dtype]
