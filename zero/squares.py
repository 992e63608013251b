"""Squared norms of gradients by parameter, in fp64, see [Note: block norm].

On a device the sums of blocks stay there as they come; the host asks for all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload import Kernels, Store, add_block_sums, array_at, tensor_span
from offload.kernels_device import block_count
from zero.unit import Segment


class SquaredNorms:
    """This rank's share of the squared norm of each parameter's gradient."""

    def __init__(self, segments: Sequence[Segment], store: Store, kernels: Kernels) -> None:
        self._store = store
        self._kernels = kernels
        count = 1 + max(
            (member.order for segment in segments for member in segment.members), default=-1
        )
        self._squares = torch.zeros(count, dtype=torch.float64, device="cpu")
        self._on_device: dict[int, torch.Tensor] = {}
        """Sums of blocks by parameter, on a device, that are not in `_squares` yet."""
        self._waiting: dict[int, torch.Tensor] = {}
        """Gradients by parameter, on a device, that are measured when rows are asked for."""

    def clear(self, segment: Segment) -> None:
        """Note that a segment has no gradients."""
        for member in segment.members:
            self._squares[member.order] = 0.0
            self._on_device.pop(member.order, None)
            self._waiting.pop(member.order, None)

    def measure_shard(self, segment: Segment, shard: torch.Tensor) -> None:
        """Measure the gradients in this rank's shard of a segment."""
        self.clear(segment)
        pieces = [
            (segment.members[piece.index].order, shard[piece.start : piece.start + piece.numel])
            for piece in segment.pieces
            if piece.numel
        ]
        self._measure(segment, pieces, [piece.first for piece in segment.pieces if piece.numel])

    def measure(self, segment: Segment, gradients: Sequence[torch.Tensor | None]) -> None:
        """Measure whole gradients of the members of a segment, flat; None counts as zero.

        On a device they must stay as they are until `issue` or `rows` is called.
        """
        self.clear(segment)
        pieces = [
            (segment.members[position].order, gradient)
            for position, gradient in enumerate(gradients)
            if gradient is not None and gradient.numel()
        ]
        if self._store.device.is_host:
            self._measure(segment, pieces, [0] * len(pieces))
        else:
            self._waiting.update(pieces)

    def issue(self) -> None:
        """Have the device sum what waits for it, all at once."""
        if self._waiting:
            values = list(self._waiting.values())
            self._sum_blocks(list(self._waiting), values, [0] * len(values))
            self._waiting.clear()

    def rows(self) -> torch.Tensor:
        """Return the squares by the order of the parameters, fp64, on the host."""
        self.issue()
        if self._on_device:
            blocks = torch.cat(list(self._on_device.values()))
            sums = self._store.device.fetch(blocks)().numpy()
            start = 0
            for order, own in self._on_device.items():
                stop = start + own.numel()
                self._squares[order] = add_block_sums(sums[start:stop])
                start = stop
            self._on_device.clear()
        return self._squares

    def _measure(
        self, segment: Segment, pieces: Sequence[tuple[int, torch.Tensor]], firsts: Sequence[int]
    ) -> None:
        """Measure, now, parts of gradients of which `firsts` elements come before."""
        if not pieces:
            return
        if not self._store.device.is_host:
            self._sum_blocks([order for order, _ in pieces], [each for _, each in pieces], firsts)
            return
        for (order, values), first in zip(pieces, firsts, strict=True):
            array = array_at(tensor_span(values), segment.spec.gradient, values.numel())
            self._squares[order] = self._kernels.sum_squares(array, first)

    def _sum_blocks(
        self, orders: Sequence[int], values: Sequence[torch.Tensor], firsts: Sequence[int]
    ) -> None:
        """Have the device sum the squares of the norm's blocks, all tensors of a type at once."""
        by_type: dict[torch.dtype, list[tuple[int, tuple[torch.Tensor, int]]]] = {}
        for order, each, first in zip(orders, values, firsts, strict=True):
            by_type.setdefault(each.dtype, []).append((order, (each, first)))
        for found in by_type.values():
            pieces = [piece for _, piece in found]
            counts = [block_count(each.numel(), first) for each, first in pieces]
            sums = self._store.device_kernels.block_sums_of(pieces)
            blocks = zip(found, torch.split(sums, counts), strict=True)
            self._on_device.update({order: own for (order, _), own in blocks})
