"""Bytes and waits per link: the source of every report, progress line and benchmark."""

from __future__ import annotations

import collections
import enum
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from estimators import DriveRates, Section, Tier
from offload.report import LedgerReport, StepRecord
from offload.trace import Trace

EVENT_LIMIT = 4096
"""Events kept for tests of order; older ones are dropped."""

GATHERED, REDUCED = "gathered", "reduced"
"""What ranks exchange: parameters, and gradients."""

STEP_LIMIT = 200
"""Steps kept one by one for the report; older ones only count in the totals."""


class Link(enum.Enum):
    """A direction on the NVMe link."""

    READ = "nvme read"
    WRITE = "nvme write"

    @property
    def verb(self) -> str:
        """How events name the direction."""
        return "read" if self is Link.READ else "write"


class Activity(enum.Enum):
    """What the training thread spent time on in this subsystem."""

    READ_WAIT = "read wait"
    WRITE_WAIT = "write wait"
    SLOT_WAIT = "slot wait"
    UPDATE = "update"
    COLLECTIVE = "collective"
    CHECKSUM = "checksum"
    COMMIT = "commit"


_WAITS = (Activity.READ_WAIT, Activity.WRITE_WAIT, Activity.SLOT_WAIT)


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Totals since the ledger was made, or between two snapshots."""

    bytes_by_class: Mapping[str, int]
    """For example {"nvme read parameter": 4096}."""
    seconds: Mapping[str, float]
    """Seconds by `Activity.value`."""
    resident_bytes: Mapping[str, int]
    """Bytes that were used where they rest, without a transfer: {"host state": 4096}."""
    busy_seconds: float = 0.0
    """Seconds in which a transfer was in flight, as far as the pager has looked."""
    tokens: int = 0
    copied_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes copied between host memory and a device: {"in": 4096, "out": 4096}."""
    rank_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the other ranks' parts in what ranks exchanged: {"gathered": 4096}."""
    updated_groups: Mapping[str, int] = field(default_factory=dict)
    """Sub-groups by where they were updated: {"host": 3, "device": 5}."""

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
        return sum(self.seconds[wait.value] for wait in _WAITS)

    def minus(self, earlier: LedgerSnapshot) -> LedgerSnapshot:
        """Return what happened since `earlier`."""
        return LedgerSnapshot(
            {key: size - earlier.bytes_by_class[key] for key, size in self.bytes_by_class.items()},
            {key: spent - earlier.seconds[key] for key, spent in self.seconds.items()},
            {key: size - earlier.resident_bytes[key] for key, size in self.resident_bytes.items()},
            self.busy_seconds - earlier.busy_seconds,
            self.tokens - earlier.tokens,
            {
                way: size - earlier.copied_bytes.get(way, 0)
                for way, size in self.copied_bytes.items()
            },
            {
                what: size - earlier.rank_bytes.get(what, 0)
                for what, size in self.rank_bytes.items()
            },
            {
                side: count - earlier.updated_groups.get(side, 0)
                for side, count in self.updated_groups.items()
            },
        )

    def _sum(self, link: Link) -> int:
        return sum(size for key, size in self.bytes_by_class.items() if key.startswith(link.value))


class Ledger:
    """Counts bytes and seconds; each engine has its own."""

    def __init__(self) -> None:
        self.rates: DriveRates | None = None
        """What the drive can do, measured or given; None leaves shares of it out of the report."""
        self.parameter_numel = 0
        """Trained elements of this rank, for the wear by parameter."""
        self.events: collections.deque[tuple[str, str]] = collections.deque(maxlen=EVENT_LIMIT)
        """(event, record) in order: "submit read", "read done", "update", ..."""
        self.copied_bytes: Mapping[str, int] = {}
        """What the device of the store counts: bytes copied in and out."""
        self.peaks: dict[str, int] = {}
        """The most bytes that were seen at once, by what the plan calls them."""
        self._bytes = {(link, section): 0 for link in Link for section in Section}
        self._resident = {
            (tier, section): 0 for tier in (Tier.DEVICE, Tier.HOST) for section in Section
        }
        self._seconds = dict.fromkeys(Activity, 0.0)
        self._tokens = 0
        self._rank_bytes = {GATHERED: 0, REDUCED: 0}
        self._updated_groups = {"device": 0, "host": 0}
        self._in_flight = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._steps: collections.deque[StepRecord] = collections.deque(maxlen=STEP_LIMIT)
        self._step_count = 0
        self._step_begin = time.perf_counter()
        self._step_start = self.snapshot()
        self._trace: Trace | None = None

    # What happens

    def submitted(self, link: Link, record: str) -> None:
        """Count a transfer that begins."""
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight += 1
        self.note(f"submit {link.verb}", record)
        if self._trace is not None:
            self._trace.begin_transfer(link.verb, record)

    def completed(self, link: Link, record: str, sizes_bytes: Mapping[Section, int]) -> None:
        """Count a transfer that has moved its bytes, by section."""
        for section, size in sizes_bytes.items():
            self._bytes[link, section] += size
        self.note(f"{link.verb} done", record)
        self.ended(link, record)

    def ended(self, link: Link, record: str) -> None:
        """Take a transfer as no longer in flight, whatever came of it."""
        self._in_flight = max(self._in_flight - 1, 0)
        if not self._in_flight:
            self._busy_seconds += time.perf_counter() - self._busy_since
        if self._trace is not None:
            self._trace.end_transfer(link.verb, record)

    def used_in_place(self, tier: Tier, section: Section, size_bytes: int) -> None:
        """Count bytes that were used where they rest, in memory."""
        self._resident[tier, section] += size_bytes

    def exchanged(self, what: str, size_bytes: int, world_size: int) -> None:
        """Count `size_bytes` that ranks gathered or reduced, less this rank's own part."""
        self._rank_bytes[what] += size_bytes - size_bytes // world_size

    def updated(self, side: str) -> None:
        """Count a sub-group that the "host" or the "device" has updated."""
        self._updated_groups[side] += 1

    def observe(self, what: str, size_bytes: int) -> None:
        """Keep the most bytes that a line of the plan was seen to take."""
        self.peaks[what] = max(self.peaks.get(what, 0), size_bytes)

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
            spent = time.perf_counter() - begin
            self._seconds[activity] += spent
            if self._trace is not None:
                self._trace.add_span(activity.value, begin, spent)

    def ran_beside(self, what: str, begin: float, end: float) -> None:
        """Record what the host's kernels did beside the training thread, for the time line."""
        if self._trace is not None:
            self._trace.add_span(what, begin, end - begin, beside=True)

    def count_tokens(self, count: int) -> None:
        """Add tokens (or samples) of the current step, for the wear by token."""
        self._tokens += count

    def begin_step(self) -> None:
        """Take what happened so far as before the step."""
        self._step_begin = time.perf_counter()
        self._step_start = self.snapshot()

    def end_step(self) -> None:
        """Close the current step: what happened since the last one belongs to it."""
        now = time.perf_counter()
        self._step_count += 1
        moved = self.snapshot().minus(self._step_start)
        self._steps.append(
            StepRecord(
                step=self._step_count,
                seconds=now - self._step_begin,
                nvme_bytes=moved.bytes_by_class,
                resident_bytes=moved.resident_bytes,
                activity_seconds=moved.seconds,
                busy_seconds=moved.busy_seconds,
                tokens=moved.tokens,
                copied_bytes=moved.copied_bytes,
                rank_bytes=moved.rank_bytes,
                updated_groups=moved.updated_groups,
            )
        )
        if self._trace is not None:
            self._trace.add_span(
                f"step {self._step_count}", self._step_begin, now - self._step_begin
            )
        self.begin_step()

    # What it says

    def snapshot(self) -> LedgerSnapshot:
        """Return the totals up to now."""
        busy = self._busy_seconds
        if self._in_flight:
            busy += time.perf_counter() - self._busy_since
        return LedgerSnapshot(
            {
                f"{link.value} {section.name.lower()}": size
                for (link, section), size in self._bytes.items()
            },
            {activity.value: spent for activity, spent in self._seconds.items()},
            {
                f"{tier.value} {section.name.lower()}": size
                for (tier, section), size in self._resident.items()
            },
            busy,
            self._tokens,
            dict(self.copied_bytes),
            dict(self._rank_bytes),
            dict(self._updated_groups),
        )

    def report(self) -> LedgerReport:
        """Return the steps that have ended (the last 200) as data, JSON lines and a table."""
        return LedgerReport(tuple(self._steps), self.rates, self.parameter_numel)

    def start_trace(self, limit: int = 100_000) -> None:
        """Record a time line from now on, of at most `limit` events; later ones are left out.

        An event takes some 500 bytes of memory, outside of any budget.
        """
        self._trace = Trace(limit)

    def trace(self, process: str = "tierzero") -> dict[str, object]:
        """Return the recorded time line in the format that Perfetto and chrome://tracing read.

        Raises:
            RuntimeError: if no trace was started.
        """
        if self._trace is None:
            raise RuntimeError("no trace is recorded; call ledger.start_trace() before the steps")
        return self._trace.to_dict(process)
