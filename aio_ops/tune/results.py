"""What a tuner found out, as plain records that the report, the words and the JSON are made of."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aio_ops.disk import Disk
from aio_ops.tune.bench import Sample
from aio_ops.tune.gpu import Slots
from aio_ops.tune.halving import Outcome, Samples
from aio_ops.tune.settings import Setting, Workload
from aio_ops.tune.statistics import interval, percentile

PERCENTILES = (0.5, 0.9, 0.99)
_CLIFF = 0.7
_LEAST_FOR_NOISE = 4


@dataclass(frozen=True, slots=True)
class Rate:
    """A median in bytes a second, its 95 % bootstrap interval, and of how many measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, rates: Sequence[float]) -> "Rate":
        """Return what measurements say."""
        return cls(statistics.median(rates), *interval(rates), len(rates))

    def text(self) -> str:
        """Return it in GB/s."""
        if self.count == 1:
            return f"{self.median / 1e9:.2f} GB/s (measured once)"
        return f"{self.median / 1e9:.2f} GB/s ({self.low / 1e9:.2f} to {self.high / 1e9:.2f})"


@dataclass(frozen=True, slots=True)
class Latency:
    """How long single blocks took, `depth` of them at once."""

    workload: Workload
    depth: int
    block_bytes: int
    count: int
    percentiles_s: tuple[float, ...]

    @classmethod
    def of(cls, workload: Workload, setting: Setting, sample: Sample) -> "Latency":
        """Return what a measurement of single blocks says."""
        times = [percentile(sample.latencies_s, share) for share in PERCENTILES]
        count = len(sample.latencies_s)
        return cls(workload, setting.depth, setting.block_bytes, count, tuple(times))


@dataclass(frozen=True, slots=True)
class Together:
    """Several directories measured by turns alone and at once."""

    alone: dict[Path, Rate]
    setting: Setting
    """The one that a configuration gets: the best for all at once of what each chose."""
    together: Rate
    share: float
    """What all at once moved, of the sum of what each moved alone."""
    speedup: float
    """The same, of what the fastest moved alone."""

    def verdict(self) -> str:
        """Say whether they share a link."""
        count = len(self.alone)
        moved = f"together they move {self.share:.0%} of the sum of each alone"
        if self.share >= 0.85:
            return f"the {count} directories do not share a link: {moved}"
        if self.speedup <= 1.15:
            return f"the {count} directories share one disk or link: {moved}, no more than one does"
        return f"the {count} directories share a part of their path: {moved}"


@dataclass(frozen=True, slots=True)
class Sustained:
    """A long write: (start, end, bytes) of each piece of it."""

    pieces: tuple[tuple[float, float, int], ...]
    wanted_s: float

    @property
    def written_bytes(self) -> int:
        """All that was written."""
        return sum(size_bytes for _, _, size_bytes in self.pieces)

    def rates(self) -> list[float]:
        """Return the bytes a second of each piece."""
        return [size / max(end - start, 1e-9) for start, end, size in self.pieces]

    def cliff(self) -> tuple[int, float, float] | None:
        """Return (bytes written before, rate before, rate after) of a lasting fall, or None.

        The fall is where the rates on both sides differ most in the sum of squares, if what comes
        after has less than 70 % of the rate before, lasts at least a second, and is no part of
        the same noise.
        """
        rates = self.rates()
        best, where = 0.0, None
        for cut in range(4, len(rates) - 3):
            before, after = statistics.median(rates[:cut]), statistics.median(rates[cut:])
            gain = cut * (len(rates) - cut) * (before - after) ** 2
            apart = percentile(rates[cut:], 0.9) < percentile(rates[:cut], 0.1)
            if apart and after < _CLIFF * before and gain > best:
                best, where = gain, cut
        if where is None:
            return None
        written_bytes = sum(size for _, _, size in self.pieces[:where])
        return written_bytes, statistics.median(rates[:where]), statistics.median(rates[where:])

    def verdict(self) -> str:
        """Say whether the disk's write cache ends."""
        if not self.pieces:
            return "nothing was written for long: --max-write was spent; raise it"
        seconds = self.pieces[-1][1]
        volume = f"{self.written_bytes / 1e9:.1f} GB in {seconds:.0f} s"
        short = (
            ""
            if seconds >= 0.9 * self.wanted_s
            else f" (--max-write ended it before {self.wanted_s:.0f} s)"
        )
        fall = self.cliff()
        if fall is None:
            return f"a long write kept its rate: {volume}{short}"
        before_bytes, before, after = fall
        return (
            f"a long write fell from {before / 1e9:.2f} to {after / 1e9:.2f} GB/s after "
            f"{before_bytes / 1e9:.1f} GB, as when a drive's write cache is full: {volume}{short}"
        )


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The whole grid beside the choice: what is better beyond the intervals."""

    measured: int
    rounds: int
    choice: Rate
    beaten_by: tuple[tuple[Setting, float, float], ...]
    """Each with its relative rate, and the choice's, whose intervals do not overlap."""

    def verdict(self) -> str:
        """Say whether the choice stands."""
        what = f"{self.measured} settings, {self.rounds} rounds each"
        if not self.rounds:
            return f"the whole grid could not be measured: --max-write was spent ({what})"
        if not self.beaten_by:
            return f"no setting of the whole grid beats the choice beyond its interval ({what})"
        best, rate, chosen = self.beaten_by[0]
        return (
            f"{len(self.beaten_by)} of the whole grid beat the choice beyond its interval ({what});"
            f" the best is {best.describe()} with {rate / chosen:.2f} times its rate"
        )


@dataclass
class DirectoryResult:
    """What was found out about one directory."""

    disk: Disk
    direct: bool
    refusals: dict[str, str]
    notices: list[str] = field(default_factory=list)
    outcomes: dict[Workload, Outcome[Setting]] = field(default_factory=dict)
    chosen: Setting | None = None
    """The best setting that a configuration has keys for."""
    best: Setting | None = None
    """The best of all, the same unless it is better beyond the interval."""
    latencies: list[Latency] = field(default_factory=list)
    sustained: Sustained | None = None
    exhausted: Exhausted | None = None
    gpu: dict[Workload, Outcome[Slots]] = field(default_factory=dict)

    def rate(self, workload: Workload, setting: Setting | None = None) -> Rate | None:
        """Return the rate of a setting, by default the choice, where it was measured."""
        outcome, key = self.outcomes.get(workload), setting or self.chosen
        if outcome is None or key is None or key not in outcome.samples.taken:
            return None
        return Rate.of(outcome.samples.rates(key))

    def by_turns(self) -> float | None:
        """Return what the mix would be if reads and writes did not meet at all."""
        read, write = self.rate(Workload.READ), self.rate(Workload.WRITE)
        return None if read is None or write is None else 2 / (1 / read.median + 1 / write.median)

    def noise(self) -> float | None:
        """Return by how much the choice varied: the middle 80 %, as a share of the median.

        None where it was measured too seldom to say.
        """
        for outcome in self.outcomes.values():
            if self.chosen in outcome.samples.taken:
                rates = outcome.samples.rates(self.chosen)
                if len(rates) < _LEAST_FOR_NOISE:
                    continue
                spread = percentile(rates, 0.9) - percentile(rates, 0.1)
                return spread / statistics.median(rates)
        return None

    def samples(self, workload: Workload) -> Samples[Setting] | None:
        """Return everything that was measured of a workload."""
        outcome = self.outcomes.get(workload)
        return None if outcome is None else outcome.samples


@dataclass
class Result:
    """What one run of the tuner found out."""

    directories: list[DirectoryResult]
    together: Together | None
    written_bytes: int
    seconds: float

    @property
    def winner(self) -> DirectoryResult:
        """The directory that moves the mix fastest, or what was measured instead of it."""
        return max(self.directories, key=_first_rate)

    @property
    def setting(self) -> Setting | None:
        """What a configuration of all directories is to use."""
        return self.winner.chosen if self.together is None else self.together.setting

    @property
    def bursts(self) -> bool:
        """Whether bursts of reads and writes by turns are better wherever they were tried."""
        return all(each.best is not None and each.best.alternates for each in self.directories)

    def drives(self) -> list[Path]:
        """Return a directory of each file system, the fastest of it; the fastest first."""
        ordered = sorted(self.directories, key=_first_rate, reverse=True)
        first: dict[int, Path] = {}
        for each in ordered:
            first.setdefault(each.disk.identity, each.disk.path)
        return list(first.values())


def _first_rate(result: DirectoryResult) -> float:
    rate = next(filter(None, (result.rate(workload) for workload in Workload)), None)
    return 0.0 if rate is None else rate.median
