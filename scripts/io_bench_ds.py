"""The field's way to measure a disk: the flags of ds_io, its lines of output, and percentiles.

    python scripts/io_bench.py --folder /nvme0 --io_size 1G --read --block_size 1M --queue_depth 32
    python scripts/io_bench.py --folder_to_device_mapping /nvme0:0 /nvme1:1 --io_size 1G

Every process writes or reads a file of its own without a name, so nothing is left behind. GB are
2^30 bytes, as the field counts, and a speed is all bytes over the slowest process. Latencies are
those of single blocks, from their start until they can be used in their order. --engine takes one
of ours as well; aio_handle is the best that works here.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import charts

from aio_ops import Engine, HostArena, SwapFile, Ticket, open_engine
from aio_ops.device import DeviceMover
from aio_ops.memory import DeviceSpan
from aio_ops.tune import TuneError
from aio_ops.tune.bench import Mover
from aio_ops.tune.checks import check
from aio_ops.tune.command import report_path, size
from aio_ops.tune.gpu import DeviceMemory, refusal
from aio_ops.tune.statistics import percentile
from estimators.command import output_option

PERCENTILES = (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
GIB = 1 << 30
_ENGINES = ("io_uring", "kernel_aio", "threads", "python")
_OF_TORCH = ("aio_basic", "torch_io", "torch_fastio")
_NOISE_BYTES = 1 << 20


@dataclass(frozen=True)
class Task:
    """What each process does."""

    folder: Path
    device: int
    io_bytes: int
    block_bytes: int
    queue_depth: int
    thread_count: int
    engine: str
    reads: bool
    single: bool
    sequential: bool
    validates: bool
    loops: int
    on_gpu: bool


@dataclass(frozen=True)
class Loop:
    """What one process took for one loop, in seconds."""

    task_s: float
    e2e_s: float
    latencies_s: tuple[float, ...]


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="io_bench.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", type=Path, metavar="DIR")
    where.add_argument("--folder_to_device_mapping", nargs="+", metavar="DIR:DEV")
    add("--io_size", type=size, required=True, help="bytes a process and loop, such as 400M")
    add("--fast_io_size", type=size, default=64 << 20, help="without effect")
    add("--read", action="store_true", help="read (default: write)")
    add("--multi_process", type=int, default=1, metavar="N", help="default 1")
    add("--block_size", type=size, default=1 << 20, help="default 1M")
    add("--queue_depth", type=int, default=32, help="default 32")
    add("--io_parallel", type=int, default=1, metavar="N", help="threads (default 1)")
    add("--single_submit", action="store_true", help="hand blocks over one by one")
    add("--sequential_requests", action="store_true", help="wait for all before the next are begun")
    add("--validate", action="store_true", help="compare what was moved")
    add("--engine", default="aio_handle", choices=("aio_handle", *_ENGINES, *_OF_TORCH))
    add("--loops", type=int, default=3, help="default 3")
    add("--warmup_loops", type=int, default=1, help="default 1")
    add("--include_warmup_time", action="store_true", help="count them too")
    add("--gpu", action="store_true", help="to or from the memory of a GPU")
    for name in ("use_gds", "slow_bounce_buffer", "use_accelerator_pin_memory",
                 "torch_legacy_save", "different_file_each_iteration"):  # fmt: skip
        add(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    add("--json", type=output_option, metavar="FILE")
    add("--report", type=report_path, metavar="FILE.png|.html", help="latency percentiles")
    return parser.parse_args(arguments)


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Return one task a process."""
    if options.engine in _OF_TORCH:
        raise SystemExit(f"--engine {options.engine} measures torch's own files; use aio_handle")
    if options.use_gds:
        raise SystemExit("--use_gds: bytes for a GPU go through pinned slots; use --gpu alone")
    if options.block_size % 4096 or options.io_size % options.block_size:
        raise SystemExit(
            f"--io_size {options.io_size} must be whole blocks of --block_size "
            f"{options.block_size}, and these a multiple of 4096"
        )
    if min(options.loops, options.multi_process, options.queue_depth, options.io_parallel) < 1:
        raise SystemExit("--loops, --multi_process, --queue_depth and --io_parallel are from 1 on")
    if options.gpu and (reason := refusal()) is not None:
        raise SystemExit(f"--gpu: there is no GPU that can be used: {reason}; leave --gpu out")
    mapping = options.folder_to_device_mapping
    places = (
        [(options.folder, number) for number in range(options.multi_process)]
        if mapping is None
        else [_place(text) for text in mapping]
    )
    return [
        Task(
            folder, device, options.io_size, options.block_size, options.queue_depth,
            options.io_parallel, options.engine, options.read, options.single_submit,
            options.sequential_requests, options.validate,
            options.warmup_loops + options.loops, options.gpu,
        )
        for folder, device in places
    ]  # fmt: skip


def _place(text: str) -> tuple[Path, int]:
    folder, _, device = text.rpartition(":")
    if not folder or not device.isdigit():
        raise SystemExit(f"--folder_to_device_mapping {text}: write DIR:DEV, such as /nvme0:0")
    return Path(folder), int(device)


def _best_engine(task: Task) -> Engine:
    return open_engine(
        "auto" if task.engine == "aio_handle" else task.engine,
        directory=task.folder,
        thread_count=task.thread_count,
        block_bytes=task.block_bytes,
        queue_depth=task.queue_depth,
    )


class Worker:
    """One process's file and memory."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._closing = contextlib.ExitStack()
        with self._closing:
            self._file = self._closing.enter_context(SwapFile.create(task.folder, task.io_bytes))
            count = min(task.queue_depth, task.io_bytes // task.block_bytes)
            size_bytes = count * task.block_bytes
            memory = self._closing.enter_context(HostArena(2 * size_bytes)).carve(2 * size_bytes)
            noise = os.urandom(_NOISE_BYTES)
            view = memory.view()
            for start in range(0, size_bytes, _NOISE_BYTES):
                piece = noise[: min(_NOISE_BYTES, size_bytes - start)]
                view[start : start + len(piece)] = piece
            at = range(0, size_bytes, task.block_bytes)
            self._spans = [memory.sub(start, task.block_bytes) for start in at]
            self._others = [memory.sub(size_bytes + start, task.block_bytes) for start in at]
            self._device: DeviceMemory | None = None
            if task.on_gpu:
                self._device = DeviceMemory(task.device, size_bytes)
                self._closing.callback(self._device.close)
            if task.reads:
                with _best_engine(task) as engine:
                    self._move(engine, self._spans, writes=True)
            self._closing = self._closing.pop_all()

    def loop(self) -> Loop:
        """Move the file once."""
        task = self._task
        begin = time.perf_counter()
        with contextlib.ExitStack() as closing:
            engine = closing.enter_context(_best_engine(task))
            mover, spans = self._mover(engine, closing)
            start = time.perf_counter()
            latencies = self._move(mover, spans, writes=not task.reads)
            task_s = time.perf_counter() - start
        e2e_s = time.perf_counter() - begin
        if task.validates:
            self._compare()
        return Loop(task_s, e2e_s, tuple(latencies))

    def close(self) -> None:
        """Give file and memory back."""
        self._closing.close()

    def _mover(self, engine: Engine, closing: contextlib.ExitStack) -> tuple[Any, list[Any]]:
        if self._device is None:
            return engine, self._others if self._task.reads else self._spans
        mover = closing.enter_context(
            DeviceMover(engine, self._task.device, slot_bytes=self._task.block_bytes, slot_count=8)  # type: ignore[arg-type]
        )
        size_bytes, device, first = self._task.block_bytes, self._task.device, self._device.address
        return mover, [
            DeviceSpan(device, first + number * size_bytes, size_bytes, self)
            for number in range(len(self._spans))
        ]

    def _move(self, mover: Mover[Any], spans: Sequence[Any], *, writes: bool) -> list[float]:
        """Move every block, `queue_depth` at once, and return how long each took."""
        latencies: list[float] = []
        under_way: deque[tuple[Ticket, float]] = deque()
        count = self._task.io_bytes // self._task.block_bytes
        for number in range(count):
            if len(under_way) == len(spans):
                for _ in range(len(under_way) if self._task.sequential else 1):
                    self._await(under_way, latencies)
            verb = mover.submit_write if writes else mover.submit_read
            begin = time.perf_counter()
            ticket = verb(self._file, number * self._task.block_bytes, spans[number % len(spans)])
            under_way.append((ticket, begin))
            if self._task.single:
                ticket.done()  # looks for what is complete between any two
        while under_way:
            self._await(under_way, latencies)
        return latencies

    @staticmethod
    def _await(under_way: deque[tuple[Ticket, float]], latencies: list[float]) -> None:
        ticket, begin = under_way.popleft()
        ticket.wait()
        latencies.append(time.perf_counter() - begin)

    def _compare(self) -> None:
        """Read the file again and compare it with what was written there."""
        if self._device is not None and not self._task.reads:
            return  # what the device wrote is its own constant
        with _best_engine(self._task) as engine:
            for number in range(self._task.io_bytes // self._task.block_bytes):
                wanted = self._spans[number % len(self._spans)]
                found = self._others[0]
                engine.submit_read(self._file, number * self._task.block_bytes, found).wait()
                if found.view() != wanted.view():
                    raise OSError(f"block {number} of {self._file.path} is not what was written")


def work(task: Task, barrier: Barrier | None) -> list[Loop]:
    """Do all loops of one process, each together with the others'."""
    worker = Worker(task)
    try:
        found = []
        for _ in range(task.loops):
            if barrier is not None:
                barrier.wait()
            found.append(worker.loop())
        return found
    finally:
        worker.close()


_barrier: Barrier | None = None


def _share(barrier: Barrier) -> None:
    globals()["_barrier"] = barrier


def _work_with_others(task: Task) -> list[Loop]:
    return work(task, _barrier)


def measure(tasks: Sequence[Task]) -> list[list[Loop]]:
    """Return the loops of each process."""
    if len(tasks) == 1:
        return [work(tasks[0], None)]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(tasks), timeout=600)
    with context.Pool(len(tasks), _share, (barrier,)) as pool:
        return pool.map(_work_with_others, tasks, chunksize=1)


def summarise(tasks: Sequence[Task], found: Sequence[Sequence[Loop]], skip: int) -> dict[str, Any]:
    """Return what the field prints, and percentiles of single blocks."""
    counted = [loops[skip:] for loops in found]
    total = sum(task.io_bytes * len(loops) for task, loops in zip(tasks, counted, strict=True))
    task_s = max(sum(loop.task_s for loop in loops) for loops in counted)
    e2e_s = max(sum(loop.e2e_s for loop in loops) for loops in counted)
    latencies = [each for loops in counted for loop in loops for each in loop.latencies_s]
    return {
        "verb": "Read" if tasks[0].reads else "Write",
        "task_latency_s": task_s,
        "task_gib_s": total / task_s / GIB,
        "e2e_latency_s": e2e_s,
        "e2e_gib_s": total / e2e_s / GIB,
        "blocks": len(latencies),
        "latency_s": {
            f"p{share * 100:g}": percentile(latencies, share) for share in PERCENTILES
        },
        "loops": [
            [{"task_s": loop.task_s, "e2e_s": loop.e2e_s} for loop in loops] for loops in counted
        ],
        "tasks": [{**asdict(task), "folder": str(task.folder)} for task in tasks],
    }  # fmt: skip


def lines_of(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the field's lines, then the percentiles."""
    verb = summary["verb"]
    yield f"Task {verb} Latency = {summary['task_latency_s']} sec"
    yield f"Task {verb} Speed = {summary['task_gib_s']} GB/sec"
    yield f"E2E {verb} Latency = {summary['e2e_latency_s']} sec"
    yield f"E2E {verb} Speed = {summary['e2e_gib_s']} GB/sec"
    times = ", ".join(
        f"{name} {seconds * 1e3:.2f} ms" for name, seconds in summary["latency_s"].items()
    )
    yield f"Block {verb} Latency: {times} ({summary['blocks']} blocks)"


def panels_of(found: Sequence[Sequence[Loop]], skip: int, tasks: Sequence[Task]) -> list[Any]:
    """Return the charts: percentiles of latency, and the speed of each loop."""

    def latency(axes: Any) -> None:
        series = {
            f"process {number}": {
                share: [percentile(loop.latencies_s, share) * 1e3 for loop in loops[skip:]]
                for share in PERCENTILES
            }
            for number, loops in enumerate(found)
        }
        charts.curves(axes, series, lambda share: f"p{share * 100:g}")
        axes.set_title(f"latency of blocks of {tasks[0].block_bytes >> 10} KiB")
        axes.set_xlabel("percentile; spans are of the loops")
        axes.set_ylabel("latency (ms)")

    def speed(axes: Any) -> None:
        series = {
            f"process {number}": {
                place: [task.io_bytes / loop.task_s / GIB]
                for place, loop in enumerate(loops[skip:], start=1)
            }
            for number, (task, loops) in enumerate(zip(tasks, found, strict=True))
        }
        charts.curves(axes, series, str)
        axes.set_title("speed of each loop")
        axes.set_xlabel("loop")
        axes.set_ylabel("speed (GiB/s)")

    return [latency, speed]


def _median_task_s(loops: Sequence[Loop]) -> float:
    return statistics.median(loop.task_s for loop in loops)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = options_of(arguments)
    charts.require(options.report)
    tasks = tasks_of(options)
    try:
        for task in tasks:
            disk = check(task.folder)
            needed_bytes = task.io_bytes * len(tasks)
            if disk.free_bytes < needed_bytes:
                raise TuneError(
                    f"{task.folder} has {disk.free_bytes} bytes free, and {needed_bytes} are "
                    "needed; lower --io_size"
                )
            if (warning := disk.warning()) is not None:
                print(f"note: {warning}", flush=True)
        print(f"{len(tasks)} x {tasks[0].io_bytes >> 20} MiB, {tasks[0].loops} loops", flush=True)
        found = measure(tasks)
    except (TuneError, OSError) as error:
        sys.stderr.write(f"io_bench: {error}; nothing was left behind\n")
        return 1
    skip = 0 if options.include_warmup_time else options.warmup_loops
    summary = summarise(tasks, found, skip)
    lines = list(lines_of(summary))
    print("\n".join(lines))
    if options.json is not None:
        options.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if options.report is not None:
        head = ["process", "loops", "median task latency (s)"]
        rows = [
            [str(number), str(len(loops[skip:])), f"{_median_task_s(loops[skip:]):.3g}"]
            for number, loops in enumerate(found)
        ]
        charts.write(
            options.report, "io_bench", lines, panels_of(found, skip, tasks), [head, *rows]
        )
        print(f"report: {options.report}")
    return 0
