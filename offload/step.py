"""One optimizer step over all sub-groups: read, update and write overlap."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from estimators import Extent, Section, SubGroup
from offload.arrays import array_at, clear_bytes
from offload.codes import RoundingKey
from offload.generic import GenericStep
from offload.kernel_calls import Array
from offload.ledger import Activity
from offload.rules import UpdateScalars
from offload.slots import Slot
from offload.state import state_arrays, update_sub_group
from offload.store import Store


@dataclass(frozen=True, slots=True)
class NamedPiece:
    """The part of one parameter that lies in a shard."""

    name: str
    first: int
    """First element of the parameter that lies in the shard."""
    start: int
    """Where that element lies in the shard."""
    numel: int


@dataclass(frozen=True, slots=True)
class Rounding:
    """What the random bits of lossy formats depend on: seed, step, parameter and element."""

    seed: int
    step: int
    pieces: Sequence[Sequence[NamedPiece]]
    """Of each segment, in the order of its shard."""

    def parts(
        self, segment: int, low: int, high: int
    ) -> Iterator[tuple[int, int, RoundingKey | None]]:
        """Yield `(start, stop, key)` of what lies in elements `[low, high)` of a shard."""
        for piece in self.pieces[segment]:
            start, stop = max(low, piece.start), min(high, piece.start + piece.numel)
            while start < stop:
                first = piece.first + start - piece.start
                end = min(stop, start + (1 << 32) - first % (1 << 32))
                yield start, end, RoundingKey.derive(self.seed, self.step, piece.name, first)
                start = end


GradientPieces = Sequence[tuple[int, Array]]
"""(where in the shard, values): gradients of a segment that are not in one array."""


def update(
    store: Store,
    scalars: Sequence[UpdateScalars | GenericStep],
    on_segment: Callable[[int], None],
    pieces_of: Callable[[int], GradientPieces | None] = lambda _: None,
    rounding: Rounding | None = None,
) -> None:
    """Update every sub-group, drop the gradients, and wait until all is written.

    Reads of the following sub-groups and writes of the last ones are in flight while one is
    updated, and across the boundaries of segments; read-ahead only takes spare slots.

    Args:
        store: the shards of this rank.
        scalars: one per parameter group.
        on_segment: called with each segment once all its parameters have changed.
        pieces_of: gives the gradients of a segment that its caller keeps, or None.
        rounding: what lossy formats round by; None where every format is exact.

    Raises:
        ValueError: if a format is lossy and there is no `rounding`.
        PageError: if a transfer failed; the pager then refuses all further work, because some
            sub-groups are a step ahead of others.
    """
    store.require_intact()
    pass_ = _Pass(store, scalars, rounding)
    groups = [group for group in store.plan.sub_groups if group.tier(Section.STATE) is not None]
    reads = [_reads(store, group) for group in groups]
    paged = collections.deque(
        (position, group.extent, wanted)
        for position, (group, wanted) in enumerate(zip(groups, reads, strict=True))
        if group.extent is not None and wanted
    )
    moved: list[str] = []
    try:
        for position, group in enumerate(groups):
            while paged and paged[0][0] <= position:
                paged.popleft()
            slot = _lend(store, group, reads[position], ((each[1], each[2]) for each in paged))
            pieces = pieces_of(group.segment)
            if pieces is None:
                _update_group(pass_, group, slot)
            else:
                _update_pieces(pass_, group, pieces, slot)
            moved.append(_name(store, group))
            if position + 1 == len(groups) or groups[position + 1].segment != group.segment:
                on_segment(group.segment)
        if store.pager is not None:
            store.pager.drain()
    except BaseException as error:
        store.fail(
            f"an optimizer step failed midway ({type(error).__name__}); sub-groups already moved:"
            f" {', '.join(moved) or 'none'}"
        )
        raise
    store.drop_gradients()


def _name(store: Store, group: SubGroup) -> str:
    spec = store.plan.request.segments[group.segment]
    return f"{spec.name} [{group.start}, {group.stop})"


def _reads(store: Store, group: SubGroup) -> frozenset[Section]:
    """Return the sections that the update of a sub-group must read from NVMe."""
    reads = set()
    if group.on_nvme(Section.GRADIENT) and store.has_gradient(group.segment):
        reads.add(Section.GRADIENT)
    if group.on_nvme(Section.PARAMETER):
        reads.add(Section.PARAMETER)
    if group.on_nvme(Section.STATE) and group.index in store.written_states:
        reads.add(Section.STATE)
    return frozenset(reads)


def _lend(
    store: Store,
    group: SubGroup,
    reads: frozenset[Section],
    following: Iterable[tuple[Extent, frozenset[Section]]],
) -> Slot | None:
    """Return a slot with everything of the sub-group that rests on NVMe (None: nothing does).

    What follows is read ahead, as far as slots are spare, before this one is waited for.
    """
    if store.pager is None:
        return None
    if group.extent is None or not reads:
        slot = None if group.extent is None else store.pager.blank(group.extent)
        for extent, wanted in following:
            if not store.pager.read_ahead(extent, wanted):
                break
    else:
        slot = store.pager.page_in(group.extent, reads, following)
    if slot is not None and group.on_nvme(Section.STATE) and Section.STATE not in reads:
        clear_bytes(slot.section(Section.STATE))
    return slot


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass of the update over all sub-groups."""

    store: Store
    scalars: Sequence[UpdateScalars | GenericStep]
    rounding: Rounding | None

    def __post_init__(self) -> None:
        request = self.store.plan.request
        lossy = [spec.name for spec in request.segments if request.rounds(spec)]
        if lossy and self.rounding is None:
            raise ValueError(f"{lossy[0]} is stored in a lossy format; pass what it rounds by")

    def parts(
        self, group: SubGroup, low: int, high: int
    ) -> Iterable[tuple[int, int, RoundingKey | None]]:
        """Return what one call of the kernel updates of elements `[low, high)` of a shard."""
        request = self.store.plan.request
        if self.rounding is None or not request.rounds(request.segments[group.segment]):
            return [(low, high, None)]
        return self.rounding.parts(group.segment, low, high)


def _update_pieces(
    pass_: _Pass, group: SubGroup, pieces: GradientPieces, slot: Slot | None
) -> None:
    """Update a sub-group that pages at most its state from gradients that its caller keeps.

    What lies between the pieces is padding, which is zero and stays so.
    """
    store = pass_.store
    spec = store.plan.request.segments[group.segment]
    parameter = array_at(
        store.section_span(group, Section.PARAMETER, slot), spec.element, group.numel
    )
    span = store.section_span(group, Section.STATE, slot)
    state = state_arrays(store.plan, spec, group, span)
    with store.ledger.timing(Activity.UPDATE):
        for start, gradient in pieces:
            low, high = max(start, group.start), min(start + gradient.size, group.stop)
            for first, stop, key in pass_.parts(group, low, high) if low < high else ():
                inside = slice(first - group.start, stop - group.start)
                update_sub_group(
                    store.kernels,
                    parameter[inside],
                    gradient[first - start : stop - start],
                    state.part(inside),
                    pass_.scalars[spec.param_group],
                    key,
                )
    store.ledger.note("update", _name(store, group))
    store.count_uses(group)
    if slot is not None and store.pager is not None:
        store.pager.page_out(slot, frozenset({Section.STATE}))
        store.written_states.add(group.index)


def _update_group(pass_: _Pass, group: SubGroup, slot: Slot | None) -> None:
    store = pass_.store
    spec = store.plan.request.segments[group.segment]
    gradient = store.section_span(group, Section.GRADIENT, slot)
    if not store.has_gradient(group.segment):
        clear_bytes(gradient)
    parameter = array_at(
        store.section_span(group, Section.PARAMETER, slot), spec.element, group.numel
    )
    gradients = array_at(gradient, spec.gradient, group.numel)
    span = store.section_span(group, Section.STATE, slot)
    state = state_arrays(store.plan, spec, group, span)
    with store.ledger.timing(Activity.UPDATE):
        for low, high, key in pass_.parts(group, group.start, group.stop):
            inside = slice(low - group.start, high - group.start)
            update_sub_group(
                store.kernels,
                parameter[inside],
                gradients[inside],
                state.part(inside),
                pass_.scalars[spec.param_group],
                key,
            )
    store.ledger.note("update", _name(store, group))
    store.count_uses(group)
    if slot is None or store.pager is None:
        return
    changed = frozenset(
        section for section in (Section.PARAMETER, Section.STATE) if group.on_nvme(section)
    )
    if not changed:
        store.pager.release(slot)
        return
    store.pager.page_out(slot, changed)
    if Section.STATE in changed:
        store.written_states.add(group.index)
