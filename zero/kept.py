"""Gradients that stay the tensors that autograd made: where nothing moves there is no copy.

[Note: kept gradients] At world size 1, with parameters and gradients on the device, a gradient
needs no shard: the tensor is taken from `parameter.grad` as it is, what a later backward of the
window delivers is added to it, and the update reads it in place. Whoever wants to read or set
gradients by the shard has them settled first, that is copied to where the plan has them.
So `parameter.grad` is None between a backward and the step, and what a user puts there is refused:
the next backward would add it without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from estimators import Section, Tier
from offload import Store, array_at, tensor_span
from offload.arrays import torch_dtype
from offload.operands import Values
from zero.unit import Segment


def refuse_set_gradients(segments: Sequence[Segment]) -> None:
    """Refuse gradients that a user has put at parameters which rest in place.

    Raises:
        RuntimeError: naming the parameter and what to call.
    """
    for segment in segments:
        if not (segment.is_in_place and segment.spec.trainable):
            continue
        for member in segment.members:
            if member.parameter.grad is not None:
                raise RuntimeError(
                    f"parameter {member.name} has a .grad that did not come from the engine, and no"
                    " step would use it; set it to None, and set gradients with"
                    " zero.safe_set_full_grad(parameter, value) after the backward"
                )


class KeptGradients:
    """The kept gradients of one engine, by segment and position."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._arriving: dict[int, dict[int, torch.Tensor]] = {}
        self._kept: dict[int, dict[int, torch.Tensor]] = {}

    @property
    def is_arriving(self) -> bool:
        """Whether gradients of a backward are not merged yet."""
        return bool(self._arriving)

    def accepts(self, segment: Segment, gradient: torch.Tensor) -> bool:
        """Tell whether a gradient of a segment can be kept as it is."""
        return (
            segment.is_in_place
            and not segment.is_replicated
            and (self._store.device.is_host or self._store.plan.request.update_on_device)
            and (segment.index in self._kept or not self._store.has_gradient(segment.index))
            and self._store.plan.segment_tier(segment.index, Section.GRADIENT) is Tier.DEVICE
            and gradient.dtype is torch_dtype(segment.spec.gradient)
        )

    def arrive(self, segment: Segment, position: int, gradient: torch.Tensor) -> int:
        """Take a gradient of the running backward; return how many the segment has by now."""
        arrived = self._arriving.setdefault(segment.index, {})
        if position in arrived:  # a nested backward delivers a reused parameter once each
            arrived[position].add_(gradient.detach())
        else:
            plain = gradient.detach()
            is_own = plain.is_contiguous() and not gradient.requires_grad
            arrived[position] = (
                plain if is_own else plain.clone(memory_format=torch.contiguous_format)
            )
        return len(arrived)

    def has_arrivals(self, segment: Segment) -> bool:
        """Tell whether gradients of a segment are not merged yet."""
        return segment.index in self._arriving

    def merge(self, segment: Segment) -> None:
        """Add what has arrived to what the window has."""
        kept = self._kept.setdefault(segment.index, {})
        for position, gradient in self._arriving.pop(segment.index).items():
            if position in kept:
                kept[position].add_(gradient)
            else:
                kept[position] = gradient
        self._store.note_gradient(segment.index)

    def gradient(self, segment: Segment, position: int) -> torch.Tensor | None:
        """Return the kept gradient of one parameter, flat, or None."""
        gradient = self._kept.get(segment.index, {}).get(position)
        return gradient.reshape(-1) if gradient is not None else None

    def pieces(self, segment: Segment) -> Sequence[tuple[int, Values]] | None:
        """Return `(where in the shard, values)` of each parameter, or None if none are kept.

        A parameter without a gradient has zeros. Values are tensors on a device, else arrays.
        """
        if segment.index not in self._kept:
            return None
        found: list[tuple[int, Values]] = []
        for position, (offset, numel) in enumerate(
            zip(segment.layout.offsets, segment.layout.numels, strict=True)
        ):
            gradient = self.gradient(segment, position)
            if gradient is None:
                gradient = self._store.device.zeros(numel, torch_dtype(segment.spec.gradient))
            if numel and not self._store.device.is_host:
                found.append((offset, gradient))
            elif numel:
                array = array_at(tensor_span(gradient), segment.spec.gradient, numel)
                found.append((offset, array))
        return found

    def settle(self, segment: Segment) -> None:
        """Copy the kept gradients of a segment to where the plan has them."""
        kept = self._kept.pop(segment.index, None)
        if kept is None:
            return
        device = self._store.device
        shard = device.zeros(segment.layout.padded_numel, torch_dtype(segment.spec.gradient))
        for position, gradient in kept.items():
            offset, numel = segment.layout.offsets[position], segment.layout.numels[position]
            shard[offset : offset + numel] = gradient.reshape(-1)
        self._store.forget_gradient(segment.index)
        device.join(self._store.add_gradient(segment.index, device.memory_of(shard)))

    def abandon(self) -> None:
        """Drop what a failed backward has delivered."""
        self._arriving.clear()

    def drop(self) -> None:
        """Drop all gradients of the window."""
        self._arriving.clear()
        self._kept.clear()
