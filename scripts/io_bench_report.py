"""What io_bench.py says about its runs: rows with intervals and ratios, a table and a chart."""

import importlib
import json
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from io_bench_tools import LARGE, Case
from rich.console import Console
from rich.table import Table

BOOTSTRAP_ROUNDS = 2000
Row = dict[str, object]


@dataclass(frozen=True)
class Run:
    """One measurement."""

    case: Case
    contender: str
    number: int
    bytes_per_s: float
    cpu_s_per_gb: float


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    source = random.Random(1)
    medians = sorted(
        statistics.median(source.choices(values, k=len(values))) for _ in range(BOOTSTRAP_ROUNDS)
    )
    return medians[int(0.025 * BOOTSTRAP_ROUNDS)], medians[int(0.975 * BOOTSTRAP_ROUNDS) - 1]


def best_by_round(runs: Iterable[Run]) -> dict[int, float]:
    """Return the best rate of each round."""
    best: dict[int, float] = {}
    for run in runs:
        best[run.number] = max(best.get(run.number, 0.0), run.bytes_per_s)
    return best


def ratio(own: list[Run], others: dict[int, float]) -> tuple[float, float, float] | None:
    """Return the median ratio to the others' rate of the same round, and its interval."""
    ratios = [run.bytes_per_s / others[run.number] for run in own if run.number in others]
    return (statistics.median(ratios), *interval(ratios)) if ratios else None


def summarise(runs: list[Run], is_peer: Callable[[str], bool]) -> list[Row]:
    """Return a row for each case and contender."""
    rows: list[Row] = []
    for case in dict.fromkeys(run.case for run in runs):
        mine = [run for run in runs if run.case == case]
        fio = best_by_round(run for run in mine if run.contender.startswith("fio-"))
        peers = best_by_round(run for run in mine if is_peer(run.contender))
        for name in dict.fromkeys(run.contender for run in mine):
            own = [run for run in mine if run.contender == name]
            large = best_by_round(run for run in mine if run.contender == name + LARGE)
            rates = [run.bytes_per_s for run in own]
            rows.append(
                {
                    **asdict(case),
                    "contender": name,
                    "rounds": len(own),
                    "bytes_per_s": statistics.median(rates),
                    "bytes_per_s_interval": interval(rates),
                    "cpu_s_per_gb": statistics.median(run.cpu_s_per_gb for run in own),
                    "of_best_fio": ratio(own, fio),
                    "of_best_peer": ratio(own, peers),
                    "of_large": ratio(own, large),
                }
            )
    return rows


def print_table(rows: list[Row], console: Console) -> None:
    """Print the rows."""
    table = Table(
        *("workload", "KiB", "huge", "who", "GB/s", "of best fio", "of best peer", "of large"),
        "CPU s/GB",
    )
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)


def cells(row: Row) -> list[str]:
    """Return what a row of the table says."""
    low, high = json.loads(json.dumps(row["bytes_per_s_interval"]))
    rate = float(str(row["bytes_per_s"]))
    return [
        str(row["workload"]),
        str(int(str(row["transfer_bytes"])) >> 10),
        "yes" if row["hugepages"] else "no",
        str(row["contender"]),
        f"{rate / 1e9:.2f} ({low / 1e9:.2f} to {high / 1e9:.2f})",
        *(ratio_text(row[name]) for name in ("of_best_fio", "of_best_peer", "of_large")),
        f"{row['cpu_s_per_gb']:.3f}",
    ]


def ratio_text(value: object) -> str:
    """Return a ratio with its interval, or a dash."""
    if value is None:
        return "-"
    median, low, high = json.loads(json.dumps(value))
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def draw(rows: list[Row], path: Path, console: Console) -> None:
    """Write a bar chart; needs matplotlib."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.28 * len(rows)), layout="constrained")
    labels = [
        f"{row['workload']}, {int(str(row['transfer_bytes'])) >> 10} KiB,"
        f" {'huge' if row['hugepages'] else '4 KiB'} pages: {row['contender']}"
        for row in rows
    ]
    rates = [float(str(row["bytes_per_s"])) / 1e9 for row in rows]
    colors = ["0.35" if row["hugepages"] else "0.7" for row in rows]
    bars = axes.barh(range(len(rows)), rates, color=colors, tick_label=labels)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.01)
    axes.set_xlabel("GB/s, median; dark: huge pages")
    figure.savefig(path)
    console.print(f"chart: {path}")
