"""The recorded order in which units are used, and what it predicts."""

from __future__ import annotations

import enum
from collections.abc import Iterator


class Phase(enum.Enum):
    """Which pass a unit is used in."""

    FORWARD = "forward"
    BACKWARD = "backward"


class RecordedOrder:
    """Remembers which unit followed which; at most one successor for each unit and phase.

    Nothing follows the end of a backward: an update comes next, which would make what was read
    ahead old.
    """

    def __init__(self) -> None:
        self._successor: dict[tuple[Phase, int], tuple[Phase, int]] = {}
        self._last: tuple[Phase, int] | None = None

    def visit(self, phase: Phase, unit: int) -> Iterator[int]:
        """Record a use and yield the units that followed it last time, the nearest first.

        A unit that is recomputed in its backward is used once.
        """
        last = self._last
        if last == (phase, unit) and phase is Phase.BACKWARD:
            return self._following(phase, unit)
        if last is not None and (last[0] is Phase.FORWARD or phase is Phase.BACKWARD):
            self._successor[last] = (phase, unit)
        self._last = (phase, unit)
        return self._following(phase, unit)

    def _following(self, phase: Phase, unit: int) -> Iterator[int]:
        at = (phase, unit)
        for _ in range(len(self._successor)):
            following = self._successor.get(at)
            if following is None:
                return
            yield following[1]
            at = following
