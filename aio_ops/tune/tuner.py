"""Tunes directories within a budget of time and of written bytes; the order of things is here."""

import functools
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from aio_ops import probe
from aio_ops.tune import gpu, halving
from aio_ops.tune.bench import Allowance, Bench, Sample, WritesSpentError
from aio_ops.tune.checks import TuneError, check, half_bytes_of, open_bench
from aio_ops.tune.halving import Outcome, Search, Standing
from aio_ops.tune.lock import Presence
from aio_ops.tune.results import (
    DirectoryResult,
    Exhausted,
    Latency,
    Rate,
    Result,
    Sustained,
)
from aio_ops.tune.settings import Setting, Workload, grid
from aio_ops.tune.statistics import interval, medians
from aio_ops.tune.together import Drive, measure_together

_SHARES = {Workload.MIX: 0.55, Workload.READ: 0.2, Workload.WRITE: 0.2}
WORTH = 1.02
"""A gain below this is not worth a setting that is not the default."""

_WRITE_SHARES = {Workload.MIX: 0.6, Workload.READ: 0.6, Workload.WRITE: 0.8}
"""Of what may still be written; the rest is for what follows."""

_TOGETHER_SHARE = 0.12
_GPU_SHARE = 0.25
_LATENCY_S = 0.15
_ROUNDS_WRITTEN = 6  # of the whole grid; a search takes about as much
_LEAST_FINAL_ROUNDS = 5


@dataclass(frozen=True)
class Request:
    """What to tune and how much it may cost."""

    directories: tuple[Path, ...]
    seconds: float = 60.0
    most_write_bytes: int = 100 * 10**9
    half_bytes: int = 400 << 20
    workloads: tuple[Workload, ...] = tuple(Workload)
    gpu: bool = False
    sustain_s: float = 0.0
    exhaustive: bool = False
    rounds: int = _LEAST_FINAL_ROUNDS
    """Rounds of an exhaustive sweep at least."""


Watch = Callable[[Path, str, Standing[Setting] | None], None]
"""Is told the directory, the phase, and where its search stands."""


def tune(request: Request, watch: Watch) -> Result:
    """Measure every directory alone, then all together; nothing is left behind however it ends."""
    begin = time.perf_counter()
    allowance = Allowance(request.most_write_bytes)
    several = len(request.directories) > 1
    with ExitStack() as closing:
        tuners = [
            closing.enter_context(_DirectoryTuner(directory, request, allowance, watch))
            for directory in request.directories
        ]
        deadline = begin + request.seconds * (1 - _TOGETHER_SHARE * several)
        for index, tuner in enumerate(tuners):
            now = time.perf_counter()
            left = len(tuners) - index
            tuner.tune(now + max(0.0, deadline - now) / left, 1 / (left + several))
        together = None
        allowance.stop_at(1.0)
        if several:
            drives = [tuner.as_drive() for tuner in tuners]
            together = measure_together(drives, begin + request.seconds)
        for tuner in tuners:
            tuner.go_on()
        return Result(
            [tuner.result for tuner in tuners],
            together,
            allowance.written_bytes,
            time.perf_counter() - begin,
        )


class _DirectoryTuner:
    """Tunes one directory, and stays open until all are tuned."""

    def __init__(
        self, directory: Path, request: Request, allowance: Allowance, watch: Watch
    ) -> None:
        self._request = request
        self._allowance = allowance
        self._watch = functools.partial(watch, directory)
        self._grid: list[Setting] = []
        disk = check(directory)
        half_bytes = half_bytes_of(request.half_bytes, disk)
        with ExitStack() as closing:
            self._presence = closing.enter_context(Presence(directory))
            self._bench = closing.enter_context(open_bench(directory, half_bytes, allowance))
            found = probe.report(directory)
            self._closing = closing.pop_all()
        self.result = DirectoryResult(disk, self._bench.direct, dict(found.refusals))
        working = [kind for kind in probe.NATIVE_KINDS if kind not in found.refusals]
        self._engines = working or ["python"]
        self._note_what_is_there()

    def tune(self, deadline: float, share: float) -> None:
        """Search every workload until the deadline, with a share of what may still be written."""
        allowance = self._allowance
        stop_bytes = allowance.stop_at(share)
        self._watch("writing what is read later", None)
        try:
            self._bench.fill(self._engines[0])
        except WritesSpentError:
            raise TuneError(
                f"--max-write allows {self._allowance.most_bytes} bytes, and the scratch file "
                f"that is read takes {self._bench.half_bytes}; raise it, or lower --io_size"
            ) from None
        self._registers = self._try_to_register()
        left = sum(_SHARES[workload] for workload in self._request.workloads)
        deadline -= 8 * self._latency_s()
        left += _GPU_SHARE if self._request.gpu else 0
        for workload in self._request.workloads:
            now = time.perf_counter()
            seconds = max(0.0, deadline - now) * _SHARES[workload] / left
            allowance.stop_at(_WRITE_SHARES[workload], stop_bytes)
            self._search(workload, now + seconds)
            left -= _SHARES[workload]
        allowance.stop_at(1.0, stop_bytes)
        if self._request.gpu:
            try:
                self._search_gpu(deadline)
            except OSError as error:  # the host's numbers stay
                text = f"the path to the GPU could not be measured: {error.strerror or error}"
                self.result.notices.append(text)
        self._measure_latencies()

    def go_on(self) -> None:
        """Do what has a budget of its own: the whole grid, and the long write."""
        self._note_presence()
        if self._request.exhaustive:
            self._exhaust()
        chosen = self.result.chosen
        if self._request.sustain_s and chosen is not None:
            self._watch("a long write", None)
            pieces = self._bench.sustain(chosen, self._request.sustain_s, self._watch_long)
            self.result.sustained = Sustained(tuple(pieces), self._request.sustain_s)
        self._note_presence()

    def as_drive(self) -> Drive:
        """Return what is measured together with others."""
        workload = self._request.workloads[0]
        return Drive(
            self.result,
            lambda setting, seconds: self._bench.measure(setting, workload, seconds),
        )

    def close(self) -> None:
        """Give everything back."""
        self._closing.close()

    def __enter__(self) -> "_DirectoryTuner":
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _note_what_is_there(self) -> None:
        notices = self.result.notices
        warning = self.result.disk.warning()
        if warning is not None:
            notices.append(warning)
        if not self._bench.direct:
            notices.append(
                f"{self.result.disk.path} takes no direct I/O: what is measured is the page cache "
                "as well; use a directory on ext4 or xfs"
            )
        if self._bench.half_bytes < self._request.half_bytes >> 22 << 22:
            notices.append(
                f"little space is free: the scratch file has {2 * self._bench.half_bytes >> 20} "
                "MiB, and the drive's own cache may hold all of it"
            )
        self._note_presence()

    def _note_presence(self) -> None:
        text = (
            f"another tuner is measuring in {self.result.disk.path} at the same time: the numbers "
            "of both are too low; run one after the other"
        )
        if self._presence.look() and text not in self.result.notices:
            self.result.notices.append(text)

    def _try_to_register(self) -> bool:
        if "io_uring" not in self._engines:
            return False
        plain = Setting("io_uring", 1 << 20, 8, registered=True)
        try:
            self._bench.measure(plain, Workload.READ, 0.0)
        except OSError as error:
            self.result.notices.append(f"registered buffers were not tried: {error}")
            return False
        return True

    def _search(self, workload: Workload, deadline: float) -> None:
        seconds = max(0.0, deadline - time.perf_counter())
        most = min(halving.most_settings(seconds), _most_written(self._bench, workload))
        settings = grid(
            self._engines,
            workload,
            pool_bytes=self._bench.pool.size_bytes,
            registers=self._registers,
            most=most,
        )
        settings = [
            setting for setting in settings if opens(self._bench, setting, self.result.notices)
        ]
        chosen = self.result.chosen or default_setting(
            self._engines[0], self._bench.pool.size_bytes
        )
        if chosen not in settings:
            settings.append(chosen)
        search: Search[Setting] = Search(
            lambda setting, piece_s: self._bench.measure(setting, workload, piece_s),
            lambda standing: self._saw(workload, standing),
            deadline,
            piece_s=min(
                halving.piece_seconds(seconds, len(settings)),
                _piece_written_s(self._bench, workload, len(settings)),
            ),
        )
        outcome = search.halve(settings, self._finalists)
        self._bench.forget_engines()
        if not outcome.finalists:
            self._without(workload)
            return
        self.result.outcomes[workload] = outcome
        if self.result.chosen is None:
            self._grid = settings
            self.result.chosen, self.result.best = choose(
                outcome, default_setting(self._engines[0], self._bench.pool.size_bytes)
            )

    def _without(self, workload: Workload) -> None:
        text = (
            f"--max-write allows {self._allowance.most_bytes} bytes, and they were spent before "
            f"every setting had been measured for {workload.value}"
        )
        if self.result.chosen is None:
            raise TuneError(f"{text}; raise it, or leave writes out with --no_write")
        self.result.notices.append(f"{text}: there are no numbers for it")

    def _finalists(self, alive: list[Setting]) -> list[Setting]:
        chosen = self.result.chosen
        wanted = (
            [default_setting(self._engines[0], self._bench.pool.size_bytes), alive[0].configured]
            if chosen is None
            else [chosen]
        )
        return list(dict.fromkeys([*alive, *wanted]))

    def _saw(self, workload: Workload, standing: Standing[Setting]) -> None:
        self._note_presence()
        self._watch(workload.value, standing)

    def _watch_long(self, seconds: float, rate: float) -> None:
        self._watch(f"a long write, {seconds:.0f} s: {rate / 1e9:.2f} GB/s", None)

    def _search_gpu(self, deadline: float) -> None:
        chosen = self.result.chosen
        if chosen is None:
            return
        bench = gpu.GpuBench(self._bench, chosen)
        try:
            for index, workload in enumerate(self._request.workloads):
                now = time.perf_counter()
                left = len(self._request.workloads) - index
                self._watch(f"{workload.value}, GPU", None)
                search: Search[gpu.Slots] = Search(
                    functools.partial(_measure_slots, bench, workload),
                    _look_away,
                    now + max(0.0, deadline - now) / left,
                    piece_s=halving.MOST_PIECE_S,
                )
                outcome = search.halve(gpu.CHOICES, lambda alive: alive)
                if outcome.finalists:
                    self.result.gpu[workload] = outcome
        finally:
            bench.close()

    def _measure_latencies(self) -> None:
        chosen = self.result.chosen
        if chosen is None:
            return
        depths = sorted({1, 4, 16, chosen.depth})
        settings = [Setting(chosen.engine, chosen.block_bytes, depth) for depth in depths]
        most = self._bench.pool.size_bytes
        seconds = self._latency_s()
        for workload in (Workload.READ, Workload.WRITE):
            for setting in settings:
                if workload not in self._request.workloads:
                    continue
                if setting.block_bytes * setting.depth > most:
                    continue
                self._watch(f"latency, {workload.value}", None)
                try:
                    sample = self._bench.latency(setting, workload, seconds)
                except WritesSpentError:
                    continue
                self.result.latencies.append(Latency.of(workload, setting, sample))

    def _latency_s(self) -> float:
        return min(_LATENCY_S, self._request.seconds / 100)

    def _exhaust(self) -> None:
        best, workload = self.result.best, self._request.workloads[0]
        if best is None:
            return
        everything = list(dict.fromkeys([best, *self._grid]))
        search: Search[Setting] = Search(
            lambda setting, piece_s: self._bench.measure(setting, workload, piece_s),
            lambda standing: self._watch(f"{workload.value}, the whole grid", standing),
            math.inf,
            piece_s=halving.MOST_PIECE_S,
        )
        search.begin_stage(everything)
        for _ in range(self._request.rounds):
            search.round(everything, 0)
        self._bench.forget_engines()
        self.result.exhausted = compare(best, search)


def _most_written(bench: Bench, workload: Workload) -> int:
    """Return how many settings may be measured by what may be written, with less in flight."""
    if not workload.writes:
        return 1 << 30
    rounds_bytes = _ROUNDS_WRITTEN * workload.written_share
    left_bytes = bench.allowance.left_bytes
    while left_bytes < 5 * rounds_bytes * bench.pool.size_bytes:
        if not bench.shrink_pool():
            break
    return int(left_bytes / rounds_bytes / bench.pool.size_bytes)


def _piece_written_s(bench: Bench, workload: Workload, count: int) -> float:
    """Return how long a measurement may last by what may be written."""
    if not workload.writes:
        return math.inf
    each_bytes = bench.allowance.left_bytes / _ROUNDS_WRITTEN / count
    return each_bytes / workload.written_share / max(bench.fill_rate, 1.0)


def opens(bench: Bench, setting: Setting, notices: list[str]) -> bool:
    """Return whether the engine of a setting can be opened; why not goes to the notices."""
    refusal = bench.refusal(setting)
    if refusal is not None:
        text = f"{setting.engine} was not tried {setting.queue_depth} deep: {refusal}"
        if text not in notices:
            notices.append(text)
    return refusal is None


def default_setting(engine: str, pool_bytes: int) -> Setting:
    """Return what the configuration's defaults make of an engine, as far as the pool allows."""
    default = Setting(engine, 1 << 20, min(32, pool_bytes >> 20))
    return replace(default, depth=4) if default.on_threads else default


def choose(outcome: Outcome[Setting], default: Setting | None = None) -> tuple[Setting, Setting]:
    """Return the best setting that a configuration can ask for, and the best of all.

    They are the same unless the best of all is better by more than `WORTH`, and both are the
    default unless it is worse by more than that: on a plateau the choice must not be a matter of
    luck.
    """
    rates = medians({key: outcome.samples.relative[key] for key in outcome.finalists})
    best = outcome.best
    configured = [key for key in outcome.finalists if key == key.configured]
    if not configured:  # --max-write ended it first
        return best.configured, best
    chosen = configured[0]
    if default in configured and rates[default] * WORTH >= rates[chosen]:
        chosen = default
    return chosen, best if rates[best] > WORTH * rates[chosen] else chosen


def compare(best: Setting, search: Search[Setting]) -> Exhausted:
    """Return which settings of a whole grid beat the choice beyond both intervals."""
    relative = {key: values for key, values in search.samples.relative.items() if values}
    if best not in relative:
        return Exhausted(0, 0, Rate(0.0, 0.0, 0.0, 0), ())
    middles, high = medians(relative), interval(relative[best])[1]
    beaten_by = [
        (key, middles[key], middles[best])
        for key, values in relative.items()
        if interval(values)[0] > high
    ]
    return Exhausted(
        len(relative),
        len(relative[best]),
        Rate.of(search.samples.rates(best)),
        tuple(sorted(beaten_by, key=lambda row: -row[1])),
    )


def _measure_slots(
    bench: gpu.GpuBench, workload: Workload, slots: gpu.Slots, seconds: float
) -> Sample:
    return bench.measure(slots, workload, seconds)


def _look_away(standing: Standing[gpu.Slots]) -> None:
    """Show nothing: this search is short."""
