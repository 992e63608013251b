"""What a ledger says about the steps that have ended: data, JSON lines and a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from estimators import DriveRates


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of this rank, as it was measured."""

    step: int
    seconds: float
    """From the end of the step before (or the start of the engine) to the end of this one."""
    nvme_bytes: Mapping[str, int]
    """For example {"nvme read parameter": 4096}."""
    resident_bytes: Mapping[str, int]
    """Bytes used where they rest: {"host state": 4096}."""
    activity_seconds: Mapping[str, float]
    busy_seconds: float
    """Seconds in which a transfer was in flight."""
    tokens: int
    copied_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes copied between host memory and a device: {"in": 4096, "out": 4096}."""
    rank_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the other ranks' parts in what ranks exchanged: {"gathered": 4096}."""
    updated_groups: Mapping[str, int] = field(default_factory=dict)
    """Sub-groups by where they were updated: {"host": 3, "device": 5}."""

    @property
    def read_bytes(self) -> int:
        """Bytes read from NVMe."""
        return sum(size for name, size in self.nvme_bytes.items() if name.startswith("nvme read"))

    @property
    def written_bytes(self) -> int:
        """Bytes written to NVMe."""
        return sum(size for name, size in self.nvme_bytes.items() if name.startswith("nvme write"))

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes that the step used of each tier: moved from and to NVMe, or used in memory."""
        totals = {"device": 0, "host": 0, "nvme": self.read_bytes + self.written_bytes}
        for name, size in self.resident_bytes.items():
            totals[name.partition(" ")[0]] += size
        return totals

    @property
    def stalls(self) -> dict[str, float]:
        """Seconds of the step by cause: waits for reads, writes and slots; the rest computed."""
        waits = {kind: self.activity_seconds[f"{kind} wait"] for kind in ("read", "write", "slot")}
        return {**waits, "compute": max(self.seconds - sum(waits.values()), 0.0)}

    @property
    def hit_rate(self) -> float | None:
        """Share of the bytes read that were in memory already; None if nothing was used."""
        resident = sum(self.resident_bytes.values())
        used = resident + self.read_bytes
        return resident / used if used else None

    def limit_seconds(self, rates: DriveRates | None) -> float | None:
        """Return the seconds that the drive needs at its limit for what the step moved."""
        return None if rates is None else rates.seconds(self.read_bytes, self.written_bytes)

    def to_dict(self, rates: DriveRates | None, parameter_numel: int) -> dict[str, Any]:
        """Return the step as plain data; what cannot be known is None."""
        moved = self.read_bytes + self.written_bytes
        limit = self.limit_seconds(rates)
        return {
            "step": self.step,
            "seconds": self.seconds,
            "bytes_by_tier": self.bytes_by_tier,
            "nvme_bytes": dict(self.nvme_bytes),
            "resident_bytes": dict(self.resident_bytes),
            "copied_bytes": dict(self.copied_bytes),
            "rank_bytes": dict(self.rank_bytes),
            "updated_groups": dict(self.updated_groups),
            "nvme_gb_per_s": moved / self.seconds / 1e9 if self.seconds else None,
            "nvme_gb_per_s_while_busy": _ratio(moved / 1e9, self.busy_seconds),
            "share_of_drive_limit": None if limit is None else _ratio(limit, self.seconds),
            "share_of_drive_limit_while_busy": (
                None if limit is None else _ratio(limit, self.busy_seconds)
            ),
            "stall_seconds": self.stalls,
            "activity_seconds": dict(self.activity_seconds),
            "written_bytes_per_parameter": _ratio(self.written_bytes, parameter_numel),
            "written_bytes_per_token": _ratio(self.written_bytes, self.tokens),
            "residency_hit_rate": self.hit_rate,
        }


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """The steps of one rank that have ended, oldest first."""

    steps: tuple[StepRecord, ...]
    rates: DriveRates | None
    parameter_numel: int
    """Trained elements of this rank."""

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one dictionary of plain data a step."""
        return [step.to_dict(self.rates, self.parameter_numel) for step in self.steps]

    def json_lines(self) -> str:
        """Return one line of JSON a step."""
        return "".join(f"{json.dumps(step)}\n" for step in self.to_dicts())

    def table(self) -> Table:
        """Return the median step as a table for people."""
        table = Table(title=f"A step (median of {len(self.steps)})", title_justify="left")
        table.add_column("what")
        table.add_column("value", justify="right")
        for name, text in self._lines() if self.steps else ():
            table.add_row(name, text)
        if self.rates is not None:
            table.caption = f"the drive's limit: {self.rates.describe()}"
        return table

    def _lines(self) -> Iterator[tuple[str, str]]:
        rows = self.to_dicts()

        def median(*path: str) -> float | None:
            found = []
            for row in rows:
                value: Any = row
                for key in path:
                    value = value[key]
                if value is not None:
                    found.append(value)
            return statistics.median(found) if found else None

        yield "seconds", _text(median("seconds"), "{:.4f}")
        for name in ("read", "write", "slot", "compute"):
            yield f"of these: {name}", _text(median("stall_seconds", name), "{:.4f}")
        for tier in ("device", "host", "nvme"):
            yield f"bytes on {tier}", _text(median("bytes_by_tier", tier), "{:,.0f}")
        moved = [(name, median("nvme_bytes", name)) for name in rows[0]["nvme_bytes"]]
        yield from ((f"of these: {name}", _text(size, "{:,.0f}")) for name, size in moved if size)
        passed = [("copied_bytes", "bytes copied", way) for way in rows[-1]["copied_bytes"]]
        passed += [("rank_bytes", "bytes", what) for what in rows[-1]["rank_bytes"]]
        passed += [
            ("updated_groups", "sub-groups updated on the", side)
            for side in rows[-1]["updated_groups"]
        ]
        for kind, name, way in passed:
            if rows[-1][kind][way]:
                yield f"{name} {way}", _text(median(kind, way), "{:,.0f}")
        yield "NVMe GB/s", _text(median("nvme_gb_per_s"), "{:.3f}")
        yield "NVMe GB/s while busy", _text(median("nvme_gb_per_s_while_busy"), "{:.3f}")
        yield "share of the drive's limit", _text(median("share_of_drive_limit"), "{:.1%}")
        yield (
            "share of the drive's limit while busy",
            _text(median("share_of_drive_limit_while_busy"), "{:.1%}"),
        )
        yield "bytes written a parameter", _text(median("written_bytes_per_parameter"), "{:.2f}")
        yield "bytes written a token", _text(median("written_bytes_per_token"), "{:,.1f}")
        yield "residency hit rate", _text(median("residency_hit_rate"), "{:.1%}")


def _ratio(value: float, base: float) -> float | None:
    return value / base if base else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
