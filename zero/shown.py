"""Gradients that rest elsewhere, shown at parameters that rest in place.

[Note: shown gradients] A parameter in place is a plain `nn.Parameter`, so nobody is asked when its
`.grad` is read. Where its gradient rests in another tier, `.grad` is a `ShardedView` of it from the
end of a backward on, so that `clip_grad_norm_` and the like see and change the true one. What a
user puts there instead is the whole truth, None included, and is taken over before the next
gradient is accumulated, when the views are withdrawn (`engine.backward` does so before it begins),
and at the step. Where several ranks have the parameter in full nothing is shown: each would add its
own gradient to what is there, and only their mean counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from offload import Field, Store
from zero.parameter import ShardedView, raw_gradient, reference_of
from zero.source import StoreSource
from zero.unit import Segment
from zero.units import ManagedParameter


class ShownGradients:
    """The views of one engine's gradients at parameters in place."""

    def __init__(
        self, store: Store, segments: Sequence[Segment], is_kept: Callable[[Segment], bool]
    ) -> None:
        self._store = store
        self._all_segments = tuple(segments)
        self._is_kept = is_kept
        self._shown: dict[int, tuple[ManagedParameter, ShardedView]] = {}
        """What is shown now, by the order of the parameter."""

    @property
    def _segments(self) -> Iterator[Segment]:
        """The segments whose gradients are shown and not kept."""
        return (each for each in self._all_segments if self.shows(each) and not self._is_kept(each))

    @staticmethod
    def shows(segment: Segment) -> bool:
        """Tell whether `.grad` can be the gradient at parameters of a segment."""
        return (
            segment.is_in_place
            and not segment.is_replicated
            and segment.spec.trainable
            and segment.spec.gradient is segment.spec.element
        )

    def show(self) -> None:
        """Show what there is, at the end of a backward."""
        for segment in self._segments:
            if not self._store.has_gradient(segment.index):
                continue
            for member in segment.members:
                if raw_gradient(member.parameter) is None:
                    view = _view_of(member)
                    member.parameter.grad = view
                    self._shown[member.order] = (member, view)

    @property
    def is_showing(self) -> bool:
        """Whether anything is shown now."""
        return bool(self._shown)

    def refresh(self, member: ManagedParameter) -> None:
        """Take over what a user has made of one gradient that is shown, and go on showing it."""
        known = self._shown.get(member.order)
        if known is None or raw_gradient(member.parameter) is known[1]:
            return
        del self._shown[member.order]
        _adopt(member, known[1])
        source = _source_of(member)
        if source is not None and source.has(Field.GRADIENT):
            member.parameter.grad = known[1]
            self._shown[member.order] = known

    def withdraw(self) -> None:
        """Take over what users made of the gradients, and show none until `show`."""
        shown, self._shown = self._shown, {}
        for member, view in shown.values():
            _adopt(member, view)

    def adopt(self) -> None:
        """Take over what users have put at parameters, shown or not."""
        self.withdraw()
        for segment in self._segments:
            for member in segment.members:
                if raw_gradient(member.parameter) is not None:
                    _adopt(member, None)

    def drop(self) -> None:
        """Show nothing, and forget what users have put there."""
        self._shown.clear()
        for segment in self._segments:
            for parameter in segment.parameters:
                parameter.grad = None


def _source_of(member: ManagedParameter) -> StoreSource | None:
    reference = reference_of(member.parameter)
    source = reference.source if reference is not None else None
    return source if isinstance(source, StoreSource) else None


def _view_of(member: ManagedParameter) -> ShardedView:
    parameter = member.parameter
    geometry = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return ShardedView.of(parameter, geometry, Field.GRADIENT, is_differentiable=False)


def _adopt(member: ManagedParameter, view: ShardedView | None) -> None:
    """Make what is at a parameter its gradient in the store, and take it away."""
    gradient = raw_gradient(member.parameter)
    member.parameter.grad = None
    source = _source_of(member)
    if gradient is view or source is None:
        return
    if gradient is None:
        source.drop_gradient()
        return
    with torch.no_grad():
        plain = gradient.detach()
        dense = plain.to_dense() if plain.layout is not torch.strided else plain
        source.write(dense.clone(), Field.GRADIENT)
