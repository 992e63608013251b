"""Every state that a crash can leave the ranks of a durable run in, and what is resumed from it.

A model of the disks, run by the code's own parts: the acts and their order, the choice of places
(`Copies`), the manifests (`Manifests`, on a directory in memory) and the decisions at resume. A
rank has one section that pages and one that rests in memory. Between acts any ranks may be anywhere
that MEET allows; a crash keeps, loses or tears each write that was not synced. From every state
that a resume can end in, all states that the next crash can leave are visited, until none is new.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from offload import Commit, CommitName, Copies, Manifests
from zero.durable.protocol import (
    COMMIT_ACTS,
    Act,
    Holding,
    candidates,
    newest_whole,
    next_name,
    perform,
    refusal_to_begin,
)

PAGED, RESIDENT = 0, 1
TORN = -1
COMMITS = 2
"""Commits that ranks make after each start; by the third everything repeats."""


@dataclass(frozen=True)
class Disk:
    """What one rank's disk has: two manifests, and a label in each of two places of a section."""

    manifests: tuple[bytes | None, bytes | None] = (None, None)
    paged: tuple[int, int] = (TORN, TORN)
    resident: tuple[int, int] = (TORN, TORN)


Disks = tuple[Disk, ...]

OLD = CommitName(5, "old")
"""What all ranks hold at a start that is not the first, under standard names."""
STATE_COUNTS = [(1, 3, 88), (2, 3, 1218), (3, 3, 15508)]
"""Ranks, states that a resume can end in (and the first), and crash states."""


class Memory:
    """A directory in memory; what `replace_file` does with it is tested on the simulated disk."""

    path = Path("/model")

    def __init__(self, manifests: tuple[bytes | None, bytes | None]) -> None:
        named = zip(("commit-0", "commit-1"), manifests, strict=True)
        self.files = {name: raw for name, raw in named if raw is not None}

    def names(self) -> list[str]:
        return sorted(self.files)

    def read(self, name: str) -> bytes | None:
        return self.files.get(name)

    def write(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def sync(self, name: str) -> None:
        assert name in self.files

    def rename(self, name: str, target: str) -> None:
        self.files[target] = self.files.pop(name)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def sync_entries(self) -> None:
        pass

    def manifests(self) -> tuple[bytes | None, bytes | None]:
        return self.files.get("commit-0"), self.files.get("commit-1")


@dataclass
class Rank:
    """One rank as it runs, on the code's own choice of places and manifests."""

    disk: Disk
    kept: CommitName | None
    label: int = 0
    unsynced: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = Memory(self.disk.manifests)
        self.manifests = Manifests(self.memory)
        self.copies = Copies()
        self.places = {PAGED: list(self.disk.paged), RESIDENT: list(self.disk.resident)}
        if self.kept is not None:
            self.copies.restore(self.manifests.find(self.kept).entries)
            self.manifests.keep(self.kept)

    def train(self, label: int) -> None:
        """Page out a step's state; what the step is is its label."""
        self.label = label
        self._put(PAGED)

    def write(self) -> None:
        self._put(RESIDENT)

    def sync(self) -> None:
        for section, (copy, label) in self.unsynced.items():
            self.places[section][copy] = label
        self.unsynced.clear()

    def flip(self, name: CommitName) -> None:
        entries = tuple(self.copies.entries())
        self.manifests.flip(Commit(name, self.label, "swap-1", "", entries))

    def release(self, name: CommitName) -> None:
        self.manifests.keep(name)
        self.copies.commit()

    def _put(self, section: int) -> None:
        copy = self.copies.begin_write(section, self.label)
        earlier = self.unsynced.get(section)
        assert earlier is None or earlier[0] == copy
        self.unsynced[section] = (copy, self.label)

    def crashed(self) -> frozenset[Disk]:
        """Return everything that a crash now can leave."""
        outcomes = []
        for section, (copy, label) in self.unsynced.items():
            kept = self.places[section][copy]
            outcomes.append([(section, copy, each) for each in {kept, TORN, label}])
        found = set()
        for chosen in itertools.product(*outcomes):
            places = {section: list(labels) for section, labels in self.places.items()}
            for section, copy, label in chosen:
                places[section][copy] = label
            paged, resident = tuple(places[PAGED]), tuple(places[RESIDENT])
            found.add(Disk(self.memory.manifests(), paged, resident))  # type: ignore[arg-type]
        return frozenset(found)


@functools.cache
def holding(disk: Disk) -> Holding:
    manifests = Manifests(Memory(disk.manifests))
    names = tuple(commit.name for commit in manifests.commits)
    return Holding(names, tuple(manifests.problems.values()))


@functools.cache
def label_of(disk: Disk, name: CommitName) -> int | None:
    """Return the step that a rank would restore from a commit; None if it is not whole."""
    commit = Manifests(Memory(disk.manifests)).find(name)
    places = {PAGED: disk.paged, RESIDENT: disk.resident}
    whole = all(places[each.place][each.copy] == each.checksum for each in commit.entries)
    return commit.step if whole else None


def choose(disks: Disks) -> CommitName | None:
    return newest_whole(
        candidates([holding(disk) for disk in disks]),
        lambda name: all(label_of(disk, name) is not None for disk in disks),
    )


def resume(disk: Disk, name: CommitName | None) -> Disk:
    """Return a disk once the other manifests are gone, as `DurableRun._take` removes them."""
    memory = Memory(disk.manifests)
    manifests = Manifests(memory)
    if name is not None:
        manifests.keep(name)
    manifests.discard_others()
    return Disk(memory.manifests(), disk.paged, disk.resident)


@dataclass(frozen=True)
class Fault:
    """A first commit that one rank cannot make, and perhaps a rank that cannot take it back."""

    failing: int
    stuck: int | None = None


@functools.cache
def life(
    disk: Disk, kept: CommitName | None, index: int, fault: Fault | None
) -> tuple[tuple[int, frozenset[Disk]], ...]:
    """Return `(meetings that it has left, what a crash can leave)` after each act of one rank."""
    rank = Rank(disk, kept)
    found = [(0, rank.crashed())]
    left, name = 0, kept
    for number in range(COMMITS):
        rank.train(base_of(kept) + 1 + number)
        found.append((left, rank.crashed()))
        tried = next_name(name, f"next-{number}")
        fails = fault is not None and number == 0
        for act in COMMIT_ACTS:
            if act is Act.MEET:
                left += 1
                if fails:
                    found.append((left, rank.crashed()))
                    if fault is not None and index != fault.stuck:
                        rank.manifests.withdraw(tried)
            elif not (fails and (act is Act.RELEASE or is_failing(act, index, fault))):
                perform(act, rank, tried)
            found.append((left, rank.crashed()))
        name = name if fails else tried
    return tuple(found)


def is_failing(act: Act, index: int, fault: Fault | None) -> bool:
    return fault is not None and index == fault.failing and act is Act.FLIP


def base_of(kept: CommitName | None) -> int:
    return 0 if kept is None else kept.sequence


def crash_states(
    disks: Disks, kept: CommitName | None, fault: Fault | None
) -> Iterator[tuple[int, Disks]]:
    """Yield `(meetings that some rank may have left, disks)` for every crash.

    A rank leaves a meeting once all are in it. So when some have left meeting k, each of the others
    has left it too, or waits in it, having done everything before.
    """
    lives = [life(disk, kept, index, fault) for index, disk in enumerate(disks)]
    for most in range(COMMITS + 1):
        options = []
        for states in lives:
            beyond = {each for left, found in states if left == most for each in found}
            before = [found for left, found in states if left == most - 1]
            options.append(beyond | (before[-1] if before else frozenset()))
        for chosen in itertools.product(*options):
            yield most, chosen


def canonical(disks: Disks, name: CommitName) -> Disks:
    """Return an equal state under standard names: what no manifest names is torn."""
    found = []
    for disk in disks:
        commit = Manifests(Memory(disk.manifests)).find(name)
        places = {PAGED: [TORN, TORN], RESIDENT: [TORN, TORN]}
        for each in commit.entries:
            places[each.place][each.copy] = OLD.sequence
        entries = tuple(replace(each, checksum=OLD.sequence) for each in commit.entries)
        raw = Commit(OLD, OLD.sequence, "swap-1", "", entries).to_bytes()
        manifests = (raw, None) if disk.manifests[0] is not None else (None, raw)
        paged, resident = tuple(places[PAGED]), tuple(places[RESIDENT])
        found.append(Disk(manifests, paged, resident))  # type: ignore[arg-type]
    return tuple(found)


def labels_held(disk: Disk) -> set[int]:
    """Return the steps that a rank has whole, whatever its manifests say."""
    return set(disk.paged) & set(disk.resident) - {TORN}


def check(kept: CommitName | None, promised: int, disks: Disks) -> CommitName | None:
    """Check one crash state; return what is resumed."""
    base = base_of(kept)
    chosen = choose(disks)
    if chosen is None:
        assert kept is None
        assert promised <= 0
        assert refusal_to_begin([holding(disk) for disk in disks]) is None
        return None
    # Nothing that was promised is lost, and nothing is found that was not being committed.
    assert base + promised <= chosen.sequence <= base + promised + 1
    step = base if chosen == kept else base + 1 + int(chosen.token.rpartition("-")[2])
    for disk in disks:
        assert label_of(disk, chosen) == step  # the bits of that step, on every rank
        assert step in labels_held(disk)
    common = set.intersection(*(set(holding(disk).names) for disk in disks))
    for name in common:  # and nothing newer is whole on every rank
        assert name <= chosen or any(label_of(disk, name) is None for disk in disks)
    return chosen


def faults(ranks: int) -> Iterator[Fault | None]:
    yield None
    for failing in range(ranks):
        yield Fault(failing)
        yield from (Fault(failing, stuck) for stuck in range(ranks) if stuck != failing)


@pytest.mark.parametrize(("ranks", "starts", "crashes"), STATE_COUNTS)
def test_every_crash_resumes_at_the_newest_step_that_every_rank_holds(
    ranks: int, starts: int, crashes: int
) -> None:
    pending: list[tuple[Disks, CommitName | None]] = [((Disk(),) * ranks, None)]
    seen, visited = set(pending), set()
    generations = 0
    while pending:
        disks, kept = pending.pop()
        for fault in faults(ranks):
            for left, after in crash_states(disks, kept, fault):
                if (kept, left, fault is None, after) in visited:
                    continue
                visited.add((kept, left, fault is None, after))
                chosen = check(kept, left - (fault is not None and left > 0), after)
                generations = max(generations, len(set().union(*map(labels_held, after))))
                resumed = tuple(resume(disk, chosen) for disk in after)
                for some in itertools.product(*zip(after, resumed, strict=True)):
                    assert choose(some) == chosen  # also if a crash strikes while others go
                if chosen is not None:
                    following = (canonical(resumed, chosen), OLD)
                    if following not in seen:
                        seen.add(following)
                        pending.append(following)
    assert generations == (2 if ranks == 1 else 3)  # [Note: durable protocol]
    assert (len(seen), len(visited)) == (starts, crashes)
