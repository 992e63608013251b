"""What one pass of the update works with, on the host or on a device."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from estimators import SubGroup
from offload.codes import RoundingKey
from offload.generic import GenericStep
from offload.kernels import Kernels
from offload.operands import StateArrays, Values
from offload.rules import UpdateScalars
from offload.state import update_sub_group
from offload.store import Store
from offload.update_parts import PartPlace, UpdatePart

GradientPieces = Sequence[tuple[int, Values]]
"""(where in the shard, values): gradients of a segment that are not in one array."""


@dataclass(frozen=True, slots=True)
class NamedPiece:
    """The part of one parameter that lies in a shard."""

    name: str
    first: int
    """First element of the parameter that lies in the shard."""
    start: int
    """Where that element lies in the shard."""
    numel: int


@dataclass(frozen=True, slots=True)
class Rounding:
    """What the random bits of lossy formats depend on: seed, step, parameter and element."""

    seed: int
    step: int
    pieces: Sequence[Sequence[NamedPiece]]
    """Of each segment, in the order of its shard."""

    def parts(self, segment: int, low: int, high: int) -> Iterator[tuple[int, int, str, int]]:
        """Yield `(start, stop, name, first)` of what lies in elements `[low, high)` of a shard.

        `first` is the number of the element at `start` in the parameter called `name`.
        """
        pieces = self.pieces[segment]
        at = bisect.bisect_right(pieces, low, key=lambda piece: piece.start + piece.numel)
        while at < len(pieces) and pieces[at].start < high:
            piece = pieces[at]
            at += 1
            start, stop = max(low, piece.start), min(high, piece.start + piece.numel)
            while start < stop:
                first = piece.first + start - piece.start
                end = min(stop, start + (1 << 32) - first % (1 << 32))
                yield start, end, piece.name, first
                start = end

    def key(self, name: str, first: int) -> RoundingKey:
        """Return what elements of a parameter from `first` on are rounded by."""
        return RoundingKey.derive(self.seed, self.step, name, first)


@dataclass(frozen=True, slots=True)
class UpdatePass:
    """One pass of the update over all sub-groups."""

    store: Store
    scalars: Sequence[UpdateScalars | GenericStep]
    rounding: Rounding | None
    pieces_of: Callable[[int], GradientPieces | None]
    """Gives the gradients of a segment that its caller keeps, or None.

    A device asks several times and must get the same tensors: it has noted where they lie.
    """

    def __post_init__(self) -> None:
        request = self.store.plan.request
        lossy = [spec.name for spec in request.segments if request.rounds(spec)]
        if lossy and self.rounding is None:
            raise ValueError(f"{lossy[0]} is stored in a lossy format; pass what it rounds by")

    def parts_of(self, group: SubGroup, pieces: Sequence[tuple[int, int]]) -> Sequence[UpdatePart]:
        """Return the parts of a sub-group whose gradients are pieces of a shard.

        What lies between pieces is padding, which is zero and stays so.

        Args:
            group: the sub-group.
            pieces: of each gradient, where it begins in the shard and how many elements it has.
        """
        request = self.store.plan.request
        rounding = self.rounding
        if rounding is None or not request.rounds(request.segments[group.segment]):
            rounding = None
        wanted = (group.segment, group.start, group.stop, tuple(pieces))
        places = self.store.places.get(wanted)
        if places is None:
            places = self.store.places[wanted] = list(_places(group, pieces, rounding))
        return [
            UpdatePart(
                place.start,
                place.numel,
                place.piece,
                place.offset,
                rounding.key(place.name, place.first) if rounding is not None else None,
            )
            for place in places
        ]

    def scalars_of(self, group: SubGroup) -> UpdateScalars | GenericStep:
        """Return the scalars of a sub-group's optimizer settings."""
        return self.scalars[self.store.plan.request.segments[group.segment].param_group]

    def update(
        self,
        kernels: Kernels,
        group: SubGroup,
        operands: tuple[Values, StateArrays],
        pieces: GradientPieces,
    ) -> None:
        """Update parameters and state of a sub-group on the host, in place, from gradients."""
        parameter, state = operands
        pieces = pieces_in(group, pieces)
        gradients = [gradient for _, gradient in pieces]
        for part in self.parts_of(group, [(start, len(each)) for start, each in pieces]):
            update_sub_group(
                kernels,
                parameter[part.inside],
                part.gradient(gradients),
                state.part(part.inside),
                self.scalars_of(group),
                part.key,
            )


def pieces_in(group: SubGroup, pieces: GradientPieces) -> GradientPieces:
    """Return those pieces of a shard, which are in order, that have elements of a sub-group.

    A segment may have thousands, and hundreds of sub-groups.
    """
    first = bisect.bisect_right(pieces, group.start, key=lambda piece: piece[0] + len(piece[1]))
    last = bisect.bisect_left(pieces, group.stop, key=lambda piece: piece[0])
    return pieces[first:last]


def _places(
    group: SubGroup, pieces: Sequence[tuple[int, int]], rounding: Rounding | None
) -> Iterator[PartPlace]:
    """Yield where the parts of a sub-group are."""
    for number, (start, numel) in enumerate(pieces):
        low, high = max(start, group.start), min(start + numel, group.stop)
        if low >= high:
            continue
        named = (
            [(low, high, "", 0)] if rounding is None else rounding.parts(group.segment, low, high)
        )
        for first, stop, name, first_of_name in named:
            yield PartPlace(
                first - group.start, stop - first, number, first - start, name, first_of_name
            )
