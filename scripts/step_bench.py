"""Measure the paging loop of the optimizer step against the limit of the disk that it pages on.

    python scripts/step_bench.py /path/on/the/disk --json step.json --chart step.png

Every case is one budget (a share of what could rest in memory), one sub-group size, one number of
slots (read-ahead and write-behind) and one burst. A case builds the shards of a made-up model,
fills them and runs updates: read, AdamW, write. The limit is the faster of two schedules of plain
transfers on the same disk in the same run, mixed or in alternating bursts, with the best transfer
size. Cases and limits take turns, so that a disk that changes its mind changes it for all; medians
are compared. Bytes are those of /proc/self/io.
"""

import argparse
import importlib
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from places import folder_option, picture_option
from step_bench_limit import Limit, measure_limit

from aio_ops import Engine, open_engine
from estimators import (
    Budget,
    ElementType,
    MemoryPlan,
    PlacementRequest,
    SegmentSpec,
    StateFormat,
    Tier,
    minimum_host_bytes,
    plan_placement,
)
from estimators.command import output_option
from estimators.placement import in_play_bytes
from offload import AdamWScalars, Ledger, Store, StoreParts, load_kernels, update

ALIGNMENT_BYTES = 4096
UNIT_COUNT = 16


@dataclass(frozen=True)
class Case:
    """What is measured."""

    budget_share: float
    """Host budget: this share of the way from the least that works to everything."""
    sub_group_mebi: float
    """Mebi-elements of a sub-group at most."""
    slot_count: int
    write_burst: int


@dataclass(frozen=True)
class Run:
    """One measurement of one case."""

    case: Case
    number: int
    seconds: float
    """Of one update."""
    kernel_bytes: int
    """Of one update, by /proc/self/io."""
    ledger_bytes: int
    nonresident_share: float
    slots: int
    slot_bytes: int
    read_wait: float
    write_wait: float
    slot_wait: float
    compute: float


def kernel_bytes() -> int:
    """Return what this process has read from and written to disks."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    fields = dict(line.split(": ") for line in text.splitlines())
    return int(fields["read_bytes"]) + int(fields["write_bytes"])


def make_request(case: Case, options: argparse.Namespace) -> PlacementRequest:
    """Return equal units of fp32 or bf16 parameters; only optimizer state and gradients page."""
    numel = options.parameters // UNIT_COUNT
    element = ElementType(options.dtype)
    segments = tuple(
        SegmentSpec(f"unit{index}", index, ("w",), (numel,), element, trainable=True, param_group=0)
        for index in range(UNIT_COUNT)
    )
    return PlacementRequest(
        segments,
        1,
        Tier.DEVICE,
        Tier.NVME,
        StateFormat(options.state_format),
        max(int(case.sub_group_mebi * (1 << 20)), 64),
        ALIGNMENT_BYTES,
        slot_count=case.slot_count,
    )


def make_plan(case: Case, options: argparse.Namespace) -> MemoryPlan:
    """Return the plan of a case: its share of the budget beside the slots that it asks for."""
    request = make_request(case, options)
    least, everything = minimum_host_bytes(request), in_play_bytes(request)
    plan = plan_placement(request, Budget(least + int((everything - least) * case.budget_share)))
    if case.budget_share:
        return plan
    slot = case.sub_group_mebi * (1 << 20) * 16  # half of the budget is slots of this size
    return plan_placement(request, Budget(least + int(2 * case.slot_count * slot)))


def run_case(case: Case, number: int, options: argparse.Namespace) -> Run:
    """Make a store, warm it up with one update, which writes all state, and time the next ones."""
    plan = make_plan(case, options)
    scalars = [
        AdamWScalars.from_hyperparameters(
            lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=step, grad_scale=1.0
        )
        for step in range(1, options.updates + 2)
    ]
    engine: Engine = open_engine(options.engine, directory=options.directory)
    kernels = load_kernels(thread_count=options.threads)
    parts = StoreParts(engine, options.directory, kernels, Ledger(), burst=case.write_burst)
    store = Store(plan, parts)
    try:
        update(store, scalars[:1], lambda _: None)
        before, bytes_before = store.ledger.snapshot(), kernel_bytes()
        begin = time.perf_counter()
        for step in scalars[1:]:
            update(store, [step], lambda _: None)
        seconds = (time.perf_counter() - begin) / options.updates
        moved = store.ledger.snapshot().minus(before)
        by_kernel = (kernel_bytes() - bytes_before) // options.updates
    finally:
        store.close()
    return Run(
        case,
        number,
        seconds,
        by_kernel,
        (moved.nvme_read_bytes + moved.nvme_write_bytes) // options.updates,
        plan.swap_file_bytes / in_play_bytes(plan.request),
        plan.slots.count,
        plan.slots.size_bytes,
        moved.seconds["read wait"] / options.updates,
        moved.seconds["write wait"] / options.updates,
        moved.seconds["slot wait"] / options.updates,
        moved.seconds["update"] / options.updates,
    )


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Return every combination that is asked for."""
    return [
        Case(*values)
        for values in itertools.product(
            options.budgets, options.sub_groups, options.slots, options.bursts
        )
    ]


def measure(options: argparse.Namespace, console: Console) -> tuple[list[Run], list[Limit]]:
    """Run all cases and the limit as often as asked for, in turn, each round from another."""
    cases = cases_of(options)
    runs: list[Run] = []
    limits: list[Limit] = []
    for number in range(options.rounds):
        limits += measure_limit(options.directory, options.engine, options.limit_mebibytes)
        turn = number % len(cases)
        for case in cases[turn:] + cases[:turn]:
            runs.append(run_case(case, number, options))
        console.print(f"round {number + 1} of {options.rounds}")
    return runs, limits


def best_limit(limits: list[Limit]) -> dict[str, Any]:
    """Return the schedule with the highest median rate."""
    rates: dict[tuple[str, int], list[float]] = {}
    for limit in limits:
        rates.setdefault((limit.schedule, limit.transfer_bytes), []).append(limit.bytes_per_s)
    (schedule, transfer), found = max(rates.items(), key=lambda item: statistics.median(item[1]))
    return {
        "schedule": schedule,
        "transfer_bytes": transfer,
        "bytes_per_s": statistics.median(found),
    }


def summarise(runs: list[Run], limit: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row of medians for each case."""
    rows = []
    for case in dict.fromkeys(run.case for run in runs):
        own = [run for run in runs if run.case == case]
        rates = [run.kernel_bytes / run.seconds for run in own]
        rate = statistics.median(rates)
        rows.append(
            {
                **asdict(case),
                "slots": own[0].slots,
                "slot_bytes": own[0].slot_bytes,
                "nonresident_share": own[0].nonresident_share,
                "seconds": statistics.median(run.seconds for run in own),
                "bytes_per_update": statistics.median(run.kernel_bytes for run in own),
                "ledger_bytes_per_update": own[0].ledger_bytes,
                "bytes_per_s": rate,
                "of_limit": rate / limit["bytes_per_s"],
                **{
                    f"{name}_s": statistics.median(getattr(run, name) for run in own)
                    for name in ("read_wait", "write_wait", "slot_wait", "compute")
                },
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]], limit: dict[str, Any], console: Console) -> None:
    """Print the rows and the limit."""
    table = Table(
        *("budget", "Mi elements", "slots", "MiB", "burst", "paged", "s", "GB/s", "of limit"),
        *("read", "write", "slot", "update"),
        caption=f"limit: {limit['bytes_per_s'] / 1e9:.2f} GB/s, {limit['schedule']},"
        f" {limit['transfer_bytes'] >> 20} MiB a transfer",
        title="Paging loop (medians)",
    )
    for row in rows:
        table.add_row(
            f"{row['budget_share']:.0%}",
            f"{row['sub_group_mebi']:g}",
            str(row["slots"]),
            f"{row['slot_bytes'] / (1 << 20):.1f}",
            str(row["write_burst"]),
            f"{row['nonresident_share']:.0%}",
            f"{row['seconds']:.3f}",
            f"{row['bytes_per_s'] / 1e9:.2f}",
            f"{row['of_limit']:.0%}",
            *(
                f"{row[name]:.2f}"
                for name in ("read_wait_s", "write_wait_s", "slot_wait_s", "compute_s")
            ),
        )
    console.print(table)


def lines_of(rows: list[dict[str, Any]], by: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield `(label, rows)` of the cases that differ in `by` alone, where there are several."""
    names = ("budget_share", "sub_group_mebi", "slot_count", "write_burst")
    fixed = [name for name in names if name != by]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in fixed), []).append(row)
    for key, own in groups.items():
        if len(own) > 1:
            label = ", ".join(f"{name} {value:g}" for name, value in zip(fixed, key, strict=True))
            yield label, sorted(own, key=lambda row: row[by])


def draw(rows: list[dict[str, Any]], limit: dict[str, Any], path: Path, console: Console) -> None:
    """Write a chart of seconds by paged share, and of the rate by each setting."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    for label, own in lines_of(rows, "budget_share"):
        shares = [row["nonresident_share"] for row in own]
        axes[0][0].plot(shares, [row["seconds"] for row in own], marker="o", label=label)
    axes[0][0].set(xlabel="share that pages", ylabel="seconds an update", ylim=(0, None))
    for place, by in (
        (axes[0][1], "sub_group_mebi"),
        (axes[1][0], "slot_count"),
        (axes[1][1], "write_burst"),
    ):
        for label, own in lines_of(rows, by):
            rates = [row["bytes_per_s"] / 1e9 for row in own]
            place.plot([row[by] for row in own], rates, marker="o", label=label)
        place.axhline(limit["bytes_per_s"] / 1e9, color="0.5", linestyle="--")
        place.set(xlabel=by, ylabel="GB/s (dashed: the disk's limit)", ylim=(0, None))
    for place in axes.flat:
        if place.get_legend_handles_labels()[0]:
            place.legend(fontsize=6)
    figure.savefig(path)
    console.print(f"chart: {path}")


def parse() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=folder_option)
    parser.add_argument("--parameters", type=int, default=64 << 20)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--state-format", choices=("exact", "fp32"), default="exact")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1])
    parser.add_argument("--sub-groups", type=float, nargs="+", default=[0.25, 1])
    parser.add_argument("--slots", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--bursts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=2, help="timed in one run")
    parser.add_argument("--limit-mebibytes", type=int, default=512, help="moved by one limit run")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=output_option)
    parser.add_argument("--chart", type=picture_option)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = parse()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 130
    runs, limits = measure(options, console)
    limit = best_limit(limits)
    rows = summarise(runs, limit)
    print_table(rows, limit, console)
    if options.json:
        report = {
            "machine": {"kernel": platform.release()},
            "limit": limit,
            "limits": [asdict(each) for each in limits],
            "rows": rows,
            "runs": [asdict(run) for run in runs],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.chart:
        draw(rows, limit, options.chart, console)


if __name__ == "__main__":
    main()
