"""Parameters that are sharded before there is an engine: what `zero.Init` makes of them.

[Note: nursery] Each parameter is cut over the ranks by itself, keeps its object and its type, and
rests in a `Spool`. It behaves as any sharded parameter, so initialisers that come later take
effect, and a model that never meets an engine still works, slowly. `zero.initialize` moves the
values into the shards of its plan, one parameter at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from estimators import SHARD_ALIGNMENT_NUMEL, align_up
from offload import Field, Spool, SpooledArray
from zero.comm import Communicator
from zero.errors import ShardedAccessError
from zero.parameter import (
    REFERENCE_ATTRIBUTE,
    ParameterReference,
    reference_of,
)
from zero.seal import seal, sealed_like
from zero.source import OwnedPiece, ShardSource


@dataclass(frozen=True, slots=True, eq=False)
class Nursery:
    """Where parameters rest until an engine takes them over."""

    communicator: Communicator
    spool: Spool
    dtype: torch.dtype | None
    """Type to keep parameters in; None is their own."""
    made_group: bool
    """Whether the process group was made for this nursery."""

    def adopt(self, name: str, parameter: nn.Parameter) -> int:
        """Shard a parameter and return its elements, or 0 if it is none of ours."""
        if (
            reference_of(parameter) is not None
            or isinstance(parameter, UninitializedParameter)
            or type(parameter) is not nn.Parameter
            or not parameter.is_floating_point()
            or parameter.device.type != "cpu"
        ):
            return 0
        self.communicator.agree(
            parameter.numel(), f"building parameter {name} of shape {tuple(parameter.shape)}"
        )
        with torch.no_grad(), torch.inference_mode(mode=False):
            values = parameter.detach().to(self.dtype or parameter.dtype).contiguous().reshape(-1)
            if self.communicator.world_size > 1:
                values = values.clone()
                self.communicator.broadcast(values, 0)
            source = NurserySource(self, name, parameter, values)
            del values
        setattr(parameter, REFERENCE_ATTRIBUTE, ParameterReference(source))
        source.hide()
        return parameter.numel()


class SpooledShard:
    """A flat tensor over the ranks: rank r has the r-th of equal pieces, in a spool."""

    def __init__(
        self, nursery: Nursery, values: torch.Tensor, name: str = "optimizer state at rest"
    ) -> None:
        self._communicator = nursery.communicator
        self.numel = values.numel()
        start, stop = self.bounds(nursery.communicator.rank)
        self.own: SpooledArray = nursery.spool.put(values[start:stop], name)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the elements `[start, stop)` that a rank has."""
        share = align_up(-(-self.numel // self._communicator.world_size), SHARD_ALIGNMENT_NUMEL)
        return min(rank * share, self.numel), min((rank + 1) * share, self.numel)

    def read_full(self) -> torch.Tensor:
        """Return a private copy of all elements, flat; a collective."""
        full = torch.empty(self.numel, dtype=self.own.dtype, device="cpu")
        for rank in range(self._communicator.world_size):
            start, stop = self.bounds(rank)
            if rank == self._communicator.rank:
                full[start:stop] = self.own.read()
            self._communicator.broadcast(full[start:stop], rank)
        return full


class NurserySource(ShardSource):
    """A parameter in a nursery."""

    def __init__(
        self,
        nursery: Nursery,
        name: str,
        parameter: nn.Parameter,
        values: torch.Tensor,
        shape: torch.Size | None = None,
    ) -> None:
        super().__init__(name, parameter.shape if shape is None else shape, torch.device("cpu"))
        self.nursery = nursery
        self.open_count = 0
        self._parameter = weakref.ref(parameter)
        self._dtype = values.dtype
        self._shard = SpooledShard(nursery, values, name)

    @property
    def unit_name(self) -> str:
        """No unit yet."""
        return "<zero.Init>"

    @property
    def is_alive(self) -> bool:
        """Always: the parameter itself keeps the values."""
        return True

    @property
    def communicator(self) -> Communicator:
        """The ranks that share the parameter."""
        return self.nursery.communicator

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter.

        Raises:
            ShardedAccessError: if it is gone, and a view of it is all that is left.
        """
        parameter = self._parameter()
        if parameter is None:
            raise ShardedAccessError(f"parameter {self.name} is gone")
        return parameter

    def has(self, field: Field) -> bool:
        """Tell whether a field exists: values are all there is."""
        return field is Field.PARAMETER

    def dtype(self, field: Field) -> torch.dtype:  # noqa: ARG002  values are all there is
        """Return the type of the values."""
        return self._dtype

    def pieces(self) -> Sequence[OwnedPiece]:
        """Return the non-empty pieces of all ranks, in rank order."""
        found = []
        for rank in range(self.communicator.world_size):
            start, stop = self._shard.bounds(rank)
            if start < stop:
                found.append((rank, start, stop - start))
        return found

    def read_own(self, field: Field) -> torch.Tensor:  # noqa: ARG002  values are all there is
        """Return a private copy of this rank's piece, flat."""
        return self._shard.own.read()

    def write_own(self, field: Field, values: torch.Tensor, start: int = 0) -> None:  # noqa: ARG002
        """Set elements of this rank's piece from `start` on."""
        self._shard.own.write(start, values)

    def live(self) -> torch.Tensor | None:
        """Return the values in memory while a window is open."""
        return self.parameter.data if self.open_count else None

    def after_write(self, field: Field) -> None:  # noqa: ARG002  values are all there is
        """Invalidate graphs that saved the old values."""
        torch.autograd.graph.increment_version([self.parameter])

    def open(self) -> None:
        """Put the full values into memory and make the parameter plain; a collective."""
        if not self.open_count:
            parameter, full = self.parameter, self.read()
            parameter.__class__ = nn.Parameter
            parameter.data = full
        self.open_count += 1

    def close(self) -> None:
        """End one `open`; the last one frees the values."""
        self.open_count -= 1
        if not self.open_count:
            self.hide()

    def hide(self) -> None:
        """Leave the parameter its shape and type, without memory."""
        parameter = self.parameter
        if (
            parameter.dtype != self._dtype
            or parameter.shape != self.shape
            or not _owns_memory(parameter)
            or parameter.device.type != "cpu"
        ):
            with torch.inference_mode(mode=False):
                parameter.data = torch.empty(self.shape, dtype=self._dtype, device="cpu")
        parameter.untyped_storage().resize_(0)
        seal(parameter, sealed_like(parameter.data))


def _owns_memory(parameter: torch.Tensor) -> bool:
    """Tell whether nobody else sees the memory of a parameter, so that it can be emptied."""
    storage = parameter.untyped_storage()
    alone = torch.empty(1, dtype=torch.float32, device="cpu").untyped_storage()
    return (
        parameter.is_contiguous()
        and parameter.storage_offset() == 0
        and storage.resizable()
        and storage.nbytes() == parameter.numel() * parameter.element_size()
        and torch._C._storage_Use_Count(storage._cdata)
        <= torch._C._storage_Use_Count(alone._cdata) + 1  # the temporary that `alone` came from
    )


def made_group_before(model: nn.Module) -> bool:
    """Tell whether `zero.Init` made the process group when it sharded this model."""
    for parameter in model.parameters():
        reference = reference_of(parameter)
        if reference is not None and isinstance(reference.source, NurserySource):
            return reference.source.nursery.made_group
    return False
