"""Where each parameter lies in a flat buffer, and which slice of it each rank owns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

TENSOR_ALIGNMENT_BYTES = 256
"""Every parameter starts at a multiple of this in its flat buffer: a weight that lies 4 bytes off
changes the bits of a matmul."""

SHARD_ALIGNMENT_NUMEL = 64
"""Every shard holds a multiple of this many elements."""

TILE_NUMEL = 4096
"""A multiple of what kernels on a device divide elements by: what is left of it is more work."""


def align_up(size: int, alignment: int) -> int:
    """Round `size` up to a multiple of `alignment`, both in the same unit."""
    return -(-size // alignment) * alignment


def align_down(size: int, alignment: int) -> int:
    """Round `size` down to a multiple of `alignment`, both in the same unit."""
    return size // alignment * alignment


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Offsets of the parameters of one flat buffer, in elements."""

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    padded_numel: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(self.numels)

    @property
    def shard_numel(self) -> int:
        """Elements of each rank's shard, padding included."""
        return self.padded_numel // self.world_size


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one shard."""

    index: int
    """Position of the parameter in its flat buffer."""
    first: int
    """First logical element of the parameter that lies in the shard."""
    start: int
    """Where that element lies in the shard."""
    numel: int


def flat_layout(numels: Sequence[int], element_bytes: int, world_size: int) -> FlatLayout:
    """Pack parameters of `numels` elements into one flat buffer that `world_size` ranks share.

    Raises:
        ValueError: if a size is negative or `world_size` is not positive.
    """
    return _flat_layout(tuple(numels), element_bytes, world_size)


@functools.lru_cache(maxsize=4096)
def _flat_layout(numels: tuple[int, ...], element_bytes: int, world_size: int) -> FlatLayout:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    alignment = TENSOR_ALIGNMENT_BYTES // element_bytes
    offsets = []
    end = 0
    for numel in numels:
        if numel < 0:
            raise ValueError(f"a parameter cannot have {numel} elements")
        start = align_up(end, alignment)
        offsets.append(start)
        end = start + numel
    padded = align_up(end, SHARD_ALIGNMENT_NUMEL * world_size)
    return FlatLayout(numels, tuple(offsets), padded, world_size)


def shard_bounds(layout: FlatLayout, rank: int) -> tuple[int, int]:
    """Return the elements `[start, stop)` of the flat buffer that `rank` owns.

    Raises:
        ValueError: if `rank` is not one of the layout's ranks.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is not in a world of {layout.world_size}")
    return rank * layout.shard_numel, (rank + 1) * layout.shard_numel


def shard_pieces(layout: FlatLayout, rank: int) -> list[Piece]:
    """Return the non-empty pieces of parameters that lie in the shard of `rank`, in order."""
    start, stop = shard_bounds(layout, rank)
    pieces = []
    for index, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True)):
        low, high = max(start, offset), min(stop, offset + numel)
        if low < high:
            pieces.append(Piece(index, low - offset, low - start, high - low))
    return pieces


def split_evenly_bounded(numel: int, max_numel: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into the fewest ranges of at most `max_numel`, of nearly equal length.

    Every cut is at a multiple of `SHARD_ALIGNMENT_NUMEL`, so `max_numel` must be at least that.
    Long ranges are cut at multiples of `TILE_NUMEL` where that takes no more of them.
    """
    unit = SHARD_ALIGNMENT_NUMEL
    if max_numel < unit:
        raise ValueError(f"a sub-group holds at least {unit} elements, got a limit of {max_numel}")
    count = -(-numel // (max_numel // unit * unit))
    if count == 0:
        return []
    length = align_up(-(-numel // count), unit)
    if length >= 64 * TILE_NUMEL:
        length = min(align_up(length, TILE_NUMEL), max_numel // unit * unit)
    return [(start, min(start + length, numel)) for start in range(0, numel, length)]
