"""Every state of slots and pager on a hostile disk: each legal move happens, each other is refused,
and in each state a failure, an interruption, a drain and a close end well."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aio_ops import Fault, HostArena, SimulatedDisk
from estimators import Extent, Section, SlotPlan
from offload import (
    CorruptionError,
    PageError,
    Pager,
    PagerFailedError,
    PagerState,
    Slot,
    SlotState,
    Store,
    carve_slots,
)
from offload.slots import _NEXT
from tests.support.stores import contents, make_plan, make_request, make_store, train

NOWHERE = Path("/nowhere")
STATE = frozenset({Section.STATE})
LEGAL = [(before, after) for before, afters in _NEXT.items() for after in afters]
ILLEGAL = [pair for pair in itertools.product(SlotState, SlotState) if pair not in LEGAL]


class Stage:
    """A store of four slots on a hostile disk, and what its slots went through."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        fault: Fault | None = None,
        *,
        seed: int = 0,
        burst: int = 0,
        verify: bool = False,
    ) -> None:
        self.disk = SimulatedDisk(seed, fault=fault)
        plan = make_plan(make_request(), 4)
        self.store: Store = make_store(plan, self.disk, NOWHERE, burst=burst, verify=verify)
        assert self.store.pager is not None
        self.pager: Pager = self.store.pager
        self.extents: list[Extent] = [
            group.extent for group in plan.sub_groups if group.extent is not None
        ]
        self.moves: set[tuple[SlotState, SlotState]] = set()
        original = Slot.move_to

        def move_to(slot: Slot, state: SlotState) -> None:
            before = slot.state
            original(slot, state)
            self.moves.add((before, state))

        monkeypatch.setattr(Slot, "move_to", move_to)

    def write(self, index: int, text: bytes) -> Slot:
        slot = self.pager.blank(self.extents[index])
        slot.section(Section.STATE).view()[: len(text)] = text
        self.pager.page_out(slot, STATE)
        return slot

    def read(self, index: int, length: int) -> bytes:
        slot = self.pager.page_in(self.extents[index], STATE)
        found = bytes(slot.section(Section.STATE).view()[:length])
        self.pager.release(slot)
        return found


def provoke(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[SlotState, SlotState]]]:
    """Go through every legal move, by success and by failure."""
    sound = Stage(monkeypatch)
    sound.write(0, b"one")
    assert sound.read(0, 3) == b"one"
    sound.store.close()
    yield sound.moves
    for fault in (Fault(0, "enospc"), Fault(1, "eio")):
        failing = Stage(monkeypatch, fault)
        with pytest.raises(PageError):
            failing.write(0, b"one")
            failing.read(0, 3)
        failing.store.close()
        yield failing.moves


def test_every_legal_move_of_a_slot_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[SlotState, SlotState]] = set()
    for moves in provoke(monkeypatch):
        seen |= moves
    assert seen == set(LEGAL)
    assert len(LEGAL) == 8


@pytest.mark.parametrize(("before", "after"), ILLEGAL, ids=lambda state: state.name)
def test_every_other_move_is_refused(before: SlotState, after: SlotState) -> None:
    with HostArena(4096) as arena:
        slot = carve_slots(arena, SlotPlan(1, 4096))[0]
        slot.state = before
        with pytest.raises(RuntimeError, match=r"slot 0: cannot go from .* to"):
            slot.move_to(after)
        assert slot.state is before


def held(stage: Stage) -> None:
    stage.write(1, b"held")


def in_flight(stage: Stage) -> None:
    stage.write(1, b"flying")


def lent(stage: Stage) -> None:
    stage.pager.blank(stage.extents[2])


def read_ahead(stage: Stage) -> None:
    stage.write(0, b"x")
    stage.pager.drain()
    assert stage.pager.read_ahead(stage.extents[0], STATE)


def resident_ahead(stage: Stage) -> None:
    read_ahead(stage)
    stage.disk.drain()


def everything(stage: Stage) -> None:
    read_ahead(stage)
    lent(stage)
    in_flight(stage)


Situation = Callable[[Stage], None]
SITUATIONS: list[Situation] = [held, in_flight, lent, read_ahead, resident_ahead, everything]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_an_interruption_brings_every_state_to_rest(
    monkeypatch: pytest.MonkeyPatch, situation: Situation, seed: int
) -> None:
    stage = Stage(monkeypatch, seed=seed, burst=3 if situation is held else 0)
    situation(stage)
    stage.pager.reclaim()
    assert {slot.state for slot in stage.store.slots} == {SlotState.FREE}
    assert stage.pager.state is PagerState.READY
    assert stage.disk.in_flight == 0
    if situation in (held, in_flight, everything):  # what was written is not lost
        text = b"held" if situation is held else b"flying"
        assert stage.read(1, len(text)) == text
    stage.store.close()


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
def test_a_drain_waits_for_writes_and_drops_what_was_read_ahead(
    monkeypatch: pytest.MonkeyPatch, situation: Situation
) -> None:
    stage = Stage(monkeypatch, burst=3 if situation is held else 0)
    situation(stage)
    stage.pager.drain()
    left = [slot.state for slot in stage.store.slots if slot.state is not SlotState.FREE]
    assert left == ([SlotState.RESIDENT] if situation in (lent, everything) else [])
    assert stage.disk.in_flight == 0
    stage.store.close()


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
def test_closing_in_any_state_waits_and_never_raises(
    monkeypatch: pytest.MonkeyPatch, situation: Situation, kind: str
) -> None:
    """Even while the last transfer fails; afterwards every call says that it is closed."""
    count = Stage(monkeypatch, burst=3 if situation is held else 0)
    situation(count)
    last = max(count.disk.submitted - 1, 0)
    count.store.close()
    stage = Stage(monkeypatch, Fault(last, kind), burst=3 if situation is held else 0)  # type: ignore[arg-type]
    try:
        situation(stage)
    except PageError:
        assert situation in (read_ahead, resident_ahead, everything)
    stage.store.close()
    assert stage.disk.in_flight == 0
    for call in calls(stage):
        with pytest.raises(PagerFailedError):
            call()


def calls(stage: Stage) -> list[Callable[[], object]]:
    """Return every verb of the pager that must refuse once it has failed."""
    pager, extent = stage.pager, stage.extents[3]
    with HostArena(4096) as arena:
        slot = carve_slots(arena, SlotPlan(1, 4096))[0]
    return [
        lambda: pager.page_in(extent, STATE),
        lambda: pager.page_in(extent, STATE, [(stage.extents[0], STATE)]),
        lambda: pager.blank(extent),
        lambda: pager.read_ahead(extent, STATE),
        lambda: pager.page_out(slot, STATE),
        pager.drain,
    ]


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__)
def test_a_pager_that_fails_in_any_state_refuses_every_verb(
    monkeypatch: pytest.MonkeyPatch, situation: Situation
) -> None:
    stage = Stage(monkeypatch, burst=3 if situation is held else 0)
    situation(stage)
    stage.pager.fail("a test says so")
    for call in calls(stage):
        with pytest.raises(PagerFailedError, match="a test says so"):
            call()
    stage.pager.reclaim()  # does nothing, and does not raise
    assert stage.pager.state is PagerState.FAILED
    stage.store.close()


@pytest.mark.parametrize("burst", [0, 2, 4])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
def test_a_disk_that_dies_at_any_moment_is_reported_once_and_for_all(
    monkeypatch: pytest.MonkeyPatch, kind: str, *, burst: int, verify: bool
) -> None:
    for position in range(0, 60, 7):
        fault = Fault(position, kind, repeat=True)  # type: ignore[arg-type]
        stage = Stage(monkeypatch, fault, seed=position, burst=burst, verify=verify)
        with pytest.raises(PageError) as caught:
            train(stage.store, steps=2)
        assert not isinstance(caught.value, CorruptionError)
        assert caught.value.errno is not None
        stage.store.close()
        assert stage.disk.in_flight == 0
    survivor = Stage(monkeypatch, burst=burst, verify=verify)
    train(survivor.store, steps=2)
    plain = Stage(monkeypatch)
    train(plain.store, steps=2)
    assert contents(survivor.store) == contents(plain.store)
