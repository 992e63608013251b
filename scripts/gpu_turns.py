"""Lets several programs take turns on one machine, a training step a turn.

A program says that its next step is due and waits; whoever runs the programs lets one go on at a
time, until it says so again or has ended. So what the machine does in one minute and not in the
next meets all of them, and none computes while another is measured.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

_LOOK_SECONDS = 1.0
"""How often it is looked whether a program has ended whose children keep its pipe open."""


class Turns:
    """A program's side: it waits before each step."""

    def __init__(self, read: int, write: int) -> None:
        self._words = os.fdopen(read, encoding="utf-8")
        self._answers = os.fdopen(write, "w", encoding="utf-8")

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the turns that a command line gives: two file descriptors, as `READ,WRITE`."""
        read, write = map(int, text.split(","))
        return cls(read, write)

    def wait(self, **facts: float) -> None:
        """Say that a step is due, with what is known so far, and wait for the turn.

        Raises:
            SystemExit: if there will be no more turns.
        """
        with suppress(BrokenPipeError):  # nobody is there: the next line tells
            print(json.dumps(facts), file=self._answers, flush=True)
        if not self._words.readline():
            raise SystemExit("no turn was given any more")

    def close(self) -> None:
        """Give the file descriptors back."""
        for each in (self._words, self._answers):
            with suppress(BrokenPipeError):
                each.close()


class Player:
    """The other side of one program's turns."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str], folder: Path
    ) -> None:
        """Start a Python program; `{turns}` in its command becomes what `Turns.of` reads."""
        self.name = name
        self.log = folder / f"{name}.log"
        self.seconds: float | None = None
        """How long it went on; None while it does."""
        self.was_stopped = False
        """Whether it was ended before its time."""
        self.turn_seconds: list[float] = []
        """How long each of its turns was: its step, and what it does besides."""
        self._begun = time.monotonic()
        theirs, words = os.pipe()
        answers, their_answers = os.pipe()
        self._words = os.fdopen(words, "w", encoding="utf-8")
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._unread = b""
        turns = f"{theirs},{their_answers}"
        self.output = folder / f"{name}.out"
        with (
            self.log.open("w", encoding="utf-8") as errors,
            self.output.open("w", encoding="utf-8") as output,
        ):
            self.process = subprocess.Popen(
                [sys.executable, *(each.replace("{turns}", turns) for each in command)],
                env={**os.environ, **environment},
                stdout=output,
                stderr=errors,
                pass_fds=(theirs, their_answers),
                start_new_session=True,  # so that it is ended with all that it has started
            )
        os.close(theirs)
        os.close(their_answers)

    def go(self) -> None:
        """Give it its turn."""
        with suppress(BrokenPipeError):  # it has ended: `wait` will tell
            print(file=self._words, flush=True)

    def wait(self, end: float) -> dict[str, Any] | None:
        """Wait until its next step is due and return what it says then; None once it has ended.

        Raises:
            TimeoutError: if that is not so by `end`, in seconds of `time.monotonic`.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = max(end - time.monotonic(), 0)
                if selector.select(min(left, _LOOK_SECONDS)):
                    if not (found := self._answers.read(65536)):
                        self._end(left)
                        return None
                    self._unread += found
                elif self.process.poll() is not None:
                    self._end(left)
                    return None
                elif not left:
                    raise TimeoutError(self.name)
        line, _, self._unread = self._unread.partition(b"\n")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def take(self, count: int, end: float) -> dict[str, Any] | None:
        """Give it so many turns, one after another; return what it said last, as `wait` does."""
        facts: dict[str, Any] | None = {}
        for _ in range(count):
            begin = time.monotonic()
            self.go()
            facts = self.wait(end)
            self.turn_seconds.append(round(time.monotonic() - begin, 2))
            if facts is None:
                break
        return facts

    def stop(self) -> None:
        """End it, and all that it has started, if it goes on."""
        if self.process.poll() is None:
            self.was_stopped = True
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.seconds is None:
            self._end(None)
        with suppress(BrokenPipeError):
            self._words.close()
        self._answers.close()

    def _end(self, left: float | None) -> None:
        """Wait until it has ended, for some seconds, a few at least; None waits as long as needed.

        Raises:
            TimeoutError: if it has not.
        """
        try:
            self.process.wait(None if left is None else max(left, _LOOK_SECONDS))
        except subprocess.TimeoutExpired:
            raise TimeoutError(self.name) from None
        self.seconds = time.monotonic() - self._begun


def end_on_signals() -> None:
    """Let signals that end this process raise SystemExit, so that the programs are ended first.

    They are in sessions of their own: what a terminal or `timeout` sends does not reach them.
    """

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, leave)


def take_turns(players: Sequence[Player], end: float) -> None:
    """Let programs, whose next steps are due, take one step each by turns until all have ended.

    Raises:
        TimeoutError: as `Player.wait` does.
    """
    playing = list(players)
    while playing:
        playing = [each for each in playing if each.take(1, end) is not None]
