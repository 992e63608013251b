"""Parameters that are copied to a device before their unit is unsharded.

[Note: coming parameters] The flat buffer of a segment is filled while other units compute. It does
not count before the unit is unsharded: touches go to the shard until then. If parameters changed
since, what has come is old, and is copied again. Several ranks exchange their shards ahead as well,
so they must all do so or none, and all find it old or none: whether anything pages is asked of all
ranks at first, and changes are counted where all ranks take part. What is kept from one use to the
next is there in the same way, see [Note: kept parameters].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from offload import Ledger, Store, pages_parameters
from offload.device import PASSED, Fence
from offload.ledger import GATHERED, Activity

if TYPE_CHECKING:
    from zero.comm import Communicator
    from zero.unit import Segment, Unit


class ComingParameters:
    """The copy that fills the flat buffer of one segment ahead of its use, if there is one."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._fence: Fence | None = None
        self._version = 0
        self._kept_at: int | None = None
        """If it is kept from an earlier use: the version of this rank's shards then."""
        self.may_come = True
        """Whether every rank's shard is in memory, so that it can be exchanged ahead."""

    @property
    def is_kept(self) -> bool:
        """Whether all of the flat buffer is there, from an earlier use."""
        return self._kept_at is not None

    @property
    def is_coming(self) -> bool:
        """Whether the flat buffer has memory though its parameters do not count."""
        return self._fence is not None

    def start(self, store: Store) -> None:
        """Begin, if all of this rank's shard is in memory elsewhere."""
        segment = self._segment
        if segment.is_in_place or self.is_coming or not self.may_come:
            return
        store.ledger.note("prefetch", segment.spec.name)
        self._version = self._version_of(store)
        self._fence = fence = read_flat(segment, store)
        if segment.communicator.world_size > 1:
            with store.ledger.timing(Activity.COLLECTIVE):
                agree_on(segment)
            self._fence = store.device.beside(
                lambda: segment.communicator.all_gather_in_place(segment.flat), segment.flat, fence
            )
            store.ledger.exchanged(GATHERED, segment.flat.nbytes, segment.layout.world_size)

    def keep(self, store: Store) -> None:
        """Take the flat buffer as it is for what its next use needs."""
        self._version = self._version_of(store)
        self._kept_at = store.parameter_version
        self._fence = PASSED

    def take(self, store: Store) -> bool:
        """Let the device's work wait for what comes; tell whether it came and is not old.

        One rank may have written its piece of what is kept: the others do not know of it.
        """
        fence, self._fence = self._fence, None
        kept_at, self._kept_at = self._kept_at, None
        if fence is None:
            return False
        store.device.join(fence)
        is_same = kept_at is None or kept_at == store.parameter_version
        return is_same and self._version == self._version_of(store)

    def drop(self, store: Store) -> None:
        """Free what has come and was not used."""
        if self._fence is not None:
            self.take(store)
            self._segment.flat.untyped_storage().resize_(0)

    def _version_of(self, store: Store) -> int:
        is_alone = self._segment.communicator.world_size == 1
        return store.parameter_version if is_alone else self._segment.change_count


class UnitAhead:
    """The one unit whose parameters are copied to a device ahead of their use."""

    def __init__(self) -> None:
        self._unit: Unit | None = None

    @property
    def sharded(self) -> tuple[Unit, ...]:
        """The unit, if its parameters come or have come and do not count yet."""
        return () if self._unit is None or self._unit.is_unsharded else (self._unit,)

    def start(self, unit: Unit, store: Store) -> None:
        """Begin with a unit; nothing of another one may be there that was not used."""
        self._unit = unit
        unit.prefetch(store)

    def leave_others(self, unit: Unit, store: Store) -> None:
        """Free what has come and was not used, unless it is of a unit."""
        if self._unit is not unit:
            self.drop(store)

    def drop(self, store: Store) -> None:
        """Free what has come and was not used."""
        if self._unit is not None and not self._unit.is_kept:
            self._unit.drop_prefetched(store)
        self._unit = None


def let_come(units: Sequence[Unit], store: Store, communicator: Communicator) -> None:
    """Find out of which segments no rank pages anything, and of which units all do; a collective.

    Several ranks look at whole units, so that all of them do alike.

    Where ranks take turns for experts, each comes to units in an order of its own, so nothing is
    exchanged ahead.
    """
    segments = [segment for unit in units for segment in unit.segments]
    if not segments:
        return
    if communicator.world_size > 1 and any(unit.router is not None for unit in units):
        for segment in segments:
            segment.coming.may_come = False
        return
    pages = torch.tensor(
        [pages_parameters(store, segment.index) for segment in segments], device="cpu"
    )
    by_rank = communicator.gather_rows(pages)
    places = {segment.index: place for place, segment in enumerate(segments)}
    for unit in units:
        of_unit = by_rank[:, [places[segment.index] for segment in unit.segments]]
        unit.is_read_by_all = bool(of_unit.any(1).all())
        for segment, pages in zip(unit.segments, of_unit.T, strict=True):
            is_read = pages if communicator.world_size == 1 else of_unit
            segment.coming.may_come = not is_read.any()


def agree_on(segment: Segment, *, is_ready: bool = False) -> bool:
    """Wait until all ranks are about to gather a segment; tell whether all have it already."""
    what = f"the parameters of unit {segment.spec.unit}"
    return segment.communicator.agree(segment.index, what, is_ready=is_ready)


def gather_flat(segment: Segment, ledger: Ledger, *, is_whole: bool = False) -> None:
    """Fill a flat buffer from the part of it that each rank holds, unless all have all of it."""
    communicator = segment.communicator
    with ledger.timing(Activity.COLLECTIVE):
        if agree_on(segment, is_ready=is_whole):
            ledger.note("kept", segment.spec.name)
            return
        ledger.note("gather", segment.spec.name)
        communicator.all_gather_in_place(segment.flat)
    ledger.exchanged(GATHERED, segment.flat.nbytes, communicator.world_size)


def read_flat(segment: Segment, store: Store) -> Fence:
    """Give a flat buffer its memory and start to read this rank's shard into it."""
    segment.flat.untyped_storage().resize_(segment.flat.numel() * segment.flat.element_size())
    if not segment.flat.numel():
        return PASSED
    own = segment.communicator.own_slice(segment.flat)
    return store.read_parameters(segment.index, store.device.memory_of(own))
