"""Read or write a whole sub-group with one page-in or page-out, wherever its sections rest."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from aio_ops import Engine, HostArena, TransferFile, clone_file
from estimators import CODE_BLOCK_NUMEL, Section, SubGroup
from offload.arrays import clear_bytes
from offload.host_view import HostView
from offload.kernels import on_one_thread
from offload.ranges import (
    Field,
    _lend,
    _sections,
    _stored,
    copy_field,
    has_codes,
    put_field,
    sections_set_by,
)
from offload.slots import Slot
from offload.store import Store
from offload.transfers import JointTicket


class Rest(enum.Enum):
    """What sections hold beside what is being set."""

    KEPT = "kept"
    """What they hold already."""
    ZERO = "zero"
    NONE = "none"
    """Nothing: every element is set."""


class GroupReader:
    """The fields of one sub-group, as long as it is lent."""

    def __init__(
        self, store: Store, group: SubGroup, slot: Slot | None, fields: Collection[Field]
    ) -> None:
        self._store = store
        self._group = group
        self._view = HostView(store, group, slot)
        self._kernels = on_one_thread(store.kernels)
        if not store.device.is_host:
            for section in _sections(fields):  # here, so that threads find it
                if section is not Section.GRADIENT or store.has_gradient(group.segment):
                    self._view.span(section)

    def copy(self, field: Field, first: int, target: torch.Tensor) -> None:
        """Fill `target` from element `first` of the sub-group on, in the field's type.

        Several threads may.
        """
        part = (first, target)
        copy_field(self._store, self._group, self._view, field, part, self._kernels)


class GroupWriter:
    """The fields of one sub-group, as long as it is lent; each element is set.

    Moments that rest in codes are encoded by whole blocks: what a block lacks so far waits. So
    they come in order, from one thread; all else may come in any order from any thread.
    """

    def __init__(self, store: Store, group: SubGroup, view: HostView) -> None:
        self._store = store
        self._group = group
        self._view = view
        self._waiting: dict[Field, tuple[int, torch.Tensor]] = {}
        self._has_codes = has_codes(store, group)
        self._kernels = on_one_thread(store.kernels)

    def is_ordered(self, field: Field) -> bool:
        """Tell whether a field must be set in order."""
        return self._has_codes and field in (Field.EXP_AVG, Field.EXP_AVG_SQ)

    def put(self, field: Field, first: int, values: torch.Tensor) -> None:
        """Set elements from `first` of the sub-group on, and what follows from them."""
        if self.is_ordered(field):
            first, values = self._whole_blocks(field, first, values)
        if values.numel():
            part = (first, values)
            put_field(self._store, self._group, self._view, field, part, self._kernels)

    def finish(self) -> None:
        """Set what waits."""
        for field, (first, values) in self._waiting.items():
            if values.numel():
                put_field(self._store, self._group, self._view, field, (first, values))
        self._waiting.clear()

    def _whole_blocks(
        self, field: Field, first: int, values: torch.Tensor
    ) -> tuple[int, torch.Tensor]:
        """Return whole blocks, zeros where nothing was set between; keep the rest."""
        block = first // CODE_BLOCK_NUMEL * CODE_BLOCK_NUMEL
        start, earlier = self._waiting.get(
            field, (block, torch.zeros(0, dtype=torch.float32, device="cpu"))
        )
        gap = torch.zeros(first - start - earlier.numel(), dtype=torch.float32, device="cpu")
        joined = torch.cat([earlier, gap, values])
        whole = joined.numel() // CODE_BLOCK_NUMEL * CODE_BLOCK_NUMEL
        self._waiting[field] = (start + whole, joined[whole:].clone())
        return start, joined[:whole]


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
        yield GroupReader(store, group, slot, fields)
    finally:
        if slot is not None and store.pager is not None:
            store.pager.release(slot)


@contextmanager
def write_group(
    store: Store,
    group: SubGroup,
    fields: Collection[Field],
    *,
    keeps: bool,
    is_covered: bool = False,
) -> Iterator[GroupWriter]:
    """Lend a sub-group for setting some fields; it is written when the block is left.

    Args:
        store: the shards of this rank.
        group: the sub-group.
        fields: what will be set.
        keeps: whether the sections hold something beside these fields that must stay.
        is_covered: whether every element will be set; else, unless it is kept, the rest is zero.

    Raises:
        PageError: if a transfer failed.
    """
    store.require_intact()
    store.before_change(group)
    store.parameter_version += 1
    changed = frozenset(
        section for field in fields for section in sections_set_by(store, group, field)
    )
    paged = frozenset(section for section in changed if group.on_nvme(section))
    rest = Rest.KEPT if keeps else Rest.NONE if is_covered else Rest.ZERO
    slot = _lend_to_set(store, group, changed, rest)
    try:
        view = HostView(store, group, slot)
        for section in changed - paged:
            memory = view.span(section, reads=rest is Rest.KEPT)
            if rest is Rest.ZERO:
                clear_bytes(memory)
        writer = GroupWriter(store, group, view)
        yield writer
        writer.finish()
        for section in changed - paged:
            view.put_back(section)
    except BaseException:
        if slot is not None and store.pager is not None:
            store.pager.release(slot)
        raise
    if slot is not None and store.pager is not None:
        store.pager.page_out(slot, paged)
        if Section.STATE in paged:
            store.written_states.add(group.index)


def _lend_to_set(
    store: Store, group: SubGroup, changed: frozenset[Section], rest: Rest
) -> Slot | None:
    """Return a slot in which sections can be set, with what stays of them, or zeros."""
    paged = [section for section in changed if group.on_nvme(section)]
    if rest is Rest.KEPT or not paged or group.extent is None or store.pager is None:
        return _lend(store, group, changed)
    slot = store.pager.blank(group.extent)
    if rest is Rest.ZERO:
        for section in paged:
            clear_bytes(slot.section(section))
    return slot


@dataclass(frozen=True, slots=True)
class _ExtentRead:
    """What is read of one sub-group, as it was when the reader was made."""

    group: SubGroup
    fields: Collection[Field]
    pieces: list[tuple[int, int, int]]
    zero: tuple[Section, ...]
    """Sections on NVMe that were never written, which is zero."""

    @property
    def needs_slot(self) -> bool:
        return bool(self.pieces or self.zero)


class ExtentReader:
    """Reads sub-groups beside the pager, for whoever copies while training goes on.

    What rests on NVMe is read from its extent into memory of this reader's own, a sub-group ahead.
    It is read from a clone of the swap file where file systems can make one, else from the swap
    file itself. Nothing may write meanwhile what is read from where training goes on, see `guarded`
    and `Store.before_change`.
    """

    def __init__(
        self, store: Store, io: Engine, plan: Sequence[tuple[SubGroup, Collection[Field]]]
    ) -> None:
        self._store = store
        self._io = io
        self._plan = [_extent_read(store, *each) for each in plan]
        self._slots: list[Slot] = []
        self._arena: HostArena | None = None
        self._clone: TransferFile | None = None
        if any(each.needs_slot for each in self._plan):
            largest = max(group.extent.size_bytes for group, _ in plan if group.extent is not None)
            self._arena = HostArena(2 * largest)
            self._slots = [Slot(index, self._arena.carve(largest)) for index in range(2)]
            if store.swap_file is not None:
                self._clone = clone_file(store.swap_file)
        self._ahead: tuple[Slot, JointTicket] | None = None

    @property
    def is_cloned(self) -> bool:
        """Whether what rests on NVMe is read from a clone."""
        return self._clone is not None

    @property
    def guarded(self) -> set[int]:
        """Sub-groups that must not change before they are read, by index."""
        return {
            each.group.index
            for each in self._plan
            if self._clone is None
            or not all(each.group.on_nvme(section) for section in _sections(each.fields))
        }

    def read(self) -> Iterator[tuple[SubGroup, Collection[Field], GroupReader]]:
        """Yield each sub-group with a reader that is valid until the next one.

        Raises:
            TransferError: if a read failed.
        """
        for position, each in enumerate(self._plan):
            slot = self._finish(position)
            yield each.group, each.fields, GroupReader(self._store, each.group, slot, each.fields)

    def close(self) -> None:
        """Give memory and clone up."""
        if self._ahead is not None:
            self._io.drain()
            self._ahead = None
        if self._arena is not None:
            self._arena.close()
        if self._clone is not None:
            self._clone.close()

    def _finish(self, position: int) -> Slot | None:
        wanted = self._plan[position]
        slot = None
        if wanted.pieces:
            slot, ticket = self._ahead or self._start(position)
            self._ahead = None
            ticket.wait()
        elif wanted.needs_slot:
            slot = self._slots[position % 2]
            slot.extent = wanted.group.extent
        if slot is not None:
            for section in wanted.zero:
                clear_bytes(slot.section(section))
        following = position + 1
        if following < len(self._plan) and self._plan[following].pieces:
            self._ahead = self._start(following)
        return slot

    def _start(self, position: int) -> tuple[Slot, JointTicket]:
        wanted = self._plan[position]
        slot, file = self._slots[position % 2], self._clone or self._store.swap_file
        if file is None:
            raise RuntimeError("nothing of this sub-group rests on NVMe")
        slot.extent = wanted.group.extent
        tickets = [
            self._io.submit_read(file, place, slot.span.sub(start, size))
            for place, start, size in wanted.pieces
        ]
        return slot, JointTicket(tickets)


def _extent_read(store: Store, group: SubGroup, fields: Collection[Field]) -> _ExtentRead:
    sections = _sections(fields)
    zero = tuple(
        section
        for section in sections
        if group.on_nvme(section) and not _stored(store, group, section)
    )
    if group.extent is None:
        return _ExtentRead(group, fields, [], zero)
    reads = _reads(store, group, sections)
    pieces = group.extent.pieces(reads, store.copies.second(group.extent, reads))
    return _ExtentRead(group, fields, pieces, zero)


def _reads(store: Store, group: SubGroup, wanted: frozenset[Section]) -> frozenset[Section]:
    """Return the sections that NVMe holds values of, and those that lie between them."""
    reads = frozenset(section for section in wanted if _stored(store, group, section))
    if {Section.GRADIENT, Section.STATE} <= reads and group.on_nvme(Section.PARAMETER):
        reads |= {Section.PARAMETER}
    return reads
