"""A stacked bar chart of memory by tier, as PNG (matplotlib) or as HTML that stands alone."""

from __future__ import annotations

import html
import importlib
from pathlib import Path
from typing import Any

from estimators import Tier
from estimators.estimate import Estimate, Line
from estimators.inputs import DeviceKind
from estimators.words import bytes_text
from zero.plan_tables import describe_job, describe_model, time_lines

_SHADES = ("#1b4965", "#5fa8d3", "#bc6c25", "#dda15e", "#606c38", "#a3b18a", "#6d597a", "#b5838d",
           "#495057", "#adb5bd")  # fmt: skip
_LEAST_SHARE = 0.004
"""Thinner layers are left out of the legend."""


def write_chart(estimate: Estimate, path: Path) -> None:
    """Write a chart of what one rank takes of each tier when that tier holds most.

    Raises:
        ValueError: if the file's kind is not known, or PNG is asked for without matplotlib.
    """
    match path.suffix:
        case ".html":
            path.write_text(_page(estimate), encoding="utf-8")
        case ".png":
            _draw(estimate, path)
        case _:
            raise ValueError(f"{path}: a chart is a .png or an .html file")


def layers(estimate: Estimate) -> dict[str, list[Line]]:
    """Return the lines of each tier that are there at its peak, by its name for people."""
    is_cpu = estimate.inputs.node.device is DeviceKind.CPU
    names = {
        Tier.DEVICE: "device (host memory)" if is_cpu else "device",
        Tier.HOST: "host",
        Tier.NVME: "nvme",
    }
    found: dict[str, list[Line]] = {}
    for line in estimate.lines():
        if line.at_peak:
            found.setdefault(names[line.tier], []).append(line)
    return found


def _limits(estimate: Estimate) -> dict[str, tuple[str, int]]:
    """Return what bounds one rank on each tier, by the tier's name: its name and bytes."""
    node = estimate.inputs.node
    found = {
        "device": ("device memory", node.device_bytes),
        "host": ("tiers.host_memory", (node.host_bytes or 0) // node.gpus),
        "nvme": ("room on the drives", (node.nvme_bytes or 0) // node.gpus),
    }
    return {name: (what, size) for name, (what, size) in found.items() if size}


def _draw(estimate: Estimate, path: Path) -> None:
    try:
        module: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ValueError(
            f"{path} needs matplotlib, which is not installed: `pip install matplotlib`; an .html"
            " chart needs nothing"
        ) from None
    tiers = layers(estimate)
    figure = module.Figure(figsize=(4.2 * len(tiers), 5.2), layout="constrained")
    axes = figure.subplots(1, len(tiers), squeeze=False)[0]
    limits = _limits(estimate)
    for axis, (name, lines) in zip(axes, tiers.items(), strict=True):
        _draw_tier(axis, name, lines, limits.get(name))
    heading = describe_job(estimate.inputs).replace("; ", "\n")
    figure.suptitle(f"{describe_model(estimate.inputs.model)}\n{heading}", fontsize=9)
    figure.savefig(path, dpi=120)


def _draw_tier(axis: Any, name: str, lines: list[Line], limit: tuple[str, int] | None) -> None:
    total = sum(line.size_bytes for line in lines)
    bottom = 0.0
    for index, line in enumerate(lines):
        height = line.size_bytes / 1e9
        label = f"{line.what}: {bytes_text(line.size_bytes)}"
        shown = label if line.size_bytes >= _LEAST_SHARE * total else None
        color = _SHADES[index % len(_SHADES)]
        axis.bar([0], [height], bottom=[bottom], width=0.6, color=color, label=shown)
        bottom += height
    if limit is not None:
        what, size = limit
        label = f"{what}: {bytes_text(size)}"
        axis.axhline(size / 1e9, color="#c1121f", linestyle="--", label=label)
    axis.set_xlim(-0.6, 0.6)
    axis.set_xticks([])
    axis.set_ylabel("GB")
    axis.set_title(f"{name}: {bytes_text(total)}", fontsize=10)
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)


def _page(estimate: Estimate) -> str:
    limits = _limits(estimate)
    columns = [_column(name, lines, limits.get(name)) for name, lines in layers(estimate).items()]
    said = "".join(f"<p>{html.escape(line)}</p>" for line in time_lines(estimate))
    return (
        "<!DOCTYPE html><html lang=en><meta charset=utf-8><title>Memory by tier</title><style>"
        "body{font-family:sans-serif;margin:2em auto;max-width:1000px;color:#111}"
        ".row{display:flex;gap:2em;align-items:flex-start}svg{display:block}"
        "td{padding:.1em .5em;font-size:13px}</style>"
        f"<h1>{html.escape(describe_model(estimate.inputs.model))}</h1>"
        f"<p>{html.escape(describe_job(estimate.inputs))}</p>"
        f"<div class=row>{''.join(columns)}</div>{said}</html>\n"
    )


def _column(name: str, lines: list[Line], limit: tuple[str, int] | None) -> str:
    total = sum(line.size_bytes for line in lines)
    what, most = limit or ("", 0)
    top = max(total, most) or 1
    height, y = 320.0, 320.0
    bars, rows = [], []
    for index, line in enumerate(lines):
        color = _SHADES[index % len(_SHADES)]
        size = height * line.size_bytes / top
        y -= size
        label = html.escape(f"{line.what}: {bytes_text(line.size_bytes)}")
        bars.append(
            f"<rect x=10 y={y:.2f} width=120 height={size:.2f} fill='{color}'>"
            f"<title>{label}</title></rect>"
        )
        rows.append(f"<tr><td style='background:{color}'>&nbsp;</td><td>{label}</td></tr>")
    if limit is not None:
        at = height * (1 - most / top)
        bars.append(
            f"<line x1=0 x2=140 y1={at:.2f} y2={at:.2f} stroke='#c1121f' stroke-width=2"
            " stroke-dasharray='6 4'/>"
        )
        rows.append(f"<tr><td>--</td><td>{what}: {bytes_text(most)}</td></tr>")
    return (
        f"<div><h3>{html.escape(name)}: {bytes_text(total)}</h3>"
        f"<svg width=140 height={height + 2:.0f}>{''.join(bars)}</svg>"
        f"<table>{''.join(rows)}</table></div>"
    )
