"""Where the values of one sharded parameter come from, and the only way to write them.

[Note: shard source] Each rank keeps pieces of a parameter. Reading the whole of it is a collective:
the owner of each piece broadcasts it. Writing is one, too: the values of one rank, the first unless
another is named, become everybody's, and each rank stores its own piece, with its residual. While
the unit of a parameter is unsharded, the flat buffer is what counts: it is read instead of the
shards and written beside them.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from estimators import shard_bounds
from offload import (
    Field,
    ensure_gradient,
    field_dtype,
    has_field,
    read_range,
    round_like_store,
    write_range,
)
from zero.errors import ShardedAccessError
from zero.replicated import gather_values

if TYPE_CHECKING:
    from zero.comm import Communicator
    from zero.kept import KeptGradients
    from zero.runtime import Runtime
    from zero.unit import Segment, Unit

OwnedPiece = tuple[int, int, int]
"""(rank, first logical element, elements) of one rank's part of a parameter."""


class ShardSource(abc.ABC):
    """Values, gradient and optimizer state of one parameter, wherever they rest."""

    def __init__(self, name: str, shape: torch.Size, device: torch.device) -> None:
        self.name = name
        self.shape = shape
        self.device = device
        """Where values are read to, and what the parameter says of its device."""

    @property
    @abc.abstractmethod
    def unit_name(self) -> str:
        """The unit that the parameter is unsharded with, for messages."""

    @property
    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Whether there are values to be had."""

    @property
    @abc.abstractmethod
    def communicator(self) -> Communicator:
        """The ranks that share the parameter."""

    @abc.abstractmethod
    def has(self, field: Field) -> bool:
        """Tell whether a field exists now."""

    @abc.abstractmethod
    def dtype(self, field: Field) -> torch.dtype:
        """Return the type in which a field is read and written."""

    @abc.abstractmethod
    def pieces(self) -> Sequence[OwnedPiece]:
        """Return the non-empty pieces of all ranks, in rank order."""

    @abc.abstractmethod
    def read_own(self, field: Field) -> torch.Tensor:
        """Return a private copy of this rank's piece, flat."""

    @abc.abstractmethod
    def write_own(self, field: Field, values: torch.Tensor, start: int = 0) -> None:
        """Set elements of this rank's piece from `start` on; `values` are of the field's type."""

    def live(self) -> torch.Tensor | None:
        """Return the unsharded values if they are in memory and count, shape `shape`."""
        return None

    def after_write(self, field: Field) -> None:  # noqa: B027  most sources have nothing to do
        """Tell whoever depends on a field that it changed."""

    def read(self, field: Field = Field.PARAMETER) -> torch.Tensor:
        """Return a private copy of the whole field, shape `shape`; a collective.

        Raises:
            ShardedAccessError: if there are no values to be had.
            PageError: if a page-in failed.
        """
        if field is Field.PARAMETER:
            live = self.live()
            if live is not None:
                return live.clone()
        full = torch.empty(self.shape, dtype=self.dtype(field), device=self.device)
        self.assemble(full, self.read_own(field))
        return full

    def assemble(self, full: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `full` from the pieces of all ranks, of which `own` is this rank's."""
        flat = full.view(-1)
        for rank, first, numel in self.pieces():
            part = flat[first : first + numel]
            if rank == self.communicator.rank:
                part.copy_(own)
            self.communicator.broadcast(part, rank)

    def write(
        self, full: torch.Tensor, field: Field = Field.PARAMETER, source_rank: int = 0
    ) -> None:
        """Set the whole field to the values of `source_rank`; a collective.

        `full` has the shape and type of the field; it is overwritten on the other ranks.
        """
        full = full.detach().contiguous()
        self.communicator.broadcast(full, source_rank)
        self.store_full(full, field)

    def store_full(self, full: torch.Tensor, field: Field = Field.PARAMETER) -> None:
        """Set the whole field to values that all ranks have alike; no collective."""
        flat = full.reshape(-1)
        own = [piece for piece in self.pieces() if piece[0] == self.communicator.rank]
        for _, first, numel in own:
            self.write_own(field, flat[first : first + numel])
        live = self.live()
        if live is not None and field in (Field.PARAMETER, Field.MASTER):
            with torch.no_grad():
                live.copy_(full)
        self.after_write(field)
        _show(self, full, field)


class StoreSource(ShardSource):
    """A parameter of an engine: its pieces lie in the shards of one segment."""

    def __init__(self, runtime: Runtime, segment: Segment, position: int, unit: Unit) -> None:
        member = segment.members[position]
        device = runtime.store.device.torch_device
        super().__init__(member.name, member.parameter.shape, device)
        self.owner: weakref.ref[Any] = weakref.ref(runtime)  # a model keeps no engine alive
        self.segment_index = segment.index
        self.position = position
        self.unit_index = unit.index
        self._unit_name = unit.name

    @property
    def unit_name(self) -> str:
        """The unit that the parameter is unsharded with."""
        return self._unit_name

    @property
    def is_alive(self) -> bool:
        """Whether the engine of the parameter can still give its values."""
        runtime = self.owner()
        return runtime is not None and not runtime.store.is_closed

    @property
    def runtime(self) -> Runtime:
        """The runtime of the engine.

        Raises:
            ShardedAccessError: if the engine is destroyed or gone.
        """
        runtime: Runtime | None = self.owner()
        if runtime is None or runtime.store.is_closed:
            raise ShardedAccessError(
                f"the engine of parameter {self.name} (shape {tuple(self.shape)}, unit"
                f" {self.unit_name}) is destroyed or gone, and its sharded values with it; read"
                " them before engine.destroy(), or build the model anew"
            )
        return runtime

    @property
    def segment(self) -> Segment:
        """The segment that holds the parameter."""
        return self.runtime.segments[self.segment_index]

    @property
    def communicator(self) -> Communicator:
        """The ranks that share the parameter."""
        return self.runtime.communicator

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer of the engine updates the parameter."""
        return self.runtime.reducer is not None and self.segment.spec.trainable

    @property
    def _kept(self) -> KeptGradients | None:
        """What keeps the gradient at the parameter, or None if it rests in shards."""
        reducer = self.runtime.reducer
        return reducer.kept if reducer is not None and reducer.kept.keeps(self.segment) else None

    def refresh_gradient(self) -> None:
        """Take over what a user has put at the parameter, see [Note: shown gradients]."""
        reducer = self.runtime.reducer
        if reducer is not None and reducer.shown.is_showing:
            reducer.shown.refresh(self.segment.members[self.position])

    def has(self, field: Field) -> bool:
        """Tell whether a field exists now: a frozen parameter has its values only."""
        if field is Field.GRADIENT:
            self.refresh_gradient()
        if field is Field.GRADIENT and self._kept is not None:
            return self._kept.gradient(self.segment, self.position) is not None
        if field is Field.GRADIENT and self.position in self.segment.dropped_gradients:
            return False
        return has_field(self.runtime.store, self.segment_index, field)

    def dtype(self, field: Field) -> torch.dtype:
        """Return the type in which a field is read and written."""
        return field_dtype(self.runtime.store, self.segment_index, field)

    def pieces(self) -> Sequence[OwnedPiece]:
        """Return the non-empty pieces of all ranks, in rank order."""
        layout = self.segment.layout
        offset, numel = layout.offsets[self.position], layout.numels[self.position]
        found = []
        for rank in range(layout.world_size):
            start, stop = shard_bounds(layout, rank)
            low, high = max(start, offset), min(stop, offset + numel)
            if low < high:
                found.append((rank, low - offset, high - low))
        return found

    def own_range(self) -> tuple[int, int]:
        """Return where this rank's piece lies in its shard, `[start, stop)`."""
        for piece in self.segment.pieces:
            if piece.index == self.position:
                return piece.start, piece.start + piece.numel
        return 0, 0

    def settle(self) -> None:
        """Bring what was changed in place to where the plan has it."""
        self.segment.commit(self.runtime.store, self.position)

    def read_own(self, field: Field) -> torch.Tensor:
        """Return a private copy of this rank's piece, flat."""
        self.settle()
        if field is Field.GRADIENT:
            self.refresh_gradient()
        start, stop = self.own_range()
        kept = self._kept
        if field is Field.GRADIENT and kept is not None:
            found = kept.gradient(self.segment, self.position)
            zeros = torch.zeros(stop - start, dtype=self.dtype(field), device=self.device)
            return zeros if found is None else found.clone()
        own = read_range(self.runtime.store, self.segment_index, field, start, stop)
        return own.to(self.device)

    def write_own(self, field: Field, values: torch.Tensor, start: int = 0) -> None:
        """Set elements of this rank's piece from `start` on, with their residual."""
        self.settle()
        kept = self._kept
        if field is Field.GRADIENT and kept is not None:
            kept.set_part(self.segment, self.position, start, values)
            return
        first = self.own_range()[0] + start
        write_range(self.runtime.store, self.segment_index, field, first, values.contiguous())
        if field in (Field.PARAMETER, Field.MASTER):
            self.segment.accept_changes(self.position)

    def live(self) -> torch.Tensor | None:
        """Return the view of the flat buffer while the unit is unsharded."""
        if self.segment.is_in_place or not self.runtime.units[self.unit_index].is_unsharded:
            return None
        return _view(self)

    def after_write(self, field: Field) -> None:
        """Invalidate graphs that saved the old values; measure a gradient that was set.

        Ranks without a piece note that the segment has gradients now, as the others do.
        """
        if field is Field.GRADIENT:
            ensure_gradient(self.runtime.store, self.segment_index)
            self.segment.dropped_gradients.discard(self.position)
            reducer = self.runtime.reducer
            if reducer is not None:
                reducer.norm.note_set(self.segment)
        elif field in (Field.PARAMETER, Field.MASTER):
            self.segment.forget_value(self.position)

    def drop_gradient(self) -> None:
        """Forget the gradient of this parameter alone: it reads as None and counts as zero."""
        segment = self.segment
        if not self.has(Field.GRADIENT):
            return
        segment.dropped_gradients.add(self.position)
        if len(segment.dropped_gradients) == len(segment.members):
            self.runtime.store.forget_gradient(self.segment_index)
            segment.dropped_gradients.clear()
            return
        self.settle()
        start, stop = self.own_range()
        zeros = torch.zeros(stop - start, dtype=self.dtype(Field.GRADIENT), device="cpu")
        write_range(self.runtime.store, self.segment_index, Field.GRADIENT, start, zeros)
        reducer = self.runtime.reducer
        if reducer is not None:
            reducer.norm.note_set(segment)


def share_pieces(source: ShardSource) -> None:
    """Let each rank that has all values see what the others wrote of theirs; a collective."""
    if isinstance(source, StoreSource) and source.segment.is_replicated:
        source.segment.commit(source.runtime.store)
        gather_values(source.segment, source.runtime.store.ledger)


def _show(source: ShardSource, full: torch.Tensor, field: Field) -> None:
    """Put values that all ranks have alike where each rank has all values."""
    is_value = field in (Field.PARAMETER, Field.MASTER)
    if is_value and isinstance(source, StoreSource) and source.segment.is_replicated:
        with torch.no_grad():
            _view(source).copy_(round_like_store(source.runtime.store, source.segment_index, full))
        source.segment.accept_changes(source.position)


def _view(source: StoreSource) -> torch.Tensor:
    """Return the place of a parameter in the flat buffer."""
    layout = source.segment.layout
    offset, numel = layout.offsets[source.position], layout.numels[source.position]
    return source.segment.flat[offset : offset + numel].view(source.shape)
