"""What the recorded order says is used next comes ahead: to a device, and from a drive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from estimators.summary import LIVE_PARAMETERS
from offload import Store, pages_parameters
from zero.coming import UnitAhead
from zero.memory import live_parameter_bytes
from zero.order import Phase, RecordedOrder
from zero.reuse import KeptUnits, PrefetchLimits
from zero.unit import Unit

READ_AHEAD = "parameters read ahead (peak)"
"""What the ledger calls the most bytes that were read ahead of the unit in use."""


class Prefetcher:
    """Follows the uses of one engine's units, and begins with those that come next."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: Store,
        limits: PrefetchLimits,
        unsharded: Mapping[int, Unit],
    ) -> None:
        self._units = tuple(units)
        self._store = store
        self._limits = limits
        self._unsharded = unsharded
        self._order = RecordedOrder()
        self.ahead = UnitAhead()
        self.kept = KeptUnits(units, store, self._order, limits, (unsharded, self.ahead))
        segments = [segment.index for unit in units for segment in unit.segments]
        self.reads = any(pages_parameters(store, index) for index in segments)
        """Whether parameters rest on NVMe, so that they are read ahead."""

    def note_use(self, unit: Unit, phase: Phase, *, is_loss: bool) -> None:
        """Record that a unit was unsharded for its use, and begin with what follows.

        Args:
            unit: what is used now.
            phase: the pass that uses it.
            is_loss: whether the backward has reached a loss alone: see [Note: at the loss] in
                `zero/reuse.py`. On all ranks alike: they exchange what comes ahead.
        """
        self._observe_live()
        self._order.visit(phase, unit.index)
        copies = not self._store.device.is_host and not is_loss
        if not (copies or self.reads):
            return
        spare = self._limits.live_numel - sum(each.numel for each in self._unsharded.values())
        spare = min(spare, self._limits.prefetch_numel)
        if copies:
            self._copy_next(unit, phase, spare)
        if self.reads:
            self._read_following(spare)

    def end_forward(self, *, has_backward: bool, of_model: bool = False) -> None:
        """Free what has come and was not used, and what was kept but may not be at the loss."""
        if not has_backward:
            self.end_pass()
            return
        self.ahead.drop(self._store)
        if of_model:
            self.kept.reach_loss()

    def end_pass(self) -> None:
        """Free what was kept and what has come: whatever follows is another pass."""
        self.ahead.drop(self._store)
        self.kept.drop_all()
        self._order.end_pass()

    def _copy_next(self, unit: Unit, present: Phase, spare: int) -> None:
        """Start to copy to the device what is used next in this pass, if there is room."""
        for phase, predicted in self._order.following(in_pass=True):
            next_unit = self._units[predicted]
            if phase is not present or next_unit is unit or self.kept.has(next_unit):
                return
            if next_unit.moves and not next_unit.is_unsharded:
                self.ahead.leave_others(next_unit, self._store)
                if next_unit.numel <= spare and self.kept.has_room_ahead(next_unit):
                    self.ahead.start(next_unit, self._store)
                    self._observe_live()
                return

    def _read_following(self, spare: int) -> None:
        """Start to read from the drive what is used next, as far as slots and limits allow."""
        ahead_bytes = 0
        for _, predicted in self._order.following():
            unit = self._units[predicted]
            if self.kept.is_ready(unit):
                continue
            spare -= unit.numel
            if spare < 0 or not all(
                self._store.read_ahead_parameters(segment.index) for segment in unit.segments
            ):
                return
            ahead_bytes += unit.shard_bytes
            self._store.ledger.observe(READ_AHEAD, ahead_bytes)

    def _observe_live(self) -> None:
        others = {each.index: each for each in (*self.ahead.sharded, *self.kept.units)}
        present = {**others, **self._unsharded}
        self._store.ledger.observe(LIVE_PARAMETERS, live_parameter_bytes([*present.values()]))
