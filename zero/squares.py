"""Squared norms of gradients by parameter, in fp64, see [Note: block norm].

On a device the sums of blocks stay there as they come; the host asks for all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload import Kernels, Store, add_block_sums, array_at, tensor_span
from zero.unit import Segment


class SquaredNorms:
    """This rank's share of the squared norm of each parameter's gradient."""

    def __init__(self, segments: Sequence[Segment], store: Store, kernels: Kernels) -> None:
        self._store = store
        self._kernels = kernels
        count = 1 + max(
            (member.order for segment in segments for member in segment.members), default=-1
        )
        self._squares = torch.zeros(count, dtype=torch.float64)
        self._on_device: dict[int, torch.Tensor] = {}
        """Sums of blocks by parameter, on a device, that are not in `_squares` yet."""

    def clear(self, segment: Segment) -> None:
        """Note that a segment has no gradients."""
        for member in segment.members:
            self._squares[member.order] = 0.0
            self._on_device.pop(member.order, None)

    def measure_shard(self, segment: Segment, shard: torch.Tensor) -> None:
        """Measure the gradients in this rank's shard of a segment."""
        self.clear(segment)
        for piece in segment.pieces:
            values = shard[piece.start : piece.start + piece.numel]
            self._measure(segment, piece.index, values, piece.first)

    def measure(self, segment: Segment, gradients: Sequence[torch.Tensor | None]) -> None:
        """Measure whole gradients of the members of a segment, flat; None counts as zero."""
        self.clear(segment)
        for position, gradient in enumerate(gradients):
            if gradient is not None:
                self._measure(segment, position, gradient, 0)

    def rows(self) -> torch.Tensor:
        """Return the squares by the order of the parameters, fp64, on the host."""
        if self._on_device:
            sums = torch.cat(list(self._on_device.values())).cpu().numpy()
            start = 0
            for order, blocks in self._on_device.items():
                stop = start + blocks.numel()
                self._squares[order] = add_block_sums(sums[start:stop])
                start = stop
            self._on_device.clear()
        return self._squares

    def _measure(self, segment: Segment, position: int, values: torch.Tensor, first: int) -> None:
        if not values.numel():
            return
        order = segment.members[position].order
        if self._store.device.is_host:
            array = array_at(tensor_span(values), segment.spec.gradient, values.numel())
            self._squares[order] = self._kernels.sum_squares(array, first)
        else:
            self._on_device[order] = self._store.device_kernels.block_sums(values, first)
