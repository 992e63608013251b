"""Charts of the sweeps: PNG, or HTML that stands alone. Readable in greyscale, legends beside."""

import base64
import html
import importlib
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aio_ops.tune.report import CSS, PANEL_INCHES, STYLES

Panel = Callable[[Any], None]
"""Draws into one pair of axes of matplotlib."""

Series = Mapping[str, Mapping[Any, Sequence[float]]]
"""By name and place: what was measured there."""


def require(path: Path | None) -> None:
    """Refuse a report that could not be written at the end."""
    if path is None:
        return
    if path.suffix not in (".png", ".html"):
        raise SystemExit(f"{path} must end in .png or .html")
    if not path.parent.is_dir():
        raise SystemExit(f"{path} cannot be written: {path.parent} is no directory; make it")
    if path.suffix == ".png" and _figure_class() is None:
        raise SystemExit(
            f"{path} needs matplotlib, which is not installed: `pip install matplotlib`; an .html "
            "report has its table without"
        )


def write(
    path: Path,
    title: str,
    lines: Sequence[str],
    panels: Sequence[Panel],
    table: Sequence[Sequence[str]],
    *,
    inches: tuple[float, float] = PANEL_INCHES,
) -> None:
    """Write the report whose kind the name says; the first row of the table is its head."""
    drawn = picture(panels, inches)
    if path.suffix == ".png":
        path.write_bytes(drawn or b"")
        return
    image = (
        "<p>Charts need matplotlib, which is not installed.</p>"
        if drawn is None
        else f'<img alt="charts" src="data:image/png;base64,{base64.b64encode(drawn).decode()}">'
    )
    said = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    rows = "".join(
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for row, tag in zip(table, ["th"] + ["td"] * len(table), strict=False)
    )
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><ul>{said}</ul>{image}<table>{rows}</table></body></html>\n",
        encoding="utf-8",
    )


def picture(panels: Sequence[Panel], inches: tuple[float, float] = PANEL_INCHES) -> bytes | None:
    """Return panels of so many inches as PNG, two in a row, or None without matplotlib."""
    figure_class = _figure_class()
    if figure_class is None:
        return None
    rows = -(-len(panels) // 2)
    size = (2 * inches[0], rows * inches[1])
    figure = figure_class(figsize=size, layout="constrained", dpi=100)
    places = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes, panel in zip(places, panels, strict=False):
        panel(axes)
        axes.grid(visible=True, color="0.88")
        axes.set_axisbelow(True)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def curves(axes: Any, series: Series, label: Callable[[Any], str]) -> None:
    """Draw medians with the span from the least to the most, at evenly spaced places."""
    places = sorted({place for points in series.values() for place in points})
    for style, (name, points) in zip(STYLES * 4, series.items(), strict=False):
        own = sorted(points)
        middles = [statistics.median(points[place]) for place in own]
        least = [min(points[place]) for place in own]
        most = [max(points[place]) for place in own]
        spans = [
            [middle - low for middle, low in zip(middles, least, strict=True)],
            [high - middle for middle, high in zip(middles, most, strict=True)],
        ]
        at = [places.index(place) for place in own]
        axes.errorbar(at, middles, yerr=spans, label=name, capsize=3, elinewidth=0.8, **style)
    axes.set_xticks(range(len(places)), [label(place) for place in places])
    top = max((max(values) for points in series.values() for values in points.values()), default=0)
    axes.set_ylim(0, 1.08 * top or 1.0)
    if series:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)


def _figure_class() -> Callable[..., Any] | None:
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError:
        return None
    figure: Callable[..., Any] = module.Figure
    return figure
