"""A report with curves: PNG, or HTML that stands alone. Readable in greyscale."""

import base64
import html
import importlib
import io
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aio_ops.tune.checks import TuneError
from aio_ops.tune.results import PERCENTILES, DirectoryResult, Rate, Result
from aio_ops.tune.settings import Setting, Workload, size_text
from aio_ops.tune.words import verdict

STYLES = (
    {"color": "0.0", "marker": "o", "linestyle": "-"},
    {"color": "0.45", "marker": "s", "linestyle": "--"},
    {"color": "0.2", "marker": "^", "linestyle": ":"},
    {"color": "0.6", "marker": "D", "linestyle": "-."},
    {"color": "0.3", "marker": "v", "linestyle": "-"},
    {"color": "0.7", "marker": "x", "linestyle": "--"},
    {"color": "0.1", "marker": "P", "linestyle": ":"},
)
PANEL_INCHES = (7.2, 3.4)
CSS = (
    "body{font-family:sans-serif;max-width:1100px;margin:2em auto;color:#111}"
    "table{border-collapse:collapse}td,th{border:1px solid #999;padding:.3em .6em;text-align:left}"
    "img{max-width:100%}"
)
_Series = dict[str, dict[int, list[float]]]


def require(path: Path | None) -> None:
    """Raise TuneError when a report of this kind cannot be made here."""
    if path is not None and path.suffix == ".png" and _figure_class() is None:
        raise TuneError(
            f"{path} needs matplotlib, which is not installed: `pip install matplotlib`; an .html "
            "report has its tables without"
        )


def write(result: Result, path: Path) -> None:
    """Write the report whose kind the name says."""
    if path.suffix == ".png":
        path.write_bytes(picture(result) or b"")
        return
    path.write_text(page(result), encoding="utf-8")


def page(result: Result) -> str:
    """Return the report as HTML, the curves within it."""
    drawn = picture(result)
    image = (
        "<p>Curves need matplotlib, which is not installed.</p>"
        if drawn is None
        else f'<img alt="curves" src="data:image/png;base64,{base64.b64encode(drawn).decode()}">'
    )
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in verdict(result))
    tables = "".join(_table(each) for each in result.directories)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tierzero-nvme-tune'
        f"</title><style>{CSS}</style></head><body><h1>tierzero-nvme-tune</h1><ul>{lines}</ul>"
        f"{image}{tables}</body></html>\n"
    )


def _table(result: DirectoryResult) -> str:
    rows = [
        "<tr>"
        f"<td>{workload.value}</td><td>{html.escape(key.describe())}</td>"
        f"<td>{Rate.of(outcome.samples.rates(key)).text()}</td></tr>"
        for workload, outcome in result.outcomes.items()
        for key in outcome.finalists
    ]
    head = "<tr><th>what</th><th>setting</th><th>median and 95 % interval</th></tr>"
    return (
        f"<h2>{html.escape(str(result.disk.path))}</h2><p>{html.escape(result.disk.describe())}"
        f"</p><table>{head}{''.join(rows)}</table>"
    )


def picture(result: Result) -> bytes | None:
    """Return the curves as PNG, or None without matplotlib."""
    figure_class = _figure_class()
    if figure_class is None:
        return None
    panels = [
        (each, panel) for each in result.directories for panel in _PANELS if panel is not _sustained
    ] + [(each, _sustained) for each in result.directories if each.sustained is not None]
    rows = -(-len(panels) // 2)
    size = (2 * PANEL_INCHES[0], rows * PANEL_INCHES[1])
    figure = figure_class(figsize=size, layout="constrained", dpi=100)
    for axes, (each, panel) in zip(figure.subplots(rows, 2, squeeze=False).flat, panels):  # noqa: B905  the last place may stay empty
        panel(axes, each)
        axes.grid(visible=True, color="0.88")
        axes.set_axisbelow(True)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _figure_class() -> Callable[..., Any] | None:
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError:
        return None
    figure: Callable[..., Any] = module.Figure
    return figure


def _name(result: DirectoryResult) -> str:
    text = str(result.disk.path)
    return text if len(text) <= 30 else f"...{text[-27:]}"


def _plain_rates(result: DirectoryResult) -> tuple[str, dict[Setting, list[float]]]:
    """Return the main workload, and all rates of the settings that a configuration can ask for."""
    workload, outcome = next(iter(result.outcomes.items()))
    rates = {
        key: [sample.rate for sample in samples]
        for key, samples in outcome.samples.taken.items()
        if key == key.configured
    }
    return workload.value, rates


def _over_blocks(axes: Any, result: DirectoryResult) -> None:
    """Draw, for each engine, the best depth at each block size."""
    workload, rates = _plain_rates(result)
    series: _Series = {}
    for key, values in rates.items():
        at = series.setdefault(key.engine, {})
        if statistics.median(values) > statistics.median(at.get(key.block_bytes, [0.0])):
            at[key.block_bytes] = values
    _draw(axes, series, size_text)
    axes.set_title(f"{_name(result)}: {workload} over block size, best depth of each")
    axes.set_xlabel("block size")
    axes.set_ylabel("bandwidth (GB/s)")


def _over_depths(axes: Any, result: DirectoryResult) -> None:
    """Draw, for each block size of the chosen engine, the bandwidth at each depth."""
    workload, rates = _plain_rates(result)
    engine = "" if result.chosen is None else result.chosen.engine
    series: _Series = {}
    for key, values in sorted(rates.items()):
        if key.engine == engine:
            series.setdefault(size_text(key.block_bytes), {})[key.depth] = values
    _draw(axes, series, str)
    axes.set_title(f"{_name(result)}: {workload} over depth, {engine}, by block size")
    axes.set_xlabel("blocks at once")
    axes.set_ylabel("bandwidth (GB/s)")


def _draw(axes: Any, series: _Series, label: Callable[[int], str]) -> None:
    """Draw medians with the span from the least to the most, at evenly spaced places."""
    places = sorted({place for points in series.values() for place in points})
    for style, (name, points) in zip(STYLES * 2, series.items(), strict=False):
        own = sorted(points)
        middles = [statistics.median(points[place]) / 1e9 for place in own]
        below = [
            middle - min(points[place]) / 1e9 for middle, place in zip(middles, own, strict=True)
        ]
        above = [
            max(points[place]) / 1e9 - middle for middle, place in zip(middles, own, strict=True)
        ]
        axes.errorbar(
            [places.index(place) for place in own],
            middles,
            yerr=[below, above],
            label=name,
            capsize=3,
            elinewidth=0.8,
            **style,
        )
    axes.set_xticks(range(len(places)), [label(place) for place in places])
    axes.set_ylim(bottom=0)
    _legend(axes)


def _legend(axes: Any) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)  # beside the curves


def _latency(axes: Any, result: DirectoryResult) -> None:
    """Draw the percentiles of single blocks over depth."""
    depths = sorted({latency.depth for latency in result.latencies})
    styles = iter(STYLES)
    for workload in (Workload.READ, Workload.WRITE):
        own = [latency for latency in result.latencies if latency.workload is workload]
        for index, share in enumerate(PERCENTILES if own else ()):
            axes.plot(
                [depths.index(latency.depth) for latency in own],
                [latency.percentiles_s[index] * 1e3 for latency in own],
                label=f"{workload.value} p{share * 100:g}",
                **next(styles),
            )
    block = size_text(result.latencies[0].block_bytes) if result.latencies else "?"
    times_ms = [time * 1e3 for latency in result.latencies for time in latency.percentiles_s]
    ticks = round_ticks(min(times_ms, default=1.0), max(times_ms, default=1.0))
    axes.set_yscale("log")
    axes.set_ylim(ticks[0], ticks[-1])
    axes.minorticks_off()
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_title(f"{_name(result)}: latency of blocks of {block}, in their order")
    axes.set_xlabel("blocks at once")
    axes.set_ylabel("latency (ms)")
    if result.latencies:
        _legend(axes)


def round_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, from the last below `low` to the first above."""
    exponent = math.floor(math.log10(low)) - 1
    steps = [digit * 10.0**power for power in range(exponent, exponent + 14) for digit in (1, 2, 5)]
    start = max(index for index, step in enumerate(steps) if step <= low)
    stop = next(index for index, step in enumerate(steps) if step > high)
    return steps[start : stop + 1]


def _bars(axes: Any, result: DirectoryResult) -> None:
    """Draw the rates of the choice, and of the best setting of each workload alone."""
    names, chosen, best = [], [], []
    for workload, outcome in result.outcomes.items():
        own = result.rate(workload)
        if own is not None:
            names.append(workload.value)
            chosen.append(own)
            best.append(Rate.of(outcome.samples.rates(outcome.best)))
    for workload, slots in result.gpu.items():
        names.append(f"{workload.value}, GPU")
        chosen.append(Rate.of(slots.samples.rates(slots.best)))
        best.append(chosen[-1])
    for shift, rates, color, label in ((-0.2, chosen, "0.35", "choice"), (0.2, best, "0.8", "best of each")):  # fmt: skip  # noqa: E501
        places = [index + shift for index in range(len(rates))]
        axes.bar(places, [rate.median / 1e9 for rate in rates], 0.36, color=color, label=label,
                 edgecolor="0.0")  # fmt: skip
        for place, rate in zip(places, rates, strict=True):
            axes.plot([place, place], [rate.low / 1e9, rate.high / 1e9], color="0.0", linewidth=1.2)
    axes.set_xticks(range(len(names)), names)
    axes.set_title(f"{_name(result)}: medians and 95 % intervals")
    axes.set_xlabel("workload")
    axes.set_ylabel("bandwidth (GB/s)")
    _legend(axes)


def _sustained(axes: Any, result: DirectoryResult) -> None:
    """Draw the rate of the long write over time."""
    sustained = result.sustained
    if sustained is None:
        return
    ends = [end for _, end, _ in sustained.pieces]
    axes.step(ends, [rate / 1e9 for rate in sustained.rates()], where="pre", color="0.0")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{_name(result)}: a long write")
    axes.set_xlabel("time (s)")
    axes.set_ylabel("bandwidth (GB/s)")


_PANELS: tuple[Callable[[Any, DirectoryResult], None], ...] = (
    _over_blocks,
    _over_depths,
    _latency,
    _bars,
    _sustained,
)
