"""Ranks meet before they mix bytes: they find out whether all are about to do the same thing.

[Note: rendezvous] Each meeting has a number, the same on all ranks, and a text that says what a
rank is about to do. Ranks count themselves at a key of the process group's store that holds number
and text: whoever completes the count lets all go on. Each rank has a thread besides. If its rank
has waited for a moment, the thread counts it at a second key, without the text: if that count is
completed, texts differ, and all ranks raise at once. A rank that waits for long asks the others
again and again what they do; the threads answer, with the place where the program is. One that has
ended will never come: whoever waits for it raises, and all ranks do. So will one that does not
answer for long. One that waits in another collective will not come either if it stays there and
nobody computes whom it may wait for. A rank that computes is waited for as long as it takes.
Nothing is left pending in the backend, so a program that raised can end; threads of ranks that did
not raise log why others did.
"""

from __future__ import annotations

import collections
import datetime
import enum
import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

from torch.distributed import distributed_c10d as c10d

PATIENCE_S = 4.0
"""How long a rank waits before it asks the others."""

_STAYS = 1.5
"""How many times as long a rank that waits elsewhere is believed to do so for good."""

_SILENT = 4.0
"""The same for one that does not answer: its thread may have to wait for the interpreter."""

_ANSWER_S = 3.0
_POLL_S = 0.25
_READY = 1 << 32
"""What a rank that is ready adds to the count of a meeting beside itself."""

_ALIKE, _ALL_READY, _APART = "alike", "alike and ready", "not alike"
_NO_ANSWER = "does not answer: it has ended or hangs"
_log = logging.getLogger(__name__)
_WAITS_ELSEWHERE = ("/torch/distributed/", "/zero/rendezvous.py")


class RankError(RuntimeError):
    """Ranks that must do the same thing did not."""


@dataclass
class _Whereabouts:
    """What a rank says of itself; the thread that answers sees nothing else of it."""

    rank: int
    world_size: int
    position: int = 0
    what: str = "nothing yet"
    inside: bool = False
    mixing: bool = False
    """Whether a collective of the engine itself waits, on whatever thread."""
    over: threading.Event = field(default_factory=threading.Event)
    arrived: int = 0
    """The meeting at which this rank waits for the others, or 0."""
    counted: int = 0
    """The last meeting at which the thread has counted this rank, without the text."""
    spent: collections.deque[str] = field(default_factory=collections.deque)
    """Keys of meetings that all ranks have left: the thread deletes them."""

    def answer(self) -> dict[str, Any]:
        """Return where this rank is."""
        place, waits = _place_of(threading.main_thread().ident or 0)
        return {
            "position": self.position,
            "what": self.what,
            "place": place,
            "waits": (waits or self.mixing) and not self.inside,
            "inside": self.inside,
            "gone": self.over.is_set(),
            "collectives": _collectives_so_far(),
        }


class _Doing(enum.Enum):
    """What a rank does that has not come."""

    COMPUTES = "computes"
    ELSEWHERE = "waits elsewhere"
    SILENT = "does not answer"
    GONE = "has ended"


@dataclass(frozen=True, slots=True)
class _Sighting:
    """What a rank said of itself."""

    doing: _Doing
    text: str
    collectives: int = 0
    """How many it has begun: one that begins more moves."""


class _Sightings:
    """What the ranks that have not come said, and since when they say it."""

    def __init__(self, patience_s: float) -> None:
        self.last: dict[int, _Sighting] = {}
        self._patience_s = patience_s
        self._since: dict[int, float] = {}
        self._has_warned = False

    def add(self, found: dict[int, _Sighting]) -> None:
        """Take the answers to one question."""
        now = time.monotonic()
        for rank, sighting in found.items():
            if self.last.get(rank) != sighting:
                self._since[rank] = now
        self.last = found

    def lost(self) -> dict[int, _Sighting]:
        """Return the ranks that will never come, see [Note: rendezvous]."""
        somebody_moves = any(each.doing is _Doing.COMPUTES for each in self.last.values())
        return {
            rank: each
            for rank, each in self.last.items()
            if self._is_lost(rank, each.doing, somebody_moves=somebody_moves)
        }

    def is_time_to_warn(self, begin: float) -> bool:
        """Tell, once, whether a wait that began then, for one that computes, is worth a word."""
        if self._has_warned or time.monotonic() - begin < 3 * self._patience_s:
            return False
        if all(each.doing is not _Doing.COMPUTES for each in self.last.values()):
            return False
        self._has_warned = True
        return True

    def _is_lost(self, rank: int, doing: _Doing, *, somebody_moves: bool) -> bool:
        seen_s = time.monotonic() - self._since[rank]
        match doing:
            case _Doing.GONE:
                return True
            case _Doing.COMPUTES:
                return False
            case _Doing.ELSEWHERE:
                return not somebody_moves and seen_s > _STAYS * self._patience_s
            case _Doing.SILENT:
                return seen_s > _SILENT * self._patience_s
            case _:
                assert_never(doing)


class Rendezvous:
    """The meetings of the ranks of one engine."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.patience_s = PATIENCE_S
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._here = _Whereabouts(rank, world_size)
        self._last_keys: tuple[str, ...] = ()
        self._asked = 0
        self._failure: str | None = None

    def meet(self, what: str, *, is_ready: bool = False) -> bool:
        """Wait until all ranks are about to do `what`, and return whether all are ready.

        Raises:
            RankError: if another rank does something else, or will never come.
        """
        if self._failure is not None:
            raise RankError(self._failure)
        if self._store is None:
            self._open()
        here = self._here
        here.position += 1
        here.what, here.inside = what, True
        try:
            met = self._meet(here.position, what, is_ready=is_ready)
        except RuntimeError as error:
            self._failure = str(error)  # the ranks are no more at the same meeting
            self._tell(self._failure)
            raise
        finally:
            here.inside = False
        if met == _APART:
            raise RankError(self._differences(str(here.position), what))
        return met == _ALL_READY

    @contextmanager
    def mixing(self) -> Iterator[None]:
        """Tell whoever asks that this rank waits in a collective of the engine, not in a meeting.

        The backward of a GPU runs on a thread of autograd, whose place nobody looks at.
        """
        self._here.mixing = True
        try:
            yield
        finally:
            self._here.mixing = False

    def close(self) -> None:
        """Come to no further meeting; the thread ends."""
        self._here.over.set()
        if self._thread is not None:
            _join(self._thread)
            self._thread = None
        if self._store is not None and self._failure is None:
            self._failure = f"the engine of rank {self._rank} was destroyed"
            _say_gone(self._store, self._here)

    def _open(self) -> None:
        """Take a part of the store: the same one on all ranks, by the order of their engines."""
        whole = _own_connection(c10d._get_default_store())
        number = whole.add(f"tierzero/engines/{self._rank}", 1)
        self._store = c10d.PrefixStore(f"tierzero/{number}", whole)
        listening = c10d.PrefixStore(f"tierzero/{number}", _own_connection(whole))
        self._thread = threading.Thread(
            target=_listen, args=(listening, self._here), name="tierzero-rank", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _end, self._store, self._here, self._thread, os.getpid())

    def _meet(self, number: int, what: str, *, is_ready: bool) -> str:
        """Come to a meeting, and return whether all ranks came for the same, and all were ready."""
        store, here = self._store, self._here
        digest = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
        alike, go = f"{number}/{digest}", f"{number}/go"
        try:
            count = store.add(alike, 1 + is_ready * _READY)
            if count % _READY == self._world_size:
                met = _ALL_READY if count // _READY == self._world_size else _ALIKE
                store.set(go, met)
            else:
                here.arrived = number
                self._wait(go, what)
                is_sure = here.counted != number and not is_ready
                met = _ALIKE if is_sure else store.get(go).decode()
        except RankError:
            raise
        except RuntimeError as error:
            raise RankError(
                f"rank {self._rank}: {what} needs all {self._world_size} ranks, and the store that"
                f" rank 0 keeps cannot be reached: that rank has ended, or failed ({error})"
            ) from error
        finally:
            here.arrived = 0
        if self._rank == 0:
            here.spent.extend(self._last_keys)  # all ranks have left the meeting before
            self._last_keys = (alike, go)
        return met

    def _wait(self, go: str, what: str) -> None:
        begin = time.monotonic()
        try:
            self._store.wait([go], datetime.timedelta(seconds=self.patience_s))
        except RuntimeError:  # it took longer; the backend has said so, once
            found = _Sightings(self.patience_s)
        else:
            return
        while not self._store.check([go]):
            found.add(self._ask())
            self._require_nobody_raised(what)
            lost = found.lost()
            if lost and not self._store.check([go]):
                raise RankError(self._absences(what, lost))
            if found.is_time_to_warn(begin):
                self._warn(what, found.last)
            time.sleep(_POLL_S)

    def _require_nobody_raised(self, what: str) -> None:
        if self._store.check(["failure"]):
            _, failure = json.loads(self._store.get("failure"))
            raise RankError(
                f"rank {self._rank}: {what} needs all {self._world_size} ranks, and meeting"
                f" {self._here.position} will not happen, because another one raised: {failure}"
            )

    def _tell(self, failure: str) -> None:
        """Let the threads of ranks that wait elsewhere say why this one raises."""
        try:
            self._store.compare_set("failure", "", json.dumps([self._rank, failure]))
        except RuntimeError:
            return  # the store is what failed

    def _ask(self) -> dict[int, _Sighting]:
        """Return what each rank that is not here does."""
        self._asked = int(self._store.add("asked", 1))
        deadline = time.monotonic() + _ANSWER_S
        found: dict[int, _Sighting] = {}
        missing = [rank for rank in range(self._world_size) if rank != self._rank]
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                key = next(
                    (k for k in (f"gone/{rank}", f"answer/{rank}/{self._asked}")
                     if self._store.check([k])), None,
                )  # fmt: skip
                if key is not None:
                    missing.remove(rank)
                    answer = json.loads(self._store.get(key))
                    if not answer["inside"] or answer["position"] != self._here.position:
                        found[rank] = _describe(answer)
            time.sleep(_POLL_S if missing else 0)
        silent = _Sighting(_Doing.SILENT, _NO_ANSWER)
        return found | dict.fromkeys(missing, silent)

    def _differences(self, number: str, what: str) -> str:
        """Return who does what, where ranks differ."""
        self._store.set(f"{number}/what/{self._rank}", what)
        said = {}
        for rank in range(self._world_size):
            key = f"{number}/what/{rank}"
            self._store.wait([key], datetime.timedelta(seconds=3 * self.patience_s))
            said[rank] = self._store.get(key).decode()
        others = "; ".join(f"rank {rank}: {text}" for rank, text in said.items() if text != what)
        return (
            f"rank {self._rank} is at {what} (meeting {number}), but others do something else:"
            f" {others}; all ranks must use the same parts of the model in the same order, and"
            " touch the same sharded parameters"
        )

    def _absences(self, what: str, lost: dict[int, _Sighting]) -> str:
        texts = "; ".join(f"rank {rank} {each.text}" for rank, each in sorted(lost.items()))
        return (
            f"rank {self._rank}: {what} needs all {self._world_size} ranks at the same time, and"
            f" not all come to meeting {self._here.position}: {texts}; do it on every rank, not"
            " under `if rank == 0:`, and let all ranks leave a loop together"
        )

    def _warn(self, what: str, found: dict[int, _Sighting]) -> None:
        texts = "; ".join(f"rank {rank} {each.text}" for rank, each in sorted(found.items()))
        warnings.warn(
            f"rank {self._rank} waits for {what}: {texts or 'all others are here'}",
            RuntimeWarning,
            stacklevel=6,
        )


def _describe(answer: dict[str, Any]) -> _Sighting:
    last = f"its last meeting was {answer['position']} ({answer['what']})"
    if answer["gone"]:
        return _Sighting(_Doing.GONE, f"has destroyed its engine or ended; {last}")
    if answer["inside"]:
        text = f"is at meeting {answer['position']} ({answer['what']})"
        return _Sighting(_Doing.ELSEWHERE, text, answer["collectives"])
    if answer["waits"]:
        text = f"waits in another collective, at {answer['place']}; {last}"
        return _Sighting(_Doing.ELSEWHERE, text, answer["collectives"])
    return _Sighting(_Doing.COMPUTES, f"computes, at {answer['place']}; {last}")


def _end(store: Any, here: _Whereabouts, thread: threading.Thread, process: int) -> None:
    """Say that nobody will come any more: the engine was dropped, or its program ends.

    The thread is gone before the interpreter is: one that comes back from the store to an
    interpreter which ends is ended inside torch's C++, and that aborts the process.
    """
    if os.getpid() != process:
        return
    if not here.over.is_set():
        here.over.set()
        _say_gone(store, here)
    _join(thread)


def _join(thread: threading.Thread) -> None:
    """Wait for a thread that was told to end, unless it is the one that collects garbage here."""
    if thread is not threading.current_thread():
        thread.join(timeout=_ANSWER_S)


def _say_gone(store: Any, here: _Whereabouts) -> None:
    try:
        store.set(f"gone/{here.rank}", json.dumps(here.answer()))
    except RuntimeError:
        return  # the store went before


def _listen(store: Any, here: _Whereabouts) -> None:
    """Answer whoever asks, and count a rank that waits, until the engine or the store is gone."""
    answered = seen = 0
    has_told = False
    try:
        while not here.over.wait(_POLL_S):
            asked = store.add("asked", 0)
            for number in range(answered + 1, asked + 1):
                store.set(f"answer/{here.rank}/{number}", json.dumps(here.answer()))
            answered = asked
            has_told = has_told or (asked > 0 and _has_told(store, here))
            if here.arrived == seen:
                _count(store, here, seen)
            seen = here.arrived
            while here.spent:
                store.delete_key(here.spent.popleft())
    except RuntimeError:
        return  # the rank that keeps the store has ended, and with it the job


def _has_told(store: Any, here: _Whereabouts) -> bool:
    """Say why another rank raised, if one has and this one does not wait for it; tell whether."""
    if here.inside or not store.check(["failure"]):
        return False
    rank, failure = json.loads(store.get("failure"))
    if rank != here.rank:
        _log.error("rank %d raised, and rank %d did not: %s", rank, here.rank, failure)
    return True


def _count(store: Any, here: _Whereabouts, number: int) -> None:
    """Count a rank that waits at a meeting since the last look, if that is not done."""
    if not number or number == here.counted:
        return
    if here.counted:
        here.spent.append(f"{here.counted}/all")  # all ranks have left that meeting
    here.counted = number
    if store.add(f"{number}/all", 1) == here.world_size:
        store.set(f"{number}/go", _APART)


def _place_of(thread: int) -> tuple[str, bool]:
    """Return where a thread is, in the user's code, and whether it waits in a collective there."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end", True
    stack = traceback.extract_stack(frame)
    inner = next((each for each in stack if _waits_in(each.filename)), None)
    own = [
        each for each in stack if not any(part in each.filename for part in ("/torch/", "/zero/"))
    ]
    last = own[-1] if own else stack[-1]
    name = f" in {inner.name}" if inner is not None else ""
    return f"{Path(last.filename).name}:{last.lineno}{name}", inner is not None


def _collectives_so_far() -> int:
    """Return how many collectives of any group this rank has begun."""
    counters = [
        getattr(group, "_get_sequence_number_for_group", None) for group in c10d._world.pg_map
    ]
    return sum(counter() for counter in counters if counter is not None)


def _waits_in(file: str) -> bool:
    return any(part in file for part in _WAITS_ELSEWHERE) and "/elastic/" not in file


def _own_connection(store: Any) -> Any:
    """Return a store whose calls no other thread's call has to wait for."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # an older torch, or a store without connections
        return store
