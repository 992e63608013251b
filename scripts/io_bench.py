"""Measure our engines beside fio and DeepSpeed's aio_handle on one file: table, JSON and chart.

    python scripts/io_bench.py /path/on/the/disk --json bench.json --chart bench.png
    python scripts/io_bench.py /path/on/the/disk --peer-python /venv/of/deepspeed/bin/python

With the flags of ds_io (--folder DIR --io_size 1G --read ...) it does what that does instead, and
adds latency percentiles: see `io_bench.py --folder DIR --help`.

The contenders take turns on the same file, so that a disk that changes its mind changes it for
all of them. Rates come from the block device's own counters for every contender, from the time
when 2 % of the bytes have moved to the time when 98 % have: other traffic on the disk counts too.

Workloads: read, write; mixed, both at once; alternating, bursts of 64 MiB of each; records-read
and records-write, 64 KiB each, beside the same engine's 4 MiB transfers ("/large") and the peer's
way, which is a file for each.

fio has no way to ask for huge pages but the system's own setting, so with hugepages it only runs
where transparent huge pages are "always"; elsewhere compare with it without hugepages.
"""

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import io_bench_ds
from io_bench_report import Run, draw, print_table, summarise
from io_bench_tools import (
    RECORDS,
    Case,
    Peer,
    Target,
    clean,
    contenders,
    prepare,
    run,
    transparent_hugepages,
)
from places import folder_option, picture_option

from aio_ops import probe
from estimators.command import output_option

WORKLOADS = ("read", "write", "mixed", "alternating", *RECORDS)
ENGINES = ("io_uring", "io_uring+registered", "kernel_aio", "threads", "python")
RECORD_BYTES = 64 << 10
SECTOR_BYTES = 512
SAMPLE_INTERVAL_S = 0.004


class DiskMeter:
    """Samples the counters of the block device under a directory."""

    def __init__(self, directory: Path) -> None:
        device = directory.stat().st_dev
        self._path = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
        if not self._path.exists():
            raise SystemExit(f"{directory} is on no block device that keeps counters")
        self._samples: list[tuple[float, int]] = []
        self._over = threading.Event()

    def _moved_bytes(self) -> int:
        fields = self._path.read_text(encoding="ascii").split()
        return (int(fields[2]) + int(fields[6])) * SECTOR_BYTES

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_INTERVAL_S):
            self._samples.append((time.perf_counter(), self._moved_bytes()))

    def __enter__(self) -> "DiskMeter":
        self._samples = [(time.perf_counter(), self._moved_bytes())]
        self._over.clear()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        self._thread.join()
        self._samples.append((time.perf_counter(), self._moved_bytes()))

    def rate(self, wanted_bytes: int) -> float:
        """Return the bytes a second between 2 % and 98 % of what has moved."""
        first, last = self._samples[0][1], self._samples[-1][1]
        if last - first < 0.95 * wanted_bytes:
            raise SystemExit(f"the disk moved {last - first} of {wanted_bytes} bytes: cached?")
        low, high = first + 0.02 * (last - first), first + 0.98 * (last - first)
        start = next(sample for sample in self._samples if sample[1] >= low)
        stop = next(sample for sample in self._samples if sample[1] >= high)
        return (stop[1] - start[1]) / max(stop[0] - start[0], SAMPLE_INTERVAL_S)


def cases(options: argparse.Namespace) -> list[Case]:
    """Return what the command line asks for."""
    pages = {"yes": [True], "no": [False], "both": [True, False]}[options.hugepages]
    return [
        Case(workload, size_bytes, hugepages)
        for workload in options.workloads
        for size_bytes in (
            [RECORD_BYTES]
            if workload in RECORDS
            else [mebibytes << 20 for mebibytes in options.transfer_mebibytes]
        )
        for hugepages in pages
    ]


def measure(
    target: Target, options: argparse.Namespace, engines: list[str], peer: Peer | None
) -> Iterator[Run]:
    """Run every case as often as asked for, the contenders in turn and each round from another."""
    meter = DiskMeter(target.file.parent)
    turns = [
        (case, number, name)
        for case in cases(options)
        for number in range(options.rounds)
        for name in rotated(contenders(case, engines, peer), number)
    ]
    for case, number, name in track(turns, "measuring"):
        with meter:
            cpu_s = run(name, target, case, peer)
        rate = meter.rate(target.moved_bytes)
        yield Run(case, name, number, rate, cpu_s / target.moved_bytes * 1e9)


def rotated(names: list[str], number: int) -> list[str]:
    """Return the names, starting with another one each time."""
    first = number % len(names)
    return names[first:] + names[:first]


def parse() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=folder_option)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--mebibytes", type=int, default=640, help="moved by one run")
    parser.add_argument("--transfer-mebibytes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument(
        "--engines",
        nargs="+",
        default=list(ENGINES),
        help="kinds, with +registered, +sqpoll, +iopoll, or +4m for blocks of 4 MiB",
    )
    parser.add_argument("--hugepages", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--peer-python", help="an interpreter that has DeepSpeed")
    parser.add_argument("--peer-module", default="deepspeed", help="or a module with aio_handle")
    parser.add_argument(
        "--peer-settings",
        nargs="+",
        default=["1:32:1", "1:32:4", "8:32:4"],
        help="MiB of a block:queue depth:threads",
    )
    parser.add_argument("--json", type=output_option)
    parser.add_argument("--chart", type=picture_option)
    return parser.parse_args()


def peer_of(options: argparse.Namespace) -> Peer | None:
    """Return the peer that the command line names."""
    if options.peer_python is None:
        return None
    settings = []
    for text in options.peer_settings:
        mebibytes, depth, threads = (int(part) for part in text.split(":"))
        settings.append((mebibytes << 20, depth, threads))
    return Peer(options.peer_python, options.peer_module, settings)


def main() -> None:
    """Measure, print, and write what was asked for."""
    if any(argument.startswith("--folder") for argument in sys.argv[1:]):
        sys.exit(io_bench_ds.main())
    options = parse()
    console = Console()
    if not console.is_terminal:
        console.width = 150
    found = probe.report(options.directory)
    console.print("\n".join(found.lines()), highlight=False)
    engines = [name for name in options.engines if name.partition("+")[0] not in found.refusals]
    peer = peer_of(options)
    name = f"tierzero-io-bench-{os.getpid()}"
    target = Target(
        options.directory / name, options.directory / f"{name}.d", options.mebibytes << 20
    )
    small_files = peer is not None and not RECORDS.keys().isdisjoint(options.workloads)
    try:
        prepare(target, RECORD_BYTES if small_files else None)
        runs = list(measure(target, options, engines, peer))
    finally:
        clean(target)
        if peer is not None:
            peer.close()
    rows = summarise(runs, lambda name: peer is not None and name in peer.names())
    print_table(rows, console)
    if options.json:
        machine = {
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "transparent_hugepages": transparent_hugepages(),
            "probe": found.lines(),
        }
        text = json.dumps({"machine": machine, "rows": rows, "runs": [asdict(run) for run in runs]})
        options.json.write_text(text + "\n", encoding="utf-8")
    if options.chart:
        draw(rows, options.chart, console)


if __name__ == "__main__":
    main()
