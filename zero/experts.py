"""Routed experts on several ranks: each is gathered only when some rank is routed to it.

[Note: turns] Ranks route differently, but a gather needs all of them. While a rank is inside the
module that routes, each of its experts that it comes to begins a turn: all ranks meet, each says
which expert it wants, and all gather one of these: the first in order that a forward wants, else
the last one that a backward wants. So where forwards run again in a backward, on some ranks longer
than on others, all of them end before gradients arrive, and those of an expert arrive together.
Who wanted it goes on; the others lend their parts, keep nothing, and come to the next turn with
what they want. A rank that wants none comes as soon as it leaves the module, or before it meets the
others for anything else, and takes turns until nobody wants an expert. So every expert is gathered
once where ranks go through theirs in order, an expert that no rank is routed to never, and nothing
depends on what ranks know of each other. Gradients of experts are reduced in turns, too: those that
have arrived on any rank, in order, with zeros from the others.

Turns are taken while the forward of a routing module runs, and while the backward runs of the unit
around it: that one has an output which needs gradients on every rank, the routing module perhaps
not where a rank is routed to nothing. A forward that runs again in a backward, for checkpointing,
does so on some ranks perhaps, and is part of that backward. Where all experts are inside
`GatheredParameters`, ranks run freely and take no turns.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from estimators.summary import LIVE_PARAMETERS
from offload import Store
from zero.coming import gather_flat
from zero.comm import Communicator, RankError
from zero.gradients import GradientReducer
from zero.hooks import ModuleHook
from zero.memory import live_parameter_bytes
from zero.unit import Segment, Unit, UnitState


@dataclass(slots=True, eq=False)
class _Group:
    """The experts in one unit, and whether this rank is where it may come to one."""

    number: int
    name: str
    units: tuple[Unit, ...]
    forwards: list[bool] = field(default_factory=list)
    """Forwards of routing modules that run, and whether each takes turns."""
    backwards: dict[object, int] = field(default_factory=dict)
    """Forward instances of the unit around whose backward runs, with their graph task ids."""

    @property
    def is_open(self) -> bool:
        """Whether this rank takes turns."""
        return any(self.forwards) or bool(self.backwards)

    @property
    def is_free(self) -> bool:
        """Whether all experts stay gathered, so that no rank needs another one."""
        return all(unit.gather_depth for unit in self.units)

    @property
    def segments(self) -> list[Segment]:
        """The segments of the experts that get gradients."""
        return [each for unit in self.units for each in unit.segments if each.spec.trainable]


class ExpertTurns:
    """The turns of the ranks of one engine; one rank takes none."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: Store,
        reducer: GradientReducer | None,
        communicator: Communicator,
    ) -> None:
        self._units = tuple(units)
        self._store = store
        self._reducer = reducer
        self._communicator = communicator
        self._group_of: dict[int, _Group] = {}
        """By the index of an expert."""
        self._group_in: dict[int, _Group] = {}
        """By the index of the unit around."""
        self._is_meeting = False
        self._has_failed = False
        if communicator.world_size > 1:
            self._form_groups()

    def _form_groups(self) -> None:
        around = {unit.name: unit for unit in self._units}
        experts: dict[int, list[Unit]] = {}
        for unit in self._units:
            if unit.router is not None and unit.moves:
                outer = self._units[0]
                path = unit.name
                while path := path.rpartition(".")[0]:
                    if path in around:
                        outer = around[path]
                        break
                experts.setdefault(outer.index, []).append(unit)
        for index, units in experts.items():
            group = _Group(index, self._units[index].name, tuple(units))
            self._group_in[index] = group
            self._group_of.update({unit.index: group for unit in units})

    def install(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Hook the modules that route; return the handles."""
        handles = []
        for group in self._group_in.values():
            routers = {id(each.router[1]): each.router[1] for each in group.units if each.router}
            for module in routers.values():
                begin, end = ModuleHook(self._begin, group), ModuleHook(self._end, group)
                handles.append(module.register_forward_pre_hook(begin, prepend=True))
                handles.append(module.register_forward_hook(end, always_call=True))
        if self._group_in:
            self._communicator.before_meeting = weakref.WeakMethod(self.close_all)
        return handles

    def reset(self) -> None:
        """Forget what an interruption has left open."""
        self._has_failed = self._is_meeting = False
        for group in self._group_in.values():
            group.forwards.clear()
            group.backwards.clear()

    def surround(self, unit: Unit) -> bool:
        """Tell whether there are experts in a unit that ranks may use differently."""
        return unit.index in self._group_in

    def take(self, unit: Unit) -> bool:
        """Tell whether a unit is an expert that ranks may use differently."""
        return unit.index in self._group_of

    def is_alone_with(self, unit: Unit) -> bool:
        """Tell whether this rank may do with a unit as it likes, and others need not do alike."""
        return self._communicator.world_size == 1 or self.take(unit)

    def gather(self, unit: Unit) -> bool:
        """Unshard a unit in turns with the other ranks, where it is an expert in turn."""
        group = self._group_of.get(unit.index)
        is_in_turn = group is not None and group.is_open and not self._has_failed
        if group is None or not is_in_turn or unit.is_unsharded:
            return False
        self._take_turns(group, unit)
        return True

    def close_all(self) -> None:
        """Let the other ranks have the experts that they want, before meeting them elsewhere."""
        if not self._is_meeting:
            for group in self._group_in.values():
                if group.is_open:
                    self._take_turns(group, None)

    def begin_backward(self, unit: Unit, token: object) -> None:
        """Take turns for the experts in a unit from here on."""
        group = self._group_in.get(unit.index)
        if group is not None and not group.is_free:
            group.backwards[token] = torch._C._current_graph_task_id()

    def end_backward(self, unit: Unit, token: object) -> None:
        """End the backward of a forward instance; the last one after a turn."""
        group = self._group_in.get(unit.index)
        if group is not None and token in group.backwards:
            if len(group.backwards) == 1:
                self._take_turns(group, None)
            group.backwards.pop(token, None)

    def end_of_task(self, task: int) -> None:
        """End the backwards of a graph task."""
        for index, group in self._group_in.items():
            for token in [token for token, own in group.backwards.items() if own == task]:
                self.end_backward(self._units[index], token)

    def _begin(self, group: _Group, *_: Any) -> None:
        group.forwards.append(not group.is_free)

    def _end(self, group: _Group, *_: Any) -> None:
        if not group.forwards:
            return
        try:
            if group.forwards[-1] and not group.backwards:
                self._take_turns(group, None)
        finally:
            group.forwards.pop()

    def _take_turns(self, group: _Group, wanted: Unit | None) -> None:
        """Take turns until this rank has what it wants, or until nobody wants anything."""
        if self._has_failed:
            return
        self._is_meeting = True
        try:
            while True:
                chosen = self._meet(group, wanted)
                if chosen is None:
                    return
                if chosen is wanted:
                    chosen.unshard(self._store)
                    return
                self._lend(chosen)
        except RankError:
            self._has_failed = True
            raise
        finally:
            self._is_meeting = False

    def _meet(self, group: _Group, wanted: Unit | None) -> Unit | None:
        """Tell the other ranks what this one wants, and return what all gather now."""
        self._communicator.agree(group.number, f"a turn of the experts in unit {group.name}")
        segments, reducer = group.segments, self._reducer
        row = [
            -1 if wanted is None else group.units.index(wanted),
            bool(group.backwards and not group.forwards),
        ]
        row += [reducer is not None and reducer.has_pending(each) for each in segments]
        rows = self._communicator.gather_rows(torch.tensor(row, dtype=torch.int64, device="cpu"))
        if reducer is not None:
            arrived = rows[:, 2:].any(0).tolist()
            for segment in itertools.compress(segments, arrived):
                reducer.reduce(segment)
        told: list[list[int]] = rows[:, :2].tolist()
        wishes = [number for number, _ in told if number >= 0]
        forwards = [number for number, is_backward in told if number >= 0 and not is_backward]
        if not wishes:
            return None
        return group.units[min(forwards) if forwards else max(wishes)]

    def _lend(self, unit: Unit) -> None:
        """Give the other ranks this rank's part, and keep nothing that it has no use for."""
        moving = [segment for segment in unit.segments if not segment.is_in_place]
        if unit.is_unsharded:
            for segment in moving:
                gather_flat(segment, self._store.ledger)
            return
        unit.move_to(UnitState.UNSHARDING)
        try:
            for segment in moving:
                segment.fill(self._store, self._store.ledger)
            self._store.ledger.observe(LIVE_PARAMETERS, live_parameter_bytes(self._units))
        except BaseException:
            self._store.reclaim()
            raise
        finally:
            unit.drop_prefetched(self._store)
            for segment in moving:
                segment.flat.untyped_storage().resize_(0)
            unit.move_to(UnitState.SHARDED)
