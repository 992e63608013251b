"""The chart of what the GPU benchmark has measured: seconds and memory, ours beside the peer's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import charts
from gpu_table import GB, HEAD, line, outcomes, peer_seconds

from aio_ops.tune.report import PANEL_INCHES

_TITLE = "gpu_bench: a training step beside the peer's"
_OURS = {"color": "0.25", "label": "ours"}
_THEIRS = {"color": "0.75", "hatch": "//", "edgecolor": "0.4", "label": "peer"}
_HEIGHT = 0.38
_BAR_INCHES = 0.3
"""Height of a pair of bars, so that the words beside them do not overlap."""

Pairs = Sequence[tuple[str, float, float | None]]
"""Names with what is ours and, where it is known, the peer's."""


def write(folder: Path, path: Path) -> None:
    """Write the chart of all rows in a folder, as PNG, or as HTML with their table.

    Raises:
        SystemExit: if there are no rows.
    """
    rows = [found for found in outcomes(folder).values() if "ours" in found]
    if not rows:
        raise SystemExit(f"{folder} has no rows: run gpu_bench.py --row ROW --out {folder} first")
    kept = memory(rows)
    panels = [
        bars(seconds(rows), "seconds a step", lambda value: f"{value:.3g}", log=True),
        bars(kept, "GB, most at once", lambda value: f"{value:.1f}", log=False),
    ]
    inches = (PANEL_INCHES[0], max(PANEL_INCHES[1], _BAR_INCHES * len(kept)))
    said = [f"{name}: {value}" for name, value in headlines(rows)]
    table = [list(HEAD), *map(line, rows)]
    charts.write(path, _TITLE, said, panels, table, inches=inches)


def seconds(rows: Sequence[dict[str, Any]]) -> Pairs:
    """Return the median step of each row."""
    return [
        (row["row"], row["ours"]["median_seconds"], peer_seconds(row.get("peer") or {}))
        for row in rows
    ]


def memory(rows: Sequence[dict[str, Any]]) -> Pairs:
    """Return the peaks of each row, on the device and on the host above the process's own."""
    found: list[tuple[str, float, float | None]] = []
    for row in rows:
        ours, peer = row["ours"], row.get("peer") or {}
        host = (ours["rss_bytes"]["peak"] - ours["rss_bytes"]["before"]) / GB
        theirs = (
            peer["rss_peak_gb"] - peer["baseline_bytes"] / GB if "baseline_bytes" in peer else None
        )
        found.append(
            (f"{row['row']}, device", ours["device_peak_bytes"] / GB, peer.get("gpu_peak_gb"))
        )
        found.append((f"{row['row']}, host", host, theirs))
    return found


def headlines(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return of each row how much sooner ours is over."""
    return [
        (
            name,
            f"{ours:.3g} s, {theirs / ours:.1f} times as fast as the peer"
            if theirs
            else f"{ours:.3g} s",
        )
        for name, ours, theirs in seconds(rows)
    ]


def bars(pairs: Pairs, what: str, label: Callable[[float], str], *, log: bool) -> charts.Panel:
    """Return what draws pairs of bars, the first on top."""

    def draw(axes: Any) -> None:
        places = [len(pairs) - 1 - at for at in range(len(pairs))]
        ours = [(place + _HEIGHT / 2, pair[1]) for place, pair in zip(places, pairs, strict=True)]
        theirs = [
            (place - _HEIGHT / 2, pair[2])
            for place, pair in zip(places, pairs, strict=True)
            if pair[2] is not None
        ]
        for found, style in ((ours, _OURS), (theirs, _THEIRS)):
            if found:
                drawn = axes.barh(
                    [at for at, _ in found], [value for _, value in found], _HEIGHT, **style
                )
                axes.bar_label(drawn, [label(value) for _, value in found], padding=3, fontsize=7)
        axes.set_yticks(places, [name for name, *_ in pairs], fontsize=7)
        axes.set_xlabel(f"{what} (logarithmic)" if log else what)
        if log:
            axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=7)

    return draw
