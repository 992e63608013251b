"""Unsharded gradients on their way: between the ranks, and from a device to host memory.

[Note: two types] Gradients accumulate in one type, and several ranks add them up in the same or in
the one that `communication_data_type` names. Then all that a rank gives is cast into a copy; the
sum is made and divided in the copy's type, in rank order, and the shard of the mean is rounded once
to the type that accumulates. A wider type rounds the sum less, a narrower one moves fewer bytes. An
fp16 sum that overflows is infinite, and so is the norm: that step is skipped.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload import Store
from offload.arrays import torch_dtype
from offload.device import PASSED, Fence
from offload.ledger import REDUCED, Activity
from zero.comm import Communicator
from zero.unit import Segment

Keep = Callable[[Segment, torch.Tensor], Fence]
"""Accumulates a shard of the gradients of a segment; until its fence has passed, it is read."""


@dataclass(frozen=True, slots=True, eq=False)
class _Exchange:
    segment: Segment
    scratch: torch.Tensor
    fence: Fence
    keep: Keep


class PassingGradients:
    """What cannot be freed yet, because a copy or an exchange reads it.

    On a device of its own the exchange between ranks runs beside the backward of the next unit;
    what follows it is issued when that unit is reduced, or the backward ends.
    """

    def __init__(self, store: Store, communicator: Communicator) -> None:
        self._store = store
        self._communicator = communicator
        self._exchanged: collections.deque[_Exchange] = collections.deque()
        self._leaving: collections.deque[tuple[torch.Tensor, Fence]] = collections.deque()

    @property
    def is_exchanging(self) -> bool:
        """Whether there are gradients that have yet to be accumulated."""
        return bool(self._exchanged)

    @property
    def held_bytes(self) -> int:
        """Bytes of what is on its way."""
        held = sum(each.nbytes for each, _ in self._leaving)
        return held + sum(each.scratch.nbytes for each in self._exchanged)

    def reduce(self, segment: Segment, scratch: torch.Tensor, keep: Keep) -> None:
        """Begin to add up the gradients of all ranks; each keeps the mean of its shard."""
        if self._communicator.world_size == 1:
            self._let_be_kept(scratch, keep(segment, scratch))
            return
        dtype = self._reduction(segment)
        with self._store.ledger.timing(Activity.COLLECTIVE):
            fence = self._store.device.beside(lambda: self._average(scratch, dtype), scratch)
        moved_bytes = scratch.numel() * dtype.itemsize
        self._store.ledger.exchanged(REDUCED, moved_bytes, self._communicator.world_size)
        self._exchanged.append(_Exchange(segment, scratch, fence, keep))
        if fence is PASSED:
            self.finish()

    def finish(self) -> None:
        """Accumulate what the ranks have exchanged."""
        while self._exchanged:
            done = self._exchanged.popleft()
            self._store.device.join(done.fence)
            shard = self._communicator.own_slice(done.scratch)
            if self._store.device.is_host:
                self._note_freed(done)
            self._let_be_kept(done.scratch, done.keep(done.segment, shard))

    def abandon(self) -> None:
        """Drop what the ranks have exchanged: its backward failed."""
        while self._exchanged:
            self._store.device.join(self._exchanged[0].fence)
            self._exchanged.popleft()
        self.let_leave(0)

    def make_room(self, *, is_crowded: bool) -> None:
        """Free what has left, but for the gradients of one unit beside those that arrive.

        Args:
            is_crowded: whether gradients of another unit wait beside those that arrive.
        """
        self.let_leave(0 if self._exchanged or is_crowded else 1)

    def let_leave(self, count: int) -> None:
        """Free unsharded gradients that were copied to host memory, all but the last `count`."""
        while len(self._leaving) > count:
            _, fence = self._leaving[0]  # it keeps its memory until the device has joined
            self._store.device.join(fence)
            self._leaving.popleft()

    def _reduction(self, segment: Segment) -> torch.dtype:
        return torch_dtype(self._store.plan.request.reduction_of(segment.spec))

    def _average(self, scratch: torch.Tensor, dtype: torch.dtype) -> None:
        """Make this rank's slice of `scratch` the mean over the ranks, see [Note: two types]."""
        moved = scratch.to(dtype)
        shard = self._communicator.reduce_scatter_in_place(moved)
        shard.div_(self._communicator.world_size)
        if moved is not scratch:
            self._communicator.own_slice(scratch).copy_(shard)

    def _note_freed(self, done: _Exchange) -> None:
        """Take note of the copy that gloo reduced in, and of the one in another type."""
        dtype = self._reduction(done.segment)
        count = 1 + (dtype is not done.scratch.dtype)
        self._store.heap.freed(count * done.scratch.numel() * dtype.itemsize)

    def _let_be_kept(self, scratch: torch.Tensor, fence: Fence) -> None:
        if fence is not PASSED:
            self._leaving.append((scratch, fence))
