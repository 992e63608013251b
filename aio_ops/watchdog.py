"""The stall watchdog: whoever waits for an engine that completes nothing is told so.

It has no thread of its own. Every wait looks at the engine's activity in slices, so that a hang,
which is a wait that does not end, is never silent.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger(__name__)

STALL_WARNING_S = 30.0


class Activity(Protocol):
    """What an engine is doing."""

    @property
    def in_flight(self) -> int:
        """Transfers that are not done."""

    @property
    def blocks_taken(self) -> int:
        """Blocks of them that are with the kernel or with a thread."""

    @property
    def moved_bytes(self) -> int:
        """Bytes of blocks that are over, since the engine was opened."""

    @property
    def busy_s(self) -> float:
        """Seconds with something in flight, since the engine was opened."""

    @property
    def since_progress_s(self) -> float:
        """Seconds since a block was over while something is in flight, else 0."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The activity of an engine that counts in Python."""

    in_flight: int = 0
    blocks_taken: int = 0
    moved_bytes: int = 0
    busy_s: float = 0.0
    since_progress_s: float = 0.0


def warn_of_stall(name: str, activity: Activity) -> None:
    """Log what an engine that makes no progress is doing."""
    rate = activity.moved_bytes / activity.busy_s / 1e6 if activity.busy_s else 0.0
    _log.warning(
        "the engine %s has completed nothing for %.1f s: %d transfers are in flight, %d of their "
        "blocks with the kernel; it moved %d bytes before, at %.1f MB/s since it became busy",
        name,
        activity.since_progress_s,
        activity.in_flight,
        activity.blocks_taken,
        activity.moved_bytes,
        rate,
    )
