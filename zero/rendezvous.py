"""Ranks meet before they mix bytes: they find out whether all are about to do the same thing.

[Note: rendezvous] Each meeting has a number, the same on all ranks, and a text that says what a
rank is about to do. Ranks count themselves at a key of the process group's store that holds number
and text: whoever completes the count lets all go on. Each rank has a thread besides. If its rank
has waited for a moment, the thread counts it at a second key, without the text: if that count is
completed, texts differ, and all ranks raise at once. A rank that waits for long asks the others
what they do; the threads answer, with the place where the program is. A rank that computes is
waited for as long as it takes. One that has ended, does not answer, or waits in another collective
will never come: whoever waits for it raises, and all ranks do. Nothing is left pending in the
backend, so a program that raised can end.
"""

from __future__ import annotations

import collections
import datetime
import hashlib
import json
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
from typing import Any

from torch.distributed import distributed_c10d as c10d

PATIENCE_S = 8.0
"""How long a rank waits before it asks; it raises after it has asked twice."""

_ANSWER_S = 3.0
_POLL_S = 0.25
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
        }


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

    def meet(self, what: str) -> None:
        """Wait until all ranks are about to do `what`.

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
            alike = self._meet(here.position, what)
        except RuntimeError as error:
            self._failure = str(error)  # the ranks are no more at the same meeting
            raise
        finally:
            here.inside = False
        if not alike:
            raise RankError(self._differences(str(here.position), what))

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
            self._thread.join(timeout=_ANSWER_S)
            self._thread = None
        if self._store is not None and self._failure is None:
            self._failure = f"the engine of rank {self._rank} was destroyed"
            try:
                self._store.set(f"gone/{self._rank}", json.dumps(self._here.answer()))
            except RuntimeError:
                return  # the store went before

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
        weakref.finalize(self, self._here.over.set)

    def _meet(self, number: int, what: str) -> bool:
        """Come to a meeting, and return whether all ranks came for the same."""
        store, here = self._store, self._here
        digest = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
        alike, go = f"{number}/{digest}", f"{number}/go"
        try:
            if store.add(alike, 1) == self._world_size:
                store.set(go, "alike")
                is_alike = True
            else:
                here.arrived = number
                self._wait(go, what)
                is_alike = here.counted != number or store.get(go) == b"alike"
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
        return is_alike

    def _wait(self, go: str, what: str) -> None:
        suspects: dict[int, str] = {}
        begin, warned = time.monotonic(), False
        while True:
            try:
                self._store.wait([go], datetime.timedelta(seconds=self.patience_s))
            except RuntimeError:
                if self._store.check([go]):
                    return
            else:
                return
            found = self._ask()
            lost = {rank: text for rank, text in found.items() if text.startswith("!")}
            certain = lost.keys() & suspects.keys()
            if certain:
                raise RankError(self._absences(what, {rank: lost[rank] for rank in certain}))
            suspects = lost
            if not warned and time.monotonic() - begin > 3 * self.patience_s:
                warned = True
                self._warn(what, found)

    def _ask(self) -> dict[int, str]:
        """Return what each rank that is not here does; with a "!" if it will not come."""
        self._asked = int(self._store.add("asked", 1))
        deadline = time.monotonic() + _ANSWER_S
        found: dict[int, str] = {}
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
                        found[rank] = _describe(rank, answer)
            time.sleep(_POLL_S if missing else 0)
        found |= {rank: f"!rank {rank} does not answer: it has ended or hangs" for rank in missing}
        return found

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

    def _absences(self, what: str, lost: dict[int, str]) -> str:
        texts = "; ".join(text.removeprefix("!") for _, text in sorted(lost.items()))
        return (
            f"rank {self._rank}: {what} needs all {self._world_size} ranks at the same time, and"
            f" not all come to meeting {self._here.position}: {texts}; do it on every rank, not"
            " under `if rank == 0:`, and let all ranks leave a loop together"
        )

    def _warn(self, what: str, found: dict[int, str]) -> None:
        texts = "; ".join(text.removeprefix("!") for text in found.values())
        warnings.warn(
            f"rank {self._rank} waits for {what}: {texts or 'all others are here'}",
            RuntimeWarning,
            stacklevel=6,
        )


def _describe(rank: int, answer: dict[str, Any]) -> str:
    last = f"its last meeting was {answer['position']} ({answer['what']})"
    if answer["gone"]:
        return f"!rank {rank} has destroyed its engine or ended; {last}"
    if answer["inside"]:
        return f"rank {rank} is at meeting {answer['position']} ({answer['what']})"
    if answer["waits"]:
        return f"!rank {rank} waits in another collective, at {answer['place']}; {last}"
    return f"rank {rank} computes, at {answer['place']}; {last}"


def _listen(store: Any, here: _Whereabouts) -> None:
    """Answer whoever asks, and count a rank that waits, until the engine or the store is gone."""
    answered = seen = 0
    try:
        while not here.over.wait(_POLL_S):
            asked = store.add("asked", 0)
            for number in range(answered + 1, asked + 1):
                store.set(f"answer/{here.rank}/{number}", json.dumps(here.answer()))
            answered = asked
            if here.arrived == seen:
                _count(store, here, seen)
            seen = here.arrived
            while here.spent:
                store.delete_key(here.spent.popleft())
    except RuntimeError:
        return  # the rank that keeps the store has ended, and with it the job


def _count(store: Any, here: _Whereabouts, number: int) -> None:
    """Count a rank that waits at a meeting since the last look, if that is not done."""
    if not number or number == here.counted:
        return
    if here.counted:
        here.spent.append(f"{here.counted}/all")  # all ranks have left that meeting
    here.counted = number
    if store.add(f"{number}/all", 1) == here.world_size:
        store.set(f"{number}/go", "not alike")


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


def _waits_in(file: str) -> bool:
    return any(part in file for part in _WAITS_ELSEWHERE) and "/elastic/" not in file


def _own_connection(store: Any) -> Any:
    """Return a store whose calls no other thread's call has to wait for."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # an older torch, or a store without connections
        return store
