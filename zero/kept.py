"""Gradients that stay where autograd puts them: where nothing moves there is no copy.

[Note: kept gradients] At world size 1, with parameters and gradients on the device and of one type,
a gradient needs no shard: it stays `parameter.grad`, autograd adds what later backwards of the
window deliver, and the update reads it in place. So whatever a user does to `.grad` before the step
(clip, scale, set, drop) is what torch would make of it. Its norm is taken at the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from estimators import Section, Tier
from offload import Store, array_at, tensor_span
from offload.arrays import torch_dtype
from offload.operands import Values
from zero.parameter import raw_gradient
from zero.unit import Segment


class KeptGradients:
    """The kept gradients of one engine."""

    def __init__(self, store: Store, segments: Sequence[Segment]) -> None:
        self._store = store
        self._segments = tuple(segments)
        self._arriving: set[int] = set()
        self._keeps: dict[tuple[int, bool, bool], bool] = {}

    @property
    def is_arriving(self) -> bool:
        """Whether gradients of a backward have arrived that is not over."""
        return bool(self._arriving)

    def keeps(self, segment: Segment) -> bool:
        """Tell whether the gradients of a segment stay at its parameters.

        It is asked for each gradient that arrives, so the answer is kept.
        """
        key = (segment.index, segment.is_in_place, segment.is_replicated)
        if key not in self._keeps:
            self._keeps[key] = (
                segment.is_in_place
                and segment.spec.trainable
                and not segment.is_replicated
                and (self._store.device.is_host or self._store.plan.request.update_on_device)
                and self._store.plan.segment_tier(segment.index, Section.GRADIENT) is Tier.DEVICE
                and segment.spec.gradient is segment.spec.element
            )
        return self._keeps[key]

    def arrive(self, segment: Segment) -> None:
        """Note a gradient of the running backward."""
        self._arriving.add(segment.index)

    def merge(self, segment: Segment) -> None:
        """Note that what has arrived counts."""
        if segment.index in self._arriving:
            self._arriving.remove(segment.index)
            self._store.note_gradient(segment.index)

    def count(self, segment: Segment) -> None:
        """Note whether a segment has gradients at all: a user may have set or dropped some."""
        if any(raw_gradient(parameter) is not None for parameter in segment.parameters):
            self._store.note_gradient(segment.index)
        else:
            self._store.forget_gradient(segment.index)

    def gradient(self, segment: Segment, position: int) -> torch.Tensor | None:
        """Return the gradient of one parameter, flat, or None; its own memory where it can be."""
        gradient = raw_gradient(segment.members[position].parameter)
        if gradient is None:
            return None
        plain, dtype = gradient.detach(), torch_dtype(segment.spec.gradient)
        if plain.dtype is dtype and plain.layout is torch.strided and plain.is_contiguous():
            return plain.view(-1)
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        return plain.to(dtype).contiguous().reshape(-1)

    def set_part(self, segment: Segment, position: int, start: int, values: torch.Tensor) -> None:
        """Set elements of the gradient of one parameter from `start` on."""
        parameter = segment.members[position].parameter
        with torch.no_grad():
            flat = self.gradient(segment, position)
            flat = values.new_zeros(parameter.numel()) if flat is None else flat
            flat[start : start + values.numel()] = values
            parameter.grad = flat.view(parameter.shape)

    def pieces(self, segment: Segment) -> Sequence[tuple[int, Values]] | None:
        """Return `(where in the shard, values)` of each parameter, or None if none are kept.

        A parameter without a gradient has zeros. Values are tensors on a device, else arrays.
        """
        if not self.keeps(segment) or not self._store.has_gradient(segment.index):
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

    def store(self, segment: Segment) -> None:
        """Put a copy of the gradients of a segment into its shard; those at parameters count."""
        self.count(segment)
        if not self._store.has_gradient(segment.index):
            return
        device = self._store.device
        shard = device.zeros(segment.layout.padded_numel, torch_dtype(segment.spec.gradient))
        for position, offset in enumerate(segment.layout.offsets):
            gradient = self.gradient(segment, position)
            if gradient is not None:
                shard[offset : offset + gradient.numel()] = gradient
        self._store.forget_gradient(segment.index)
        device.join(self._store.add_gradient(segment.index, device.memory_of(shard)))

    def take_stored(self, segment: Segment) -> None:
        """Put the gradients of the shard to the parameters, but for those that were dropped."""
        device = self._store.device
        shard = device.zeros(segment.layout.padded_numel, torch_dtype(segment.spec.gradient))
        device.join(self._store.read_gradient(segment.index, device.memory_of(shard)))
        for position, parameter in enumerate(segment.parameters):
            start, numel = segment.layout.offsets[position], segment.layout.numels[position]
            is_dropped = position in segment.dropped_gradients
            own = shard[start : start + numel].view(parameter.shape)
            parameter.grad = None if is_dropped else own.clone()
        segment.dropped_gradients.clear()

    def abandon(self) -> None:
        """Forget that a failed backward has delivered; its window is dropped."""
        self._arriving.clear()

    def drop(self) -> None:
        """Drop all gradients of the window."""
        self._arriving.clear()
        for segment in self._segments:
            if self.keeps(segment):
                for parameter in segment.parameters:
                    parameter.grad = None
