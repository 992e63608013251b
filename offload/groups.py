"""Read or write a whole sub-group with one page-in or page-out, wherever its sections rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch

from estimators import Section, SubGroup
from offload.arrays import clear_bytes
from offload.host_view import HostView
from offload.ranges import Field, _copy_out, _lend, _sections, _stored, put_field, sections_set_by
from offload.slots import Slot
from offload.store import Store


class GroupReader:
    """The fields of one sub-group, as long as it is lent."""

    def __init__(self, store: Store, group: SubGroup, slot: Slot | None) -> None:
        self._store = store
        self._group = group
        self._slot = slot

    def copy(self, field: Field, first: int, target: torch.Tensor) -> None:
        """Fill `target` from element `first` of the sub-group on, in the field's type."""
        _copy_out(self._store, self._group, self._slot, field, (first, target))


class GroupWriter:
    """The fields of one sub-group, as long as it is lent; each element is set."""

    def __init__(self, store: Store, group: SubGroup, slot: Slot | None) -> None:
        self._store = store
        self._group = group
        self._slot = slot

    def put(self, field: Field, first: int, values: torch.Tensor) -> None:
        """Set elements from `first` of the sub-group on, and what follows from them."""
        put_field(self._store, self._group, self._slot, field, (first, values))


@contextmanager
def read_group(
    store: Store, group: SubGroup, fields: Collection[Field], following: Iterable[SubGroup] = ()
) -> Iterator[GroupReader]:
    """Lend a sub-group for reading some fields; what follows is read ahead.

    Raises:
        PageError: if a page-in failed.
    """
    store.require_intact()
    wanted = _sections(fields)
    slot = _lend(store, group, wanted)
    try:
        if slot is not None and store.pager is not None:
            for other in following:
                if other.extent is None or not _reads(store, other, wanted):
                    continue
                if not store.pager.read_ahead(other.extent, _reads(store, other, wanted)):
                    break
        yield GroupReader(store, group, slot)
    finally:
        if slot is not None and store.pager is not None:
            store.pager.release(slot)


@contextmanager
def write_group(
    store: Store, group: SubGroup, fields: Collection[Field], *, keeps: bool
) -> Iterator[GroupWriter]:
    """Lend a sub-group for setting some fields; it is written when the block is left.

    Args:
        store: the shards of this rank.
        group: the sub-group.
        fields: what will be set.
        keeps: whether the sections hold something beside these fields that must stay.

    Raises:
        PageError: if a transfer failed.
    """
    store.require_intact()
    changed = frozenset(
        section for field in fields for section in sections_set_by(store, group, field)
    )
    paged = frozenset(section for section in changed if group.on_nvme(section))
    slot: Slot | None = None
    if paged and group.extent is not None and store.pager is not None:
        if keeps:
            slot = _lend(store, group, changed)
        else:
            slot = store.pager.blank(group.extent)
            for section in paged:
                clear_bytes(slot.section(section))
    if not keeps:
        view = HostView(store, group, None)
        for section in changed - paged:
            clear_bytes(view.span(section, reads=False))
            view.put_back(section)
    try:
        yield GroupWriter(store, group, slot)
    except BaseException:
        if slot is not None and store.pager is not None:
            store.pager.release(slot)
        raise
    if slot is not None and store.pager is not None:
        store.pager.page_out(slot, paged)
        if Section.STATE in paged:
            store.written_states.add(group.index)


def _reads(store: Store, group: SubGroup, wanted: frozenset[Section]) -> frozenset[Section]:
    """Return the sections that NVMe holds values of, and those that lie between them."""
    reads = frozenset(section for section in wanted if _stored(store, group, section))
    if {Section.GRADIENT, Section.STATE} <= reads and group.on_nvme(Section.PARAMETER):
        reads |= {Section.PARAMETER}
    return reads
