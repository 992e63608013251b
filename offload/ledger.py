"""Bytes and waits per link: the source of every report, progress line and benchmark."""

from __future__ import annotations

import collections
import enum
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from estimators import Section

EVENT_LIMIT = 4096
"""Events kept for tests of order; older ones are dropped."""


class Link(enum.Enum):
    """A direction on the NVMe link."""

    READ = "nvme read"
    WRITE = "nvme write"


class Activity(enum.Enum):
    """What the training thread spent time on in this subsystem."""

    READ_WAIT = "read wait"
    WRITE_WAIT = "write wait"
    SLOT_WAIT = "slot wait"
    UPDATE = "update"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Totals since the ledger was made, or between two snapshots."""

    bytes_by_class: Mapping[str, int]
    """For example {"nvme read parameter": 4096}."""
    seconds: Mapping[str, float]
    """Seconds by `Activity.value`."""

    @property
    def nvme_read_bytes(self) -> int:
        """Bytes read from NVMe."""
        return self._sum(Link.READ)

    @property
    def nvme_write_bytes(self) -> int:
        """Bytes written to NVMe."""
        return self._sum(Link.WRITE)

    @property
    def stall_seconds(self) -> float:
        """Seconds that the training thread waited for transfers or slots."""
        waits = (Activity.READ_WAIT, Activity.WRITE_WAIT, Activity.SLOT_WAIT)
        return sum(self.seconds[wait.value] for wait in waits)

    def minus(self, earlier: LedgerSnapshot) -> LedgerSnapshot:
        """Return what happened since `earlier`."""
        return LedgerSnapshot(
            {key: size - earlier.bytes_by_class[key] for key, size in self.bytes_by_class.items()},
            {key: spent - earlier.seconds[key] for key, spent in self.seconds.items()},
        )

    def _sum(self, link: Link) -> int:
        return sum(size for key, size in self.bytes_by_class.items() if key.startswith(link.value))


class Ledger:
    """Counts bytes and seconds; each engine has its own."""

    def __init__(self) -> None:
        self._bytes = {(link, section): 0 for link in Link for section in Section}
        self._seconds = dict.fromkeys(Activity, 0.0)
        self.events: collections.deque[tuple[str, str]] = collections.deque(maxlen=EVENT_LIMIT)
        """(event, record) in order: "submit read", "read done", "update", ..."""

    def add_bytes(self, link: Link, sizes_bytes: Mapping[Section, int]) -> None:
        """Count bytes that a transfer moved, by section."""
        for section, size in sizes_bytes.items():
            self._bytes[link, section] += size

    def note(self, event: str, record: str) -> None:
        """Remember an event, so that a test can assert an order."""
        self.events.append((event, record))

    @contextmanager
    def timing(self, activity: Activity) -> Iterator[None]:
        """Add the seconds of a `with` block to an activity."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[activity] += time.perf_counter() - begin

    def snapshot(self) -> LedgerSnapshot:
        """Return the totals up to now."""
        return LedgerSnapshot(
            {
                f"{link.value} {section.name.lower()}": size
                for (link, section), size in self._bytes.items()
            },
            {activity.value: spent for activity, spent in self._seconds.items()},
        )
