"""What swap_sweep.py says about its measurements: a table, words, JSON and charts."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import charts
from rich.table import Table
from swap_sweep_cases import (
    Case,
    Results,
    Step,
    best_of,
    choose,
    numel_text,
    seconds_text,
    size_text,
)

JSON_VERSION = 1
_SHOWN = 12
_HEAD = ("host memory", "format", "sub-group", "slots", "bursts", "update on", "step (s)")
_MORE = ("paging (s)", "moved (GB)", "GB/s", "measured")
_WAITS = ("read wait", "write wait", "slot wait", "update")


def ranked(results: Results) -> list[Case]:
    """Return what was measured, the cases measured most often first, then the fastest."""
    return sorted(results.steps, key=lambda case: (-len(results.steps[case]), results.paging(case)))


def row_of(case: Case, steps: Sequence[Step]) -> list[str]:
    """Return a row of the table."""
    moved_bytes = steps[0].read_bytes + steps[0].write_bytes
    paging = [step.paging_seconds for step in steps]
    middle = statistics.median(paging)
    span = f" ({seconds_text(min(paging))} to {seconds_text(max(paging))})"
    return [
        size_text(case.host_bytes),
        case.state_format,
        numel_text(case.sub_group_numel),
        str(case.slot_count),
        str(case.write_burst),
        case.update_device,
        seconds_text(statistics.median(step.seconds for step in steps)),
        f"{seconds_text(middle)}{span if len(steps) > 1 else ''}",
        f"{moved_bytes / 1e9:.2f}",
        f"{moved_bytes / middle / 1e9:.2f}",
        str(len(steps)),
    ]


def table_of(results: Results, title: str, most: int = _SHOWN) -> Table:
    """Return the best rows as a table for people."""
    cases = ranked(results)
    hidden = len(cases) - most
    caption = f"and {hidden} slower" if hidden > 0 else None
    table = Table(*_HEAD, *_MORE, title=title, title_justify="left", caption=caption)
    for case in cases[:most]:
        table.add_row(*row_of(case, results.steps[case]))
    return table


def verdict(results: Results, cases: Sequence[Case], everything_bytes: int) -> list[str]:
    """Return what was found out, a sentence a line."""
    best = best_of(cases, results)
    if not best:
        reasons = list(dict.fromkeys(results.refused.values()))
        return [f"nothing could be measured: {reason}" for reason in reasons[:3]]
    chosen = choose(best, results)
    lines = []
    for budget, case in best.items():
        step = results.steps[case][0]
        moved = step.read_bytes + step.write_bytes
        share = budget / everything_bytes if everything_bytes else 1.0
        pages = f"{moved / 1e9:.2f} GB move in it" if moved else "nothing pages"
        lines.append(
            f"with {share:.0%} of the memory that everything takes: {_times(results, case)}, "
            f"{pages}; {case.describe()}"
        )
    measured = [case for case in cases if case in results.steps]
    worst = max(
        (case for case in measured if case.host_bytes == chosen.host_bytes), key=results.paging
    )
    lines.append(f"use {chosen.describe()}: {_times(results, chosen)}")
    if worst != chosen:
        gain = results.paging(worst) / results.paging(chosen)
        lines.append(f"paging takes {gain:.2f} times as long in the worst with as much memory")
    missing = [case for case in cases if case not in results.steps and case not in results.refused]
    if missing:
        lines.append(f"{len(missing)} of {len(cases)} cases were not measured: start it again")
    lines += [f"refused: {reason}" for reason in dict.fromkeys(results.refused.values())]
    return lines


def _times(results: Results, case: Case) -> str:
    paging, whole = seconds_text(results.paging(case)), seconds_text(results.seconds(case))
    return f"{paging} s of update and waits in a step of {whole} s"


def to_json(results: Results, cases: Sequence[Case], everything_bytes: int) -> dict[str, Any]:
    """Return everything as plain data; times are seconds."""
    best = best_of(cases, results)
    chosen = choose(best, results) if best else None
    return {
        "version": JSON_VERSION,
        "verdict": verdict(results, cases, everything_bytes),
        "fragment": None if chosen is None else chosen.part(),
        "everything_bytes": everything_bytes,
        "chosen": None if chosen is None else asdict(chosen),
        "best": [asdict(case) for case in best.values()],
        "cases": [
            {**asdict(case), "steps": [asdict(step) for step in steps]}
            for case, steps in results.steps.items()
        ],
        "refused": [{**asdict(case), "why": why} for case, why in results.refused.items()],
    }


def panels_of(results: Results, cases: Sequence[Case]) -> list[charts.Panel]:
    """Return the charts: over memory, sub-group size and slots, and where the time went."""
    best = best_of(cases, results)
    if not best:
        return []
    chosen = choose(best, results)
    return [
        lambda axes: _over_budget(axes, results),
        lambda axes: _over_sub_groups(axes, results, chosen),
        lambda axes: _over_slots(axes, results, chosen),
        lambda axes: _time(axes, results, list(best.values())),
    ]


def _seconds(results: Results, case: Case) -> list[float]:
    return [step.paging_seconds for step in results.steps[case]]


def _keep_best(points: dict[Any, list[float]], place: Any, seconds: list[float]) -> None:
    if place not in points or statistics.median(seconds) < statistics.median(points[place]):
        points[place] = seconds


def _over_budget(axes: Any, results: Results) -> None:
    series: dict[str, dict[Any, list[float]]] = {}
    for case in results.steps:
        name = f"{case.state_format}, {case.update_device}"
        _keep_best(series.setdefault(name, {}), case.host_bytes, _seconds(results, case))
    charts.curves(axes, series, size_text)
    axes.set_title("best of each amount of host memory")
    axes.set_xlabel("host memory")
    axes.set_ylabel("update and waits (s)")


def _over_sub_groups(axes: Any, results: Results, chosen: Case) -> None:
    series: dict[str, dict[Any, list[float]]] = {}
    for case in sorted(results.steps):
        if _is_beside(case, chosen):
            points = series.setdefault(f"{case.slot_count} slots", {})
            _keep_best(points, case.sub_group_numel, _seconds(results, case))
    charts.curves(axes, series, numel_text)
    axes.set_title(f"over sub-groups, {size_text(chosen.host_bytes)}, {chosen.state_format}")
    axes.set_xlabel("elements of a sub-group")
    axes.set_ylabel("update and waits (s)")


def _over_slots(axes: Any, results: Results, chosen: Case) -> None:
    series: dict[str, dict[Any, list[float]]] = {}
    for case in sorted(results.steps):
        if _is_beside(case, chosen):
            points = series.setdefault(numel_text(case.sub_group_numel), {})
            _keep_best(points, case.slot_count, _seconds(results, case))
    charts.curves(axes, series, str)
    axes.set_title(f"over slots, {size_text(chosen.host_bytes)}, {chosen.state_format}")
    axes.set_xlabel("slots (read-ahead and write-behind)")
    axes.set_ylabel("update and waits (s)")


def _is_beside(case: Case, chosen: Case) -> bool:
    return (case.host_bytes, case.state_format, case.update_device) == (
        chosen.host_bytes,
        chosen.state_format,
        chosen.update_device,
    )


def _time(axes: Any, results: Results, best: Sequence[Case]) -> None:
    """Draw, for the best of each budget, what a step's time went to."""
    bottoms = [0.0] * len(best)
    shades = ("0.15", "0.4", "0.6", "0.8", "1.0")
    steps = [results.steps[case][0] for case in best]
    known = {name: [step.spent.get(name, 0.0) for step in steps] for name in _WAITS}
    known["compute and rest"] = [
        max(0.0, step.seconds - sum(step.spent.get(name, 0.0) for name in _WAITS)) for step in steps
    ]
    for shade, (name, heights) in zip(shades, known.items(), strict=True):
        axes.bar(range(len(best)), heights, 0.5, bottom=bottoms, color=shade, edgecolor="0.0",
                 label=name)  # fmt: skip
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(best)), [size_text(case.host_bytes) for case in best])
    axes.set_title("where the time of a step goes, best of each")
    axes.set_xlabel("host memory")
    axes.set_ylabel("seconds (s)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
