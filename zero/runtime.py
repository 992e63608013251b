"""What one engine is made of, for the parts that need more than one piece of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload import Field, Kernels, Store
from zero.comm import Communicator
from zero.gradients import GradientReducer
from zero.schedule import UnitScheduler
from zero.unit import Segment, Unit

if TYPE_CHECKING:
    from zero.generic import GenericOptimizer
    from zero.update_rules import FusedOptimizer
    from zero.whole import WholeOptimizer


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Runtime:
    """The units of one engine, their store and their ranks."""

    units: Sequence[Unit]
    segments: Sequence[Segment]
    store: Store
    kernels: Kernels
    communicator: Communicator
    reducer: GradientReducer | None
    scheduler: UnitScheduler
    states: Mapping[str, Field] = field(default_factory=dict)
    """What the optimizer keeps of each element, by the names that it has for it."""
    update: FusedOptimizer | GenericOptimizer | WholeOptimizer | None = None
    """What the optimizer does in a step; None without an optimizer."""

    def is_kept(self, segment: int) -> bool:
        """Tell whether the gradients of a segment stay at its parameters."""
        return self.reducer is not None and self.reducer.kept.keeps(self.segments[segment])

    def is_shown(self, segment: int) -> bool:
        """Tell whether `.grad` of a segment's parameters is its gradient, as in torch."""
        return self.reducer is not None and self.reducer.shown.shows(self.segments[segment])

    def drop_gradients(self) -> None:
        """Forget the gradients that have arrived and those that were accumulated."""
        self.store.drop_gradients()
        if self.reducer is not None:
            self.reducer.abandon()
            self.reducer.drop()

    def give_back(self) -> None:
        """Close the store, and take off what at the parameters would keep them and the model."""
        self.scheduler.remove()
        if self.reducer is not None:
            self.reducer.drop()
        self.store.close()

    def retire(self) -> None:
        """Close the store and be an empty shell: hooks that are on the stack may still be called.

        The parameters must have left, so that nothing keeps the memory that they rested in.
        """
        self.scheduler.remove(for_good=True)
        self.drop_gradients()
        self.store.close()
        for segment in self.segments:
            segment.detach()
