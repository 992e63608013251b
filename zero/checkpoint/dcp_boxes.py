"""Ranges of logical elements as boxes, which torch.distributed.checkpoint stores tensors in.

A box is a start and a size in each dimension. A range of the elements of a tensor, in row-major
order, is made of few boxes, each of them contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """Return what two boxes of one tensor share, or None."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        stops = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(tuple(starts), sizes)

    def of(self, values: torch.Tensor, inner: Box) -> torch.Tensor:
        """Return the view of an inner box, of the values of this one."""
        for dimension, size in enumerate(inner.sizes):
            start = inner.offsets[dimension] - self.offsets[dimension]
            values = values.narrow(dimension, start, size)
        return values


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Yield the boxes that make up elements `[start, stop)`, each with its first element."""
    if start >= stop:
        return
    if not shape:
        yield start, Box((), ())
        return
    row = math.prod(shape[1:])
    inner = shape[1:]
    first, last = start // row, (stop - 1) // row
    if start % row or (first == last and stop % row):
        end = min(stop, (first + 1) * row)
        for at, box in boxes_of_range(inner, start - first * row, end - first * row):
            yield first * row + at, Box((first, *box.offsets), (1, *box.sizes))
        yield from boxes_of_range(shape, end, stop)
        return
    whole = stop // row
    zeros = (0,) * len(inner)
    yield start, Box((first, *zeros), (whole - first, *inner))
    for at, box in boxes_of_range(inner, 0, stop - whole * row):
        yield whole * row + at, Box((whole, *box.offsets), (1, *box.sizes))
