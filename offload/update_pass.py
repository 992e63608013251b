"""What one pass of the update over all sub-groups goes by: hyper-parameters, and what rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from estimators import SubGroup
from offload.codes import RoundingKey
from offload.rules import UpdateScalars
from offload.store import Store


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

    def parts(
        self, segment: int, low: int, high: int
    ) -> Iterator[tuple[int, int, RoundingKey | None]]:
        """Yield `(start, stop, key)` of what lies in elements `[low, high)` of a shard."""
        for piece in self.pieces[segment]:
            start, stop = max(low, piece.start), min(high, piece.start + piece.numel)
            while start < stop:
                first = piece.first + start - piece.start
                end = min(stop, start + (1 << 32) - first % (1 << 32))
                yield start, end, RoundingKey.derive(self.seed, self.step, piece.name, first)
                start = end


@dataclass(frozen=True, slots=True)
class UpdatePass:
    """One pass of the update over all sub-groups."""

    store: Store
    scalars: Sequence[UpdateScalars]
    rounding: Rounding | None

    def __post_init__(self) -> None:
        request = self.store.plan.request
        lossy = [spec.name for spec in request.segments if request.rounds(spec)]
        if lossy and self.rounding is None:
            raise ValueError(f"{lossy[0]} is stored in a lossy format; pass what it rounds by")

    def parts(
        self, group: SubGroup, low: int, high: int
    ) -> Iterable[tuple[int, int, RoundingKey | None]]:
        """Return what one call of the kernel updates of elements `[low, high)` of a shard."""
        request = self.store.plan.request
        if self.rounding is None or not request.rounds(request.segments[group.segment]):
            return [(low, high, None)]
        return self.rounding.parts(group.segment, low, high)
