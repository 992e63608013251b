"""What ranks do together to commit and to resume: pure decisions, and the order of acts.

[Note: durable protocol] A rank has two places for each section [Note: two places] and two manifests
[Note: two manifests]. To commit step n, every rank

    WRITE    puts what rests in memory into the places that commit n-1 does not use;
             what pages went there as it was written, since n-1
    SYNC     makes all of it last, on every path
    FLIP     replaces the manifest of n-2, synced, by one of n: this rank holds n-1 and n
    MEET     waits until every rank has done so, and learns whether each could
    RELEASE  lets the places of n-1 be written

and trains on. No rank leaves MEET before all have entered it, so the places of n-1 are not written
before every rank holds n. That one rule gives, at any moment at which any ranks stop:

1. If some rank has left MEET of n, every rank holds n, whole: its places are not written before
   MEET of n+1. Resume finds n (or n+1, if that was flipped everywhere).
2. If none has left MEET of n, every rank holds n-1, whole: its places are written only after that.
   Some hold n as well. If all do, resume finds n, else n-1.

So three generations can be on the disks at once: n+1 half written over n-1 on a rank that has left
MEET of n, while another, still in it, has n-1 whole beside n. Two places a rank are enough all the
same, since what is written over n-1 is needed by nobody.

To resume, every rank reads its manifests and all learn of all. Candidates are the commits that
every rank has a manifest of, newest first. Each is read and compared with its checksums on every
rank; the first that is whole on all of them is taken, so ranks fall back alike. Then each removes
every other manifest, synced, and all meet before anything is written. A commit that a rank alone
had is thereby gone for good: what is written next has the same sequence number but another token,
and the two are never mixed, wherever the next crash strikes.

If a rank could not write, sync or flip, all learn of it in MEET, whoever flipped takes the manifest
of n back, and n-1 goes on to count.

Nothing was committed by all ranks yet: then a run begins anew, also if some have a first commit.
But a second one means that all had a first one, so if there is no candidate then, or a manifest
cannot be read, state was lost, and the run is refused rather than begun anew without a word.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

from offload import CommitName


class DurableError(RuntimeError):
    """A durable run cannot be begun, resumed or committed; says why and what to do."""


class Act(enum.Enum):
    """What a rank does to commit."""

    WRITE = "write"
    SYNC = "sync"
    FLIP = "flip"
    MEET = "meet"
    RELEASE = "release"


COMMIT_ACTS = (Act.WRITE, Act.SYNC, Act.FLIP, Act.MEET, Act.RELEASE)
"""A commit, in order [Note: durable protocol]."""


class Member(Protocol):
    """One rank's disk, as far as a commit needs it."""

    def write(self) -> None:
        """Put everything into the places that the last commit does not use."""

    def sync(self) -> None:
        """Make it last."""

    def flip(self, name: CommitName) -> None:
        """Hold the new commit, beside the last one."""

    def release(self, name: CommitName) -> None:
        """Let the places of the commit before be written."""


def perform(act: Act, member: Member, name: CommitName) -> None:
    """Do what a rank does alone; MEET is for whoever has the ranks."""
    match act:
        case Act.WRITE:
            member.write()
        case Act.SYNC:
            member.sync()
        case Act.FLIP:
            member.flip(name)
        case Act.RELEASE:
            member.release(name)
        case Act.MEET:
            raise ValueError("no rank can meet alone")
        case _:
            assert_never(act)


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank finds in its directory."""

    names: tuple[CommitName, ...] = ()
    """The commits that it has a manifest of."""
    problems: tuple[str, ...] = ()
    """Manifests that cannot be read, and why."""
    is_new: bool = False
    """Whether there was no directory."""


def candidates(holdings: Sequence[Holding]) -> list[CommitName]:
    """Return the commits that every rank has a manifest of, newest first."""
    common = set(holdings[0].names)
    for holding in holdings[1:]:
        common &= set(holding.names)
    return sorted(common, reverse=True)


def newest_whole(
    names: Sequence[CommitName], is_whole: Callable[[CommitName], bool]
) -> CommitName | None:
    """Return the first candidate that every rank finds whole, or None if there is none.

    Args:
        names: the candidates.
        is_whole: tells whether a commit is whole on every rank; ranks ask it together.
    """
    return next((name for name in names if is_whole(name)), None)


def refusal_to_begin(holdings: Sequence[Holding]) -> str | None:
    """Return why a run must not begin anew although there is no candidate, or None if it may."""
    problems = [
        f"rank {rank}: {problem}"
        for rank, holding in enumerate(holdings)
        for problem in holding.problems
    ]
    if problems:
        return "; ".join(problems)
    newest = max((name for each in holdings for name in each.names), default=None)
    if newest is None:
        return None
    missing = [rank for rank, holding in enumerate(holdings) if holding.is_new]
    if missing:
        return f"ranks {missing} have no directory, though others have commit {newest.sequence}"
    if newest.sequence > 1:
        without = [rank for rank, each in enumerate(holdings) if newest not in each.names]
        return (
            f"commit {newest.sequence} is there, but ranks {without} have neither it nor the one"
            " before"
        )
    return None


def next_name(last: CommitName | None, token: str) -> CommitName:
    """Return the name of the commit after `last`, made by the process that drew `token`."""
    return CommitName(1 if last is None else last.sequence + 1, token)
