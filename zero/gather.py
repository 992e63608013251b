"""`GatheredParameters`: the full values of sharded parameters inside a `with` block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from torch import nn

from offload import Field
from zero.late import Checksums, differing_members
from zero.nursery import NurserySource
from zero.parameter import reference_of
from zero.runtime import Runtime
from zero.source import StoreSource
from zero.unit import Segment, Unit
from zero.units import ManagedParameter
from zero.written import write_members


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
        self._resting: list[tuple[Runtime, Unit]] = []
        """Units of which only segments in place are asked for: nothing is gathered."""
        self._alone: list[NurserySource] = []
        """Parameters that no engine has yet."""
        self._before: dict[int, torch.Tensor] = {}
        self._versions: dict[int, list[int]] = {}
        self._checksums: dict[int, Checksums] = {}
        self._snapshots: dict[int, torch.Tensor] = {}
        self._earlier: dict[int, list[ManagedParameter]] = {}
        """What was changed in place before the block, and not taken over yet."""
        if not enabled:
            return
        for parameter in chosen:
            reference = reference_of(parameter)
            source = reference.source if reference is not None else None
            if isinstance(source, NurserySource) and source not in self._alone:
                self._alone.append(source)
            if isinstance(source, StoreSource):
                runtime = source.runtime
                unit = runtime.units[source.unit_index]
                found = self._resting if source.segment.is_in_place else self._units
                if all(unit is not other for _, other in found):
                    found.append((runtime, unit))
        held = {id(unit) for _, unit in self._units}
        self._resting = [pair for pair in self._resting if id(pair[1]) not in held]
        for units in (self._units, self._resting):
            units.sort(key=lambda pair: pair[1].index)
        self._check_rank()

    def _check_rank(self) -> None:
        modifier_rank = self._modifier_rank
        communicators = [runtime.communicator for runtime, _ in self._units]
        communicators += [runtime.communicator for runtime, _ in self._resting]
        communicators += [source.communicator for source in self._alone]
        for communicator in communicators:
            if modifier_rank is not None and not 0 <= modifier_rank < communicator.world_size:
                raise ValueError(
                    f"modifier_rank {modifier_rank} is not a rank of a world of"
                    f" {communicator.world_size}"
                )

    def __enter__(self) -> Self:
        chosen = [*self._units, *self._resting]
        for runtime in {id(runtime): runtime for runtime, _ in chosen}.values():
            names = [unit.name for _, unit in self._units]
            names += [f"{unit.name} (in place)" for _, unit in self._resting]
            runtime.communicator.join(f"gathering the parameters of units {', '.join(names)}")
        with ExitStack() as undo:
            self._open_alone(undo)
            for runtime, unit in self._units:
                runtime.scheduler.hold(unit)
                undo.callback(runtime.scheduler.drop, unit)
            undo.pop_all()
        for _, unit in self._resting:
            unit.window_depth += 1
        for runtime, segment in self._segments():
            segment.commit(runtime.store)
            self._versions[id(segment)] = segment.versions
            self._checksums[id(segment)] = segment.checksums()
            self._earlier[id(segment)] = segment.changed()
            if self._modifier_rank is None and segment.is_in_place:
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
            lost.extend(self._close_alone(keep=kind is None))
            for runtime, segment in self._segments():
                if self._modifier_rank is not None and kind is None:
                    self._write_back(runtime, segment, self._modifier_rank)
                    continue
                changed = segment.changed(self._versions[id(segment)])
                if not changed:
                    changed = differing_members(segment, self._checksums[id(segment)])
                if changed:
                    lost.extend(member.name for member in changed)
                    self._undo(runtime, segment)
        finally:
            for _, unit in self._resting:
                unit.window_depth -= 1
            for runtime, unit in self._units:
                runtime.scheduler.drop(unit)
        if lost and kind is None:
            raise RuntimeError(
                f"parameters {', '.join(lost)} were changed inside a read-only GatheredParameters"
                " block, where the change would be lost; pass modifier_rank=0 to keep it"
            )

    def _open_alone(self, undo: ExitStack) -> None:
        """Put parameters that no engine has yet into memory."""
        if self._alone:
            names = ", ".join(source.name for source in self._alone)
            self._alone[0].communicator.join(f"gathering parameters {names}")
        for source in self._alone:
            source.open()
            undo.callback(source.close)
            if self._modifier_rank is None:
                self._before[id(source)] = source.parameter.detach().clone()

    def _close_alone(self, *, keep: bool) -> list[str]:
        """Write parameters that no engine has yet back, and return names of lost changes."""
        lost = []
        for source in self._alone:
            values = source.parameter.data
            if values.shape != source.shape or values.dtype != source.dtype(Field.PARAMETER):
                lost.append(source.name)
                source.close()
                continue
            before = self._before.get(id(source))
            if before is not None and not _same_bits(before, values):
                lost.append(source.name)
                values.copy_(before)
            elif before is None and keep:
                source.write(values, source_rank=self._modifier_rank or 0)
            source.close()
        return lost

    def _segments(self) -> Iterator[tuple[Runtime, Segment]]:
        for runtime, unit in self._units:
            for segment in unit.segments:
                yield runtime, segment
        for runtime, unit in self._resting:
            for segment in unit.segments:
                if segment.is_in_place:
                    yield runtime, segment

    def _undo(self, runtime: Runtime, segment: Segment) -> None:
        """Put the stored values back."""
        segment.collect_strays()
        snapshot = self._snapshots.get(id(segment))
        if snapshot is not None:
            segment.flat.copy_(snapshot)
        segment.fill(runtime.store, runtime.store.ledger)
        segment.accept_changes()

    def _write_back(self, runtime: Runtime, segment: Segment, modifier_rank: int) -> None:
        """Make the values of one rank everybody's; store what changed, with its residual."""
        segment.collect_strays()
        runtime.communicator.broadcast(segment.flat, modifier_rank)
        changed = segment.changed(self._versions[id(segment)])
        changed += self._earlier[id(segment)]
        changed += differing_members(segment, self._checksums[id(segment)])
        orders = {member.order for member in changed}
        distinct = [member for member in segment.members if member.order in orders]
        if distinct:
            write_members(segment, runtime.store, distinct)
            segment.forget_values()
        segment.accept_changes()


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (first, second)))
