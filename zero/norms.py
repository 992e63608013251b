"""The norm of all gradients, from the squares that each rank has measured.

Squares are measured as gradients reach their shards, so the step asks for few of them: those that
rest at their parameters, and those that somebody has set since.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from offload import Kernels, Store
from offload.arrays import torch_dtype
from zero.comm import Communicator
from zero.kept import KeptGradients
from zero.squares import SquaredNorms
from zero.unit import Segment


class GradientNorm:
    """Measures the gradients of this rank, and takes the norm over all ranks."""

    def __init__(
        self,
        segments: Sequence[Segment],
        store: Store,
        kernels: Kernels,
        communicator: Communicator,
        kept: KeptGradients,
    ) -> None:
        self._store = store
        self._communicator = communicator
        self._kept = kept
        self._segments = [segment for segment in segments if segment.spec.trainable]
        self._squares = SquaredNorms(segments, store, kernels)
        self._names = {
            member.order: member.name for segment in segments for member in segment.members
        }
        self._not_finite: list[str] = []
        self._unmeasured: set[int] = set()
        """Segments in which somebody has set gradients."""

    @property
    def not_finite(self) -> list[str]:
        """Parameters whose gradient, on any rank, was not finite at the last `take`."""
        return self._not_finite

    def measure(self, segment: Segment, shard: torch.Tensor) -> None:
        """Measure the gradients in this rank's shard of a segment."""
        self._squares.measure_shard(segment, shard)
        self._unmeasured.discard(segment.index)

    def note_set(self, segment: Segment) -> None:
        """Have a segment's gradients measured anew at the step: somebody has set them."""
        self._unmeasured.add(segment.index)

    def forget(self) -> None:
        """Forget what was set, at the end of a window."""
        self._unmeasured.clear()

    def begin(self) -> Callable[[], float]:
        """Issue what measures the accumulated gradients; the call returned waits for it.

        That one returns the L2 norm of all ranks, computed in fp64. Squares are summed in parameter
        then rank order, see [Note: block norm]. A collective.
        """
        for segment in self._segments:
            if self._kept.keeps(segment):
                self._measure_kept(segment)
            elif segment.index in self._unmeasured:
                self._measure_stored(segment)
            if not self._store.has_gradient(segment.index):
                self._squares.clear(segment)
        self._squares.issue()
        return self._take

    def _take(self) -> float:
        self._communicator.join("a step")
        rows = self._communicator.gather_rows(self._squares.rows())
        bad = torch.nonzero(~torch.isfinite(rows).all(0)).reshape(-1).tolist()
        self._not_finite = [self._names[order] for order in bad]
        total = 0.0
        for by_rank in rows.t().tolist():
            for square in by_rank:
                total += square
        return math.sqrt(total) if total >= 0 else math.nan

    def _measure_kept(self, segment: Segment) -> None:
        self._kept.count(segment)
        positions = range(len(segment.members))
        self._squares.measure(segment, [self._kept.gradient(segment, each) for each in positions])

    def _measure_stored(self, segment: Segment) -> None:
        device = self._store.device
        shard = device.zeros(segment.layout.shard_numel, torch_dtype(segment.spec.gradient))
        if shard.numel():
            device.join(self._store.read_gradient(segment.index, device.memory_of(shard)))
        self.measure(segment, shard)
