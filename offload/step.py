"""One optimizer step over all sub-groups: read, update and write overlap."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from estimators import Extent, Section, SubGroup
from offload.arrays import array_at, clear_bytes
from offload.generic import GenericStep
from offload.host_view import HostView
from offload.ledger import Activity
from offload.rules import UpdateScalars
from offload.slots import Slot
from offload.state import state_arrays
from offload.step_device import StreamedUpdate, in_order
from offload.step_host import update_on_host
from offload.step_shared import OnUpdate, update_shared
from offload.store import Store, count_use
from offload.update_pass import GradientPieces, Rounding, UpdatePass

_STATE = frozenset({Section.STATE})
_MOST_NAMES = 8


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
    pass_ = UpdatePass(store, scalars, rounding, pieces_of)
    groups = [group for group in store.plan.sub_groups if group.tier(Section.STATE) is not None]
    if store.plan.request.update_on_device:
        groups = in_order(groups)
    lend = _lender(store, groups)
    store.parameter_version += 1
    moved: list[str] = []
    left = collections.Counter(group.segment for group in groups)

    def note(group: SubGroup, side: str) -> None:
        store.ledger.note("update", _name(store, group))
        store.ledger.updated(side)
        _count_uses(store, group)
        moved.append(_name(store, group))
        left[group.segment] -= 1
        if not left[group.segment]:
            on_segment(group.segment)

    try:
        _update_all(pass_, groups, lend, note)
        if store.pager is not None:
            store.pager.drain()
    except BaseException as error:
        store.device.settle()
        store.fail(
            f"an optimizer step failed midway ({type(error).__name__}); sub-groups already moved:"
            f" {moved_text(moved, len(groups))}"
        )
        raise
    store.drop_gradients()


def moved_text(moved: Sequence[str], count: int) -> str:
    """Return the names of what was updated, a few of them, of `count` in all."""
    shown = ", ".join(moved[:_MOST_NAMES]) + (", ..." if len(moved) > _MOST_NAMES else "")
    return f"{shown} ({len(moved)} of {count})" if moved else "none"


def _update_all(
    pass_: UpdatePass,
    groups: Sequence[SubGroup],
    lend: Callable[[int], Slot | None],
    note: OnUpdate,
) -> None:
    """Update sub-groups where the plan says, on both sides where they share."""
    store = pass_.store
    if store.device.is_host or (
        store.pager is not None and not store.plan.request.update_on_device
    ):
        for position, group in enumerate(groups):
            _update_group(pass_, group, lend(position))
            note(group, "host")
        return
    pass_ = replace(pass_, pieces_of=functools.cache(pass_.pieces_of))
    if store.sharing is not None:
        store.update_fence = update_shared(pass_, store.sharing, note, groups, lend)
    elif store.plan.request.update_on_device:
        streamed = StreamedUpdate(pass_, groups, functools.partial(note, side="device"))
        store.update_fence = streamed.run(lend)
    else:
        update_on_host(pass_, functools.partial(note, side="host"), groups)


def read_ahead_states(store: Store) -> None:
    """Start reading the states that the next update begins with, into slots that are spare.

    Nothing is read where gradients rest on NVMe: they need the slots, and are read together with
    the states. Whoever needs a slot meanwhile takes one of these, see [Note: pager invariants].
    """
    pager, groups = store.pager, store.plan.sub_groups
    if pager is None or any(group.on_nvme(Section.GRADIENT) for group in groups):
        return
    for group in groups:
        reads = _reads(store, group)
        if group.extent is None or not reads:
            continue
        if reads != _STATE or not pager.read_ahead(group.extent, reads):
            return


def _lender(store: Store, groups: Sequence[SubGroup]) -> Callable[[int], Slot | None]:
    """Return what lends the slot of the sub-group at a position, asked for in ascending order."""
    reads = [_reads(store, group) for group in groups]
    paged = collections.deque(
        (position, group.extent, wanted)
        for position, (group, wanted) in enumerate(zip(groups, reads, strict=True))
        if group.extent is not None and wanted
    )

    def lend(position: int) -> Slot | None:
        while paged and paged[0][0] <= position:
            paged.popleft()
        store.before_change(groups[position])
        return _lend(store, groups[position], reads[position], (each[1:] for each in paged))

    return lend


def _count_uses(store: Store, group: SubGroup) -> None:
    """Count the bytes of a sub-group that its update used where they rest, in memory."""
    for section, size in store.section_bytes(group).items():
        if not group.on_nvme(section):
            count_use(store.ledger, section, group, size)


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


def _update_group(pass_: UpdatePass, group: SubGroup, slot: Slot | None) -> None:
    """Update a sub-group on the host."""
    store = pass_.store
    spec = store.plan.request.segments[group.segment]
    view = HostView(store, group, slot, store.staging)
    pieces = pass_.pieces_of(group.segment)
    if pieces is None:
        has_gradient = store.has_gradient(group.segment)
        gradient = view.span(Section.GRADIENT, reads=has_gradient)
        if not has_gradient:
            clear_bytes(gradient)
        pieces = [(group.start, array_at(gradient, spec.gradient, group.numel))]
    parameter = array_at(view.span(Section.PARAMETER), spec.element, group.numel)
    state = state_arrays(store.plan, spec, group, view.span(Section.STATE))
    with store.ledger.timing(Activity.UPDATE):
        pass_.update(store.kernels, group, (parameter, state), pieces)
    view.put_back(Section.PARAMETER)
    view.put_back(Section.STATE)
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
