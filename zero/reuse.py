"""Units that are used again soon keep their parameters in memory between the uses.

[Note: kept parameters] A unit that is kept is sharded all the same: its flat buffer has memory and
the gathered values, but they do not count, as those that come to a device ahead of their use. So a
touch finds what the shards hold, and whatever writes a parameter makes what is kept old: it is then
gathered again. Ranks need not keep the same: they tell each other when they meet, and gather unless
all of them have the values. But what comes ahead is exchanged by all at once. So a rank that cannot
keep a unit, because somebody holds on to its values, counts it as kept all the same, where other
ranks keep it. A unit is kept if the recorded order says that it is used again after at most
`max_reuse_distance` elements of others, and only in room that the plan has for units in use and
within `max_live_parameters`: where another unit needs the room, the one that is used last leaves.
What is kept goes at the end of a backward, of a forward without gradients, and at a step.

[Note: at the loss] Between a forward and its backward the memory of a device that is not the host
is often fullest: all activations are there, and several copies of the logits. So a unit whose next
use is in the backward is not kept on such a device, unless it is the root unit, that use is the
very next one of a model whose root unit does not move, or each rank would read a drive for it. Nor
is a unit copied ahead from a forward for the backward, or while the loss of the model, a scalar, is
all that the backward has reached. A tensor of one element is no scalar: with one sample a rank may
have that where the others have more, and ranks must do alike. The plan counts what is there, see
`live_bytes_at_loss` in `estimators/unsharded.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from offload import Store
from zero.coming import UnitAhead
from zero.memory import live_parameter_bytes
from zero.order import RecordedOrder
from zero.unit import Unit

KEPT = "parameters kept for their next use (peak)"
"""What the ledger calls the most bytes that were kept at once."""


@dataclass(frozen=True, slots=True)
class PrefetchLimits:
    """How many parameters may be read ahead, and kept."""

    prefetch_numel: int
    live_numel: int
    reuse_numel: int = 0
    """Elements of other units before the next use of one that is kept; 0 keeps none."""


class KeptUnits:
    """The kept units of one engine."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: Store,
        order: RecordedOrder,
        limits: PrefetchLimits,
        present: tuple[Mapping[int, Unit], UnitAhead],
    ) -> None:
        self._units = tuple(units)
        self._store = store
        self._order = order
        self._limits = limits
        self._unsharded, self._ahead = present
        self._kept: dict[int, Unit] = {}

    @property
    def units(self) -> Collection[Unit]:
        """The units that are kept."""
        return self._kept.values()

    def is_ready(self, unit: Unit) -> bool:
        """Tell whether the parameters of a unit need not be read for its next use."""
        return self.has(unit) or (bool(self._limits.reuse_numel) and unit.is_unsharded)

    def has(self, unit: Unit) -> bool:
        """Tell whether a unit is kept."""
        return unit.index in self._kept

    def reshard(self, unit: Unit, *, may_keep: bool, is_recomputed: bool) -> None:
        """Reshard a unit, and keep its parameters if they are used again soon.

        A unit that is recomputed inside a backward is used again at once.
        """
        held_bytes = unit.live_bytes
        keeps = (
            may_keep
            and unit.moves
            and (bool(self._limits.reuse_numel) if is_recomputed else self._is_near(unit))
        )
        unit.reshard(keeps_for=self._store if keeps else None)
        if unit.is_kept or (keeps and _is_on_several_ranks(unit)):
            self._kept[unit.index] = unit
            self.make_room(None)
            self._store.ledger.observe(KEPT, sum(each.live_bytes for each in self.units))
        elif self._store.device.is_host:
            self._store.heap.freed(held_bytes)

    def make_room(self, unit: Unit | None) -> None:
        """Let kept units go until one that is about to be unsharded fits, the last used first."""
        if unit is not None and unit.index in self._kept:
            del self._kept[unit.index]
            return
        if unit is not None and unit.is_unsharded:
            return
        needed_bytes = unit.full_bytes - unit.live_bytes if unit is not None else 0
        needed = unit.numel if unit is not None else 0
        while self._kept and not self._fits(needed_bytes, needed):
            self._drop(max(self._kept, key=self._distance_of))

    def has_room_ahead(self, unit: Unit) -> bool:
        """Let kept units, all used later, go for the one used next; tell whether that fits."""
        self.make_room(unit)
        needed_bytes = unit.full_bytes - unit.live_bytes
        return not needed_bytes or self._fits(needed_bytes, unit.numel)

    def drop_all(self) -> None:
        """Free everything that is kept."""
        for at in tuple(self._kept):
            self._drop(at)

    def reach_loss(self) -> None:
        """Free what was kept for a use that did not come and may not be there at the loss."""
        if self._store.device.is_host:
            return
        last = self._order.last_unit
        for at in tuple(self._kept):
            if not self._may_be_at_loss(at, is_first=at == last):
                self._drop(at)

    def _is_near(self, unit: Unit) -> bool:
        limit = self._limits.reuse_numel
        next_use = self._order.next_use(unit.index, self._numel_of, limit) if limit else None
        if next_use is None:
            return False
        if self._store.device.is_host or not next_use.is_after_loss:
            return True
        return self._may_be_at_loss(unit.index, is_first=next_use.between == 0)

    def _may_be_at_loss(self, at: int, *, is_first: bool) -> bool:
        """Tell whether a unit may be kept over the loss, see [Note: at the loss].

        Args:
            at: index of the unit.
            is_first: whether the backward uses it first.
        """
        is_read = self._units[at].is_read_by_all
        return at == 0 or is_read or (is_first and not self._units[0].moves)

    def _distance_of(self, at: int) -> int:
        """Return the elements of others before the next use, more than the limit if not near."""
        limit = self._limits.reuse_numel
        next_use = self._order.next_use(at, self._numel_of, limit)
        return limit + 1 if next_use is None else next_use.between

    def _fits(self, size_bytes: int, numel: int) -> bool:
        others = [*self._unsharded.values(), *self._ahead.sharded]
        distinct = {unit.index: unit for unit in others if unit.index not in self._kept}.values()
        live_numel = numel + sum(each.numel for each in (*distinct, *self.units))
        size_bytes += live_parameter_bytes(distinct) + sum(each.full_bytes for each in self.units)
        fits = size_bytes <= self._store.plan.live_parameter_bytes
        return fits and live_numel <= self._limits.live_numel

    def _numel_of(self, at: int) -> int:
        unit = self._units[at]
        return unit.numel if unit.moves else 0

    def _drop(self, at: int) -> None:
        unit = self._kept.pop(at)
        held_bytes = unit.live_bytes
        unit.drop_prefetched(self._store)
        if self._store.device.is_host:
            self._store.heap.freed(held_bytes)


def _is_on_several_ranks(unit: Unit) -> bool:
    return any(segment.communicator.world_size > 1 for segment in unit.segments)
