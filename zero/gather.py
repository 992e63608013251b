"""`GatheredParameters`: the full values of sharded parameters inside a `with` block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

import torch
from torch import nn

from offload import write_parameters
from zero.parameter import reference_of
from zero.runtime import Runtime
from zero.source import StoreSource
from zero.unit import Segment, Unit


class GatheredParameters:
    """Unshard the units of some parameters for a block; a collective.

    Read-only unless `modifier_rank` names the rank whose values become everybody's at the end.
    Windows nest.

    Raises:
        RuntimeError: on leaving a read-only block in which a value was changed.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,  # noqa: ARG002  part of the field's signature
        enabled: bool = True,  # noqa: FBT001, FBT002  part of the field's signature
    ) -> None:
        chosen = [params] if isinstance(params, torch.Tensor) else list(params)
        self._modifier_rank = modifier_rank
        self._units: list[tuple[Runtime, Unit]] = []
        self._versions: dict[int, list[int]] = {}
        self._checksums: dict[int, list[int]] = {}
        self._snapshots: dict[int, torch.Tensor] = {}
        if not enabled:
            return
        for parameter in chosen:
            reference = reference_of(parameter)
            if reference is not None and isinstance(reference.source, StoreSource):
                runtime = reference.source.runtime
                unit = runtime.units[reference.source.unit_index]
                if all(unit is not other for _, other in self._units):
                    self._units.append((runtime, unit))
        self._units.sort(key=lambda pair: pair[1].index)
        self._check_rank()

    def _check_rank(self) -> None:
        modifier_rank = self._modifier_rank
        for runtime, _ in self._units:
            if (
                modifier_rank is not None
                and not 0 <= modifier_rank < runtime.communicator.world_size
            ):
                raise ValueError(
                    f"modifier_rank {modifier_rank} is not a rank of a world of"
                    f" {runtime.communicator.world_size}"
                )

    def __enter__(self) -> Self:
        for runtime in {id(runtime): runtime for runtime, _ in self._units}.values():
            names = ", ".join(unit.name for _, unit in self._units)
            runtime.communicator.join(f"gathering the parameters of units {names}")
        held = []
        try:
            for runtime, unit in self._units:
                runtime.scheduler.hold(unit)
                held.append((runtime, unit))
        except BaseException:
            for runtime, unit in held:
                runtime.scheduler.drop(unit)
            raise
        for _, segment in self._segments():
            self._versions[id(segment)] = segment.versions
            if self._modifier_rank is None:
                self._checksums[id(segment)] = segment.checksums()
                if segment.is_in_place:
                    self._snapshots[id(segment)] = segment.flat.clone()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lost: list[str] = []
        try:
            for runtime, segment in self._segments():
                if self._modifier_rank is not None and kind is None:
                    _write_back(runtime, segment, self._modifier_rank)
                    continue
                changed = segment.changed(self._versions[id(segment)])
                if not changed and id(segment) in self._checksums:
                    changed = segment.differing(self._checksums[id(segment)])
                if changed:
                    lost.extend(member.name for member in changed)
                    self._undo(runtime, segment)
        finally:
            for runtime, unit in self._units:
                runtime.scheduler.drop(unit)
        if lost and kind is None:
            raise RuntimeError(
                f"parameters {', '.join(lost)} were changed inside a read-only GatheredParameters"
                " block, where the change would be lost; pass modifier_rank=0 to keep it"
            )

    def _segments(self) -> Iterator[tuple[Runtime, Segment]]:
        for runtime, unit in self._units:
            for segment in unit.segments:
                yield runtime, segment

    def _undo(self, runtime: Runtime, segment: Segment) -> None:
        """Put the stored values back."""
        segment.collect_strays()
        snapshot = self._snapshots.get(id(segment))
        if snapshot is not None:
            segment.flat.copy_(snapshot)
        segment.fill(runtime.store, runtime.store.ledger)
        segment.accept_changes()


def _write_back(runtime: Runtime, segment: Segment, modifier_rank: int) -> None:
    """Make the values of one rank everybody's, and write this rank's shard with its residual."""
    segment.collect_strays()
    runtime.communicator.broadcast(segment.flat, modifier_rank)
    own = runtime.communicator.own_slice(segment.flat)
    write_parameters(runtime.store, segment.index, own.detach().float().clone().numpy())
    segment.forget_values()
    segment.accept_changes()
