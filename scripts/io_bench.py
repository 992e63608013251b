"""Measure every engine, and fio where it is installed, on one file: table, JSON and chart.

    python scripts/io_bench.py /path/on/the/disk --json bench.json --chart bench.png

The contenders take turns on the same file, so that a disk that changes its mind changes it for
all of them. Rates come from the block device's own counters for every contender, from the time
when 2 % of the bytes have moved to the time when 98 % have: other traffic on the disk counts too.

fio has no way to ask for huge pages but the system's own setting, so with hugepages it only runs
where transparent huge pages are "always"; elsewhere compare with it without hugepages.
"""

import argparse
import importlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aio_ops import probe

WORKLOADS = ("read", "write", "mixed", "alternating")
ENGINES = ("io_uring", "io_uring+registered", "kernel_aio", "threads", "python")
FIO = ("fio-io_uring", "fio-libaio")
IN_FLIGHT_BYTES = 32 << 20
SECTOR_BYTES = 512
SAMPLE_INTERVAL_S = 0.004
BOOTSTRAP_ROUNDS = 2000
FIO_WORKLOADS = {"read": "read", "write": "write", "mixed": "rw"}


@dataclass(frozen=True)
class Case:
    """What is measured."""

    workload: str
    transfer_bytes: int
    hugepages: bool


@dataclass(frozen=True)
class Run:
    """One measurement."""

    case: Case
    contender: str
    number: int
    bytes_per_s: float
    cpu_s_per_gb: float


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


def run_engine(contender: str, path: Path, case: Case, moved_bytes: int) -> float:
    """Run one engine in a process of its own and return its CPU seconds."""
    in_flight = max(2, IN_FLIGHT_BYTES // case.transfer_bytes)
    command = [
        sys.executable,
        str(Path(__file__).with_name("io_bench_run.py")),
        *(contender, str(path), case.workload, str(moved_bytes)),
        *(str(case.transfer_bytes), str(in_flight)),
        *(["--hugepages"] if case.hugepages else []),
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output)["cpu_s"])


def run_fio(contender: str, path: Path, case: Case, moved_bytes: int) -> float:
    """Run fio and return the CPU seconds of its job."""
    command = [
        *("fio", "--name=bench", "--direct=1", "--output-format=json", "--randrepeat=1"),
        f"--ioengine={contender.removeprefix('fio-')}",
        f"--filename={path}",
        f"--rw={FIO_WORKLOADS[case.workload]}",
        f"--bs={case.transfer_bytes}",
        f"--iodepth={max(2, IN_FLIGHT_BYTES // case.transfer_bytes)}",
        f"--size={moved_bytes}",
        "--scramble_buffers=0",
        f"--mem={'mmap' if case.hugepages else 'malloc'}",
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    job = json.loads(output)["jobs"][0]
    return float((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000)


def transparent_hugepages() -> str:
    """Return what the kernel says about transparent huge pages."""
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return pages.read_text(encoding="ascii").strip() if pages.exists() else ""


def contenders(case: Case, refusals: set[str]) -> list[str]:
    """Return who can run a case here."""
    engines = [name for name in ENGINES if name.partition("+")[0] not in refusals]
    has_fio = shutil.which("fio") is not None and case.workload in FIO_WORKLOADS
    has_fio = has_fio and (not case.hugepages or "[always]" in transparent_hugepages())
    return engines + (list(FIO) if has_fio else [])


def measure(path: Path, options: argparse.Namespace, refusals: set[str]) -> Iterator[Run]:
    """Run every case as often as asked for, the contenders in turn and each round from another."""
    meter = DiskMeter(path.parent)
    moved_bytes = options.mebibytes << 20
    cases = [
        Case(workload, mebibytes << 20, hugepages)
        for workload in options.workloads
        for mebibytes in options.transfer_mebibytes
        for hugepages in options.hugepages
    ]
    for case in cases:
        names = contenders(case, refusals)
        for number in range(options.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                run = run_fio if name in FIO else run_engine
                with meter:
                    cpu_s = run(name, path, case, moved_bytes)
                rate = meter.rate(moved_bytes)
                yield Run(case, name, number, rate, cpu_s / moved_bytes * 1e9)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    source = random.Random(1)
    medians = sorted(
        statistics.median(source.choices(values, k=len(values))) for _ in range(BOOTSTRAP_ROUNDS)
    )
    return medians[int(0.025 * BOOTSTRAP_ROUNDS)], medians[int(0.975 * BOOTSTRAP_ROUNDS) - 1]


def summarise(runs: list[Run]) -> list[dict[str, object]]:
    """Return a row for each case and contender, with its ratio to the better fio of each round."""
    rows: list[dict[str, object]] = []
    for case in dict.fromkeys(run.case for run in runs):
        mine = [run for run in runs if run.case == case]
        best_fio: dict[int, float] = {}
        for run in mine:
            if run.contender in FIO:
                best_fio[run.number] = max(best_fio.get(run.number, 0.0), run.bytes_per_s)
        for name in dict.fromkeys(run.contender for run in mine):
            own = [run for run in mine if run.contender == name]
            rates = [run.bytes_per_s for run in own]
            ratios = [run.bytes_per_s / best_fio[run.number] for run in own if best_fio]
            rows.append(
                {
                    **asdict(case),
                    "contender": name,
                    "rounds": len(own),
                    "bytes_per_s": statistics.median(rates),
                    "bytes_per_s_interval": interval(rates),
                    "cpu_s_per_gb": statistics.median(run.cpu_s_per_gb for run in own),
                    "of_best_fio": statistics.median(ratios) if ratios else None,
                    "of_best_fio_interval": interval(ratios) if ratios else None,
                }
            )
    return rows


def print_table(rows: list[dict[str, object]], console: Console) -> None:
    """Print the rows."""
    table = Table("workload", "MiB", "hugepages", "engine", "GB/s", "of fio", "CPU s/GB")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)


def cells(row: dict[str, object]) -> list[str]:
    """Return what a row of the table says."""
    rates = [float(str(row["bytes_per_s"])) / 1e9]
    low, high = json.loads(json.dumps(row["bytes_per_s_interval"]))
    rates += [low / 1e9, high / 1e9]
    ratio = "-"
    if row["of_best_fio"] is not None:
        low, high = json.loads(json.dumps(row["of_best_fio_interval"]))
        ratio = f"{row['of_best_fio']:.2f} ({low:.2f} to {high:.2f})"
    return [
        str(row["workload"]),
        str(int(str(row["transfer_bytes"])) >> 20),
        "yes" if row["hugepages"] else "no",
        str(row["contender"]),
        f"{rates[0]:.2f} ({rates[1]:.2f} to {rates[2]:.2f})",
        ratio,
        f"{row['cpu_s_per_gb']:.3f}",
    ]


def draw(rows: list[dict[str, object]], path: Path, console: Console) -> None:
    """Write a bar chart, where matplotlib is installed."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        console.print("no chart: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.28 * len(rows)), layout="constrained")
    labels = [
        f"{row['workload']}, {int(str(row['transfer_bytes'])) >> 20} MiB,"
        f" {'huge' if row['hugepages'] else '4 KiB'} pages: {row['contender']}"
        for row in rows
    ]
    bars = axes.barh(
        labels,
        [float(str(row["bytes_per_s"])) / 1e9 for row in rows],
        color=["0.35" if row["hugepages"] else "0.7" for row in rows],
    )
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("GB/s, median; dark: huge pages")
    figure.savefig(path)
    console.print(f"chart: {path}")


def parse() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--mebibytes", type=int, default=512, help="moved by one run")
    parser.add_argument("--transfer-mebibytes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--hugepages", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    options = parser.parse_args()
    options.hugepages = {"yes": [True], "no": [False], "both": [True, False]}[options.hugepages]
    return options


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = parse()
    console = Console()
    found = probe.report(options.directory)
    console.print("\n".join(found.lines()), highlight=False)
    path = options.directory / f"tierzero-io-bench-{os.getpid()}"
    try:
        with path.open("wb") as file:  # written, so that reads really reach the disk
            for _ in range(options.mebibytes):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        runs = list(measure(path, options, set(found.refusals)))
    finally:
        path.unlink(missing_ok=True)
    rows = summarise(runs)
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
