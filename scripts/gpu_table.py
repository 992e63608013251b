"""The table of what the GPU benchmark has measured, from the JSON of its rows."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

GB = 1_000_000_000
HEAD = (
    "row",
    "ours, s",
    "spread, s",
    "peer, s",
    "ratio",
    "device peak, GB (peer)",
    "of plan",
    "RSS above the baseline, GB (peer)",
    "start-up, s (peer)",
    "in / out over the link, GB",
    "NVMe read / written, GB",
    "of the drive's limit",
    "last loss (peer)",
)
_PEER_HEAD = (
    "peer's run",
    "step, s",
    "spread, s",
    "device peak, GB",
    "RSS, GB + baseline",
    "start-up, s",
    "losses",
)


def peer_seconds(outcome: dict[str, Any]) -> float | None:
    """Return the median step of a peer's outcome, the first one left out."""
    rows = outcome.get("rows", [])[1:]
    return statistics.median(row[3] for row in rows) if rows else None


def line(found: dict[str, Any]) -> list[str]:
    """Return the cells of one row."""
    ours, peer = found["ours"], found.get("peer") or {}
    theirs, seconds = peer_seconds(peer), ours["median_seconds"]
    planned, peak = ours["planned_device_bytes"], ours["device_peak_bytes"]
    ledger, rss = ours["ledger"], ours["rss_bytes"]
    copied, nvme, drive = ledger.get("copied_bytes", {}), ledger["nvme_bytes"], ours.get("drive")
    peer_rss = GB * peer["rss_peak_gb"] - peer["baseline_bytes"] if "baseline_bytes" in peer else 0
    moved = [
        sum(size for name, size in nvme.items() if name.startswith(f"nvme {way}")) / GB
        for way in ("read", "write")
    ]
    steps, wanted = len(ours.get("counted_seconds", ())), found.get("steps")
    return [
        found["row"]
        if steps == wanted or not steps
        else f"{found['row']}, {steps} of {wanted} steps",
        f"{seconds:.3f}",
        " to ".join(f"{each:.3f}" for each in ours["spread_seconds"]),
        f"{theirs:.2f}" if theirs else "-",
        f"{theirs / seconds:.1f}" if theirs else "-",
        beside(peak / GB if peak else None, peer.get("gpu_peak_gb")),
        f"{peak / planned:.3f}" if peak and planned else "-",
        beside((rss["peak"] - rss["before"]) / GB, peer_rss / GB if peer_rss else None),
        beside(sum(ours["startup_seconds"].values()), peer.get("init_s")),
        f"{copied.get('in', 0) / GB:.1f} / {copied.get('out', 0) / GB:.1f}",
        f"{moved[0]:.2f} / {moved[1]:.2f}",
        f"{drive['share']:.2f} ({drive['schedule']}), {drive['share_of_free_bursts']:.2f} of free"
        if drive
        else "-",
        losses(ours["rows"], peer.get("rows", [])),
    ]


def described(found: dict[str, Any]) -> str:
    """Return what one row has found, in words."""
    named = zip(HEAD[1:], line(found)[1:], strict=True)
    return "; ".join(f"{name}: {value}" for name, value in named)


def beside(ours: float | None, theirs: float | None) -> str:
    """Return two numbers as far as they are known, the peer's in brackets."""
    own = f"{ours:.2f}" if ours is not None else "-"
    return own + (f" ({theirs:.2f})" if theirs is not None else "")


def losses(ours: list[dict[str, float]], theirs: list[list[float]]) -> str:
    """Return the losses of the last step that both have made."""
    last = min(len(ours), len(theirs) or len(ours)) - 1
    text = f"{ours[last]['loss']:.4f}"
    return f"{text} ({theirs[last][4]:.4f}, step {last + 1})" if theirs else text


def peer_line(name: str, peer: dict[str, Any]) -> list[str]:
    """Return the cells of one run of the peer."""
    steps = [row[3] for row in peer["rows"][1:]]
    baseline, rss = peer["baseline_bytes"] / GB, peer.get("rss_peak_gb")
    return [
        name,
        f"{statistics.median(steps):.2f}" if steps else "-",
        f"{min(steps):.2f} to {max(steps):.2f}" if steps else "-",
        beside(peer.get("gpu_peak_gb"), None),
        f"{rss - baseline:.2f} + {baseline:.2f}" if rss is not None else "-",
        f"{peer['init_s']:.1f}" if "init_s" in peer else "-",
        " ".join(f"{row[4]:.4f}" for row in peer["rows"]),
    ]


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the files of a folder hold, by name: rows of ours and runs of the peer.

    Raises:
        SystemExit: naming a file that is not whole, because its run was cut short, say.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            outcome = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SystemExit(f"{path} is not JSON ({error}): remove it, or run it again") from None
        if not isinstance(outcome, dict):
            raise SystemExit(f"{path} holds no outcome of a run, but {outcome!r:.40}: remove it")
        found[path.stem] = outcome
    return found


def merge(folder: Path) -> str:
    """Return the tables of all rows in a folder, as Markdown: the peer's runs, then ours."""
    peers, rows = [], []
    for name, found in outcomes(folder).items():
        if "ours" in found:
            rows.append(line(found))
        elif "baseline_bytes" in found:
            peers.append(peer_line(name, found))
    return "\n\n".join(
        "\n".join(f"| {' | '.join(each)} |" for each in (head, ["---"] * len(head), *table))
        for head, table in ((_PEER_HEAD, peers), (HEAD, rows))
        if table
    )
