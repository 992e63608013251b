"""The recorded order in which units are used, and what it predicts."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LOG_LIMIT = 4096
"""Uses that are remembered at most, the latest ones."""

_CANDIDATES = 8
"""Earlier places of one use that are looked at, the latest ones."""


class Phase(enum.Enum):
    """Which pass a unit is used in."""

    FORWARD = "forward"
    INFERENCE = "forward without gradients"
    BACKWARD = "backward"


Use = tuple[Phase, int]
"""A pass, and the unit that is used in it."""


@dataclass(frozen=True, slots=True)
class NextUse:
    """When a unit is used again."""

    between: int
    """Elements of other units that are used before."""
    is_after_loss: bool
    """Whether that is in the backward, and the present use in the forward."""


class RecordedOrder:
    """Remembers in which order units were used, and follows the earlier place that is like now.

    As long as uses repeat, that place moves on with them. Where they do not, it becomes the latest
    one where the same unit was used in the same phase, after the same one before if there is such
    a place: so what is common is predicted, and what is new is predicted the next time. Nothing
    follows the end of a backward before a forward: an update comes next, which would make what was
    read ahead old.
    """

    def __init__(self) -> None:
        self._log: list[Use] = []
        self._places: dict[Use, collections.deque[int]] = {}
        self._at: int | None = None
        """Where the log is like now."""
        self._begins: list[bool] = []
        """Whether a pass begins, for each use of the log."""
        self._is_at_end = True
        """Whether the next use begins a pass."""

    def end_pass(self) -> None:
        """Take the next use for the first one of another forward, or backward of its own."""
        self._is_at_end = True

    @property
    def last_unit(self) -> int | None:
        """The unit used last, if there is one."""
        return self._log[-1][1] if self._log else None

    def visit(self, phase: Phase, unit: int) -> None:
        """Record a use.

        A unit that is recomputed in its backward is used once.
        """
        use = phase, unit
        is_again = bool(self._log) and self._log[-1] == use and not self._is_at_end
        if not (is_again and phase is Phase.BACKWARD):
            self._record(use)

    def next_use(self, unit: int, numel_of: Callable[[int], int], limit: int) -> NextUse | None:
        """Return when a unit is used again in this pass; None is not within a limit of elements."""
        between = 0
        for phase, following in self.following(in_pass=True):
            if following == unit:
                return NextUse(between, is_after_loss=phase is not self._log[-1][0])
            between += numel_of(following)
            if between > limit:
                return None
        return None

    def _record(self, use: Use) -> None:
        if len(self._log) >= LOG_LIMIT:
            self._forget_half()
        last, log, at = (self._log[-1] if self._log else None), self._log, self._at
        if at is not None and at + 1 < len(log) and log[at + 1] == use:
            self._at = at + 1
        else:
            places = self._places.get(use, ())
            alike = (each for each in reversed(places) if each and log[each - 1] == last)
            self._at = next(alike, places[-1] if places else None)
        self._places.setdefault(use, collections.deque(maxlen=_CANDIDATES)).append(len(log))
        log.append(use)
        self._begins.append(self._is_at_end)
        self._is_at_end = False

    def _forget_half(self) -> None:
        gone = len(self._log) // 2
        del self._log[:gone], self._begins[:gone]
        self._at = self._at - gone if self._at is not None and self._at >= gone else None
        self._places.clear()
        for place, use in enumerate(self._log):
            self._places.setdefault(use, collections.deque(maxlen=_CANDIDATES)).append(place)

    def following(self, *, in_pass: bool = False) -> Iterator[Use]:
        """Yield the uses that followed the latest one earlier, the nearest first.

        Args:
            in_pass: end before another forward, or another backward, began: what a device holds
                is freed there.
        """
        if self._at is None:
            return
        for at in range(self._at, len(self._log) - 1):
            (phase, _), following = self._log[at : at + 2]
            is_forward = following[0] is not Phase.BACKWARD
            is_end = in_pass and self._begins[at + 1]
            if is_end or (phase is Phase.BACKWARD and is_forward):
                return
            yield following
