"""Gradients on their way from autograd to the shards.

[Note: gradient path] A post-accumulate hook moves each gradient from `parameter.grad` into the flat
scratch of its segment. When the unit's backward or the whole one ends, the scratch is reduce-
scattered over the ranks, averaged, added to what the window has accumulated, and the squared norms
of the sum are taken over this rank's pieces. So a norm never depends on tiers, slots or sub-groups.
Where nothing moves, the tensors that autograd made are kept instead, see `zero/kept.py`. There it
adds what nested backwards deliver of a parameter one by one, so one rank does so here as well.

[Note: missing gradients] Ranks may use different parts of a unit: experts, branches, layers that a
batch skips. So several ranks reduce at the ends alone, where they first tell each other which
segments got anything; a rank that has nothing for one gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from estimators.summary import GRADIENT_SCRATCH
from offload import Kernels, Ledger, Store
from offload.arrays import torch_dtype
from offload.device import Fence
from zero.comm import Communicator
from zero.hooks import LastHooks, ModuleHook
from zero.kept import KeptGradients
from zero.norms import GradientNorm
from zero.parameter import take_gradient
from zero.passing import PassingGradients
from zero.shown import ShownGradients
from zero.unit import Segment


class GradientReducer:
    """Collects, reduces and accumulates the gradients of all segments."""

    def __init__(
        self,
        segments: Sequence[Segment],
        store: Store,
        kernels: Kernels,
        communicator: Communicator,
    ) -> None:
        self._store = store
        self._ledger: Ledger = store.ledger
        self._communicator = communicator
        self._all_segments = tuple(segments)
        self._segments = [segment for segment in segments if segment.spec.trainable]
        self._on_arrival: Callable[[], None] | None = None
        self._on_arrived: Callable[[Segment, int], None] | None = None
        self._scratch: dict[int, torch.Tensor] = {}
        self._arrived: dict[int, set[int]] = {}
        self._passing = PassingGradients(store, communicator)
        self.kept = KeptGradients(store, segments)
        self.shown = ShownGradients(store, segments, self.kept.keeps)
        self.hooks = LastHooks()
        self.norm = GradientNorm(segments, store, kernels, communicator, self.kept)

    def register(
        self, on_arrival: Callable[[], None], on_arrived: Callable[[Segment, int], None]
    ) -> list[torch.utils.hooks.RemovableHandle]:
        """Hook every parameter that gets gradients.

        Gradients that no optimizer asks for are dropped as they arrive.

        Args:
            on_arrival: runs at each, inside backward, before it is taken.
            on_arrived: gets the segment and the position of each when it was taken.
        """
        self._on_arrival, self._on_arrived = on_arrival, on_arrived
        handles = []
        for segment in self._all_segments:
            for position, member in enumerate(segment.members):
                if not member.parameter.requires_grad:
                    continue
                if segment.is_in_place and segment.spec.trainable:
                    before = ModuleHook(self._before_arrival)
                    handles.append(member.parameter.register_hook(before))  # type: ignore[no-untyped-call]
                collect = ModuleHook(self._arrive, segment, position)
                handles.append(self.hooks.add(member.parameter, collect))
        return handles

    def flush(self, segments: Sequence[Segment] | None = None) -> None:
        """Reduce what has arrived and is not reduced yet, in segment order.

        What has arrived on any rank is reduced on all, see [Note: missing gradients].

        Args:
            segments: the segments to look at; all of them by default.
        """
        looked_at = self._segments if segments is None else segments
        arrived = {each.index for each in looked_at if each.index in self._scratch}
        if self._communicator.world_size > 1:
            place = -1 if segments is None else min((each.index for each in looked_at), default=-1)
            arrived = _union(self._communicator, self._segments, place, arrived)
            self._passing.finish()
        for index in sorted(arrived):
            self._reduce(self._all_segments[index])
        for segment in looked_at:
            self.kept.merge(segment)
        if segments is None:
            self._passing.finish()
            self._passing.let_leave(0)
            self.shown.show()

    def abandon(self) -> None:
        """Drop gradients that have arrived but are not reduced: their backward failed."""
        self._scratch.clear()
        self._arrived.clear()
        self._passing.abandon()
        self.kept.abandon()

    def has_pending(self, segment: Segment | None = None) -> bool:
        """Tell whether gradients wait for their reduction, or those of one segment."""
        if segment is not None:
            return segment.index in self._scratch
        return bool(self._scratch) or self._passing.is_exchanging or self.kept.is_arriving

    def begin_norm(self) -> Callable[[], float]:
        """Issue what measures the accumulated gradients; the call returned waits for it.

        That one returns their L2 norm over all ranks, in fp64. A collective.
        """
        self._passing.let_leave(0)
        return self.norm.begin()

    def _before_arrival(self, _gradient: torch.Tensor) -> None:
        """Clear what autograd must not add to: of a failed backward, or shown."""
        if self._on_arrival is not None:
            self._on_arrival()
        if self.shown.is_showing:
            self.shown.withdraw()

    def _arrive(self, segment: Segment, position: int, parameter: torch.Tensor) -> None:
        if not segment.spec.trainable:
            take_gradient(parameter)
            if self._on_arrived is not None:
                self._on_arrived(segment, position)
            return
        if self._on_arrival is not None:
            try:
                self._on_arrival()
            except BaseException:
                take_gradient(parameter)  # its backward fails
                raise
        self._collect(segment, position, parameter)
        if self._on_arrived is not None:
            self._on_arrived(segment, position)

    def _collect(self, segment: Segment, position: int, parameter: torch.Tensor) -> None:
        if self.kept.keeps(segment):
            self.kept.arrive(segment)
            return
        gradient = take_gradient(parameter)
        if gradient is None:
            return
        is_again = position in self._arrived.get(segment.index, ())  # by a nested backward
        if is_again and self._communicator.world_size == 1:
            self._reduce(segment)  # see [Note: gradient path]
            is_again = False
        scratch = self._scratch_of(segment)
        arrived = self._arrived[segment.index]
        offset, numel = segment.layout.offsets[position], segment.layout.numels[position]
        target = scratch[offset : offset + numel].view(gradient.shape)
        plain = gradient.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()  # of an embedding with sparse=True
        if is_again:
            target.add_(plain)
        else:
            target.copy_(plain)
            arrived.add(position)
        if len(arrived) == len(segment.members) and self._communicator.world_size == 1:
            self._reduce(segment)

    def _scratch_of(self, segment: Segment) -> torch.Tensor:
        """Return where the gradients of the running backward are collected, zero at first."""
        scratch = self._scratch.get(segment.index)
        if scratch is None:
            self._make_room(segment)
            waiting = {self._all_segments[each].spec.unit_index for each in self._scratch}
            self._passing.make_room(is_crowded=bool(waiting - {0, segment.spec.unit_index}))
            room = self._store.plan.gradient_scratch_bytes - self._held_bytes
            if _scratch_bytes(segment) > room:
                self._passing.let_leave(0)  # earlier ones of this very unit, if it is the largest
            dtype = torch_dtype(segment.spec.gradient)
            scratch = self._store.device.zeros(segment.layout.padded_numel, dtype)
            self._arrived[segment.index] = set()
            self._scratch[segment.index] = scratch
            self._ledger.observe(GRADIENT_SCRATCH, self._held_bytes)
        return scratch

    @property
    def _held_bytes(self) -> int:
        """Bytes of all unsharded gradients that wait or leave."""
        return sum(each.nbytes for each in self._scratch.values()) + self._passing.held_bytes

    def _make_room(self, segment: Segment) -> None:
        """Reduce what waits for parameters that a step may not use at all, oldest first.

        Only one rank may do so when it likes: several reduce at the same time.
        """
        while self._scratch and self._communicator.world_size == 1:
            held = sum(each.nbytes for each in self._scratch.values())
            if held + _scratch_bytes(segment) <= self._store.plan.gradient_scratch_bytes:
                return
            self._reduce(self._all_segments[next(iter(self._scratch))])

    def reduce(self, segment: Segment) -> None:
        """Reduce what has arrived for a segment, zeros where nothing has; a collective."""
        self._passing.finish()
        self._reduce(segment)

    def _reduce(self, segment: Segment) -> None:
        self._scratch_of(segment)
        scratch = self._scratch.pop(segment.index)
        self._arrived.pop(segment.index, None)
        if not scratch.numel():
            return
        self._passing.reduce(segment, scratch, self._keep)

    def _keep(self, segment: Segment, shard: torch.Tensor) -> Fence:
        """Accumulate this rank's shard of the gradients of a segment, and measure it."""
        segment.dropped_gradients.clear()
        device = self._store.device
        with device.marking(f"gradients of {segment.spec.unit}"):
            fence = self._store.add_gradient(segment.index, device.memory_of(shard))
            self.norm.measure(segment, shard)
        return fence

    def store_all(self) -> None:
        """Put copies of the gradients at parameters into the shards, for those who read these."""
        self.shown.adopt()
        for segment in self._segments:
            if self.kept.keeps(segment):
                self.kept.store(segment)
        self.shown.show()

    def take_stored(self, segment: Segment) -> None:
        """Take over gradients that somebody has put into the shard of a segment."""
        if self.kept.keeps(segment):
            self.kept.take_stored(segment)
        else:
            self.norm.note_set(segment)
            self.shown.show()

    def drop(self) -> None:
        """Drop what is at the parameters, at the end of a window."""
        self.norm.forget()
        self.kept.drop()
        self.shown.drop()


def _scratch_bytes(segment: Segment) -> int:
    """Return the bytes of all gradients of a segment, unsharded."""
    return segment.layout.padded_numel * segment.spec.gradient.size_bytes


def _union(
    communicator: Communicator, segments: Sequence[Segment], place: int, own: set[int]
) -> set[int]:
    """Return the segments of which any rank has something; they tell each other in one vector."""
    wanted = [segment.index in own for segment in segments]
    union = communicator.union(place, wanted, "the end of a backward")
    return {segment.index for segment, is_any in zip(segments, union, strict=True) if is_any}
