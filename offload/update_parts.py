"""The parts of a sub-group that an update goes through: each with one gradient and one key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.codes import RoundingKey
from offload.operands import Values


class PartPlace(NamedTuple):
    """Where a part is, at every step the same, and which elements of a parameter it has."""

    start: int
    numel: int
    piece: int
    offset: int
    name: str
    """Empty where nothing is rounded at random."""
    first: int
    """First element, in the parameter."""


@dataclass(frozen=True, slots=True)
class UpdatePart:
    """Consecutive elements of a sub-group."""

    start: int
    """First element, in the sub-group."""
    numel: int
    piece: int
    """Which of the sub-group's gradients these elements have."""
    offset: int
    """Where they begin in that gradient."""
    key: RoundingKey | None
    """What they are rounded by in a lossy format."""

    @property
    def inside(self) -> slice:
        """The elements, in the sub-group."""
        return slice(self.start, self.start + self.numel)

    def gradient(self, pieces: Sequence[Values]) -> Values:
        """Return the gradients of these elements."""
        return pieces[self.piece][self.offset : self.offset + self.numel]


@dataclass(frozen=True, slots=True)
class GroupParts:
    """The parts of one sub-group, as kernels have prepared them."""

    parts: Sequence[UpdatePart]
    launches: Sequence[Any] = ()
    """What kernels keep of parts that they update at once; without it they go part by part."""
