"""What the plan said and what memory and disk really hold, by category and tier."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from aio_ops import Span
from estimators import MemoryPlan, Section, Tier
from estimators.summary import (
    COLLECTIVE_SCRATCH,
    GRADIENT_SCRATCH,
    LIVE_PARAMETERS,
    STAGING,
    START_EXCESS,
    WHOLE,
)
from offload import Memory, Store, disk_bytes, process_bytes, resident_set_bytes
from zero.unit import Unit

FILE_SLACK_BYTES = 1 << 20
"""What a file system may add to a swap file for its own tables."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One category on one tier: the bytes that were planned and those that are there."""

    tier: Tier
    what: str
    planned_bytes: int
    actual_bytes: int | None
    """None where nothing can be measured: not yet, on a simulated disk, inside a library."""

    def to_dict(self) -> dict[str, Any]:
        """Return the line as plain data."""
        return {
            "tier": self.tier.value,
            "what": self.what,
            "planned_bytes": self.planned_bytes,
            "actual_bytes": self.actual_bytes,
        }

    @property
    def exceeds(self) -> bool:
        """Whether more is there than was planned."""
        slack = FILE_SLACK_BYTES if self.tier is Tier.NVME else 0
        return self.actual_bytes is not None and self.actual_bytes > self.planned_bytes + slack


def live_parameter_bytes(units: Iterable[Unit]) -> int:
    """Return the bytes of the flat buffers that a forward or a backward holds at this moment."""
    return sum(
        unit.live_bytes
        for unit in units
        if unit.forward_depth or unit.backward_tokens or not unit.is_unsharded
    )


def memory_lines(plan: MemoryPlan, store: Store) -> list[MemoryLine]:
    """Compare every line of the plan with what the kernel says of the store.

    Peaks of what comes and goes are those that the ledger has seen.
    """
    lines = [
        MemoryLine(
            tier,
            f"{section.name.lower()}s resident",
            plan.resident_section_bytes(tier, section),
            present_bytes(store.residents.spans(tier, section)),
        )
        for tier in (Tier.DEVICE, Tier.HOST)
        for section in (Section.PARAMETER, Section.GRADIENT, Section.STATE)
    ]
    lines += [
        *peak_lines(plan, store),
        MemoryLine(Tier.DEVICE, COLLECTIVE_SCRATCH, plan.collective_scratch_bytes, None),
        MemoryLine(Tier.DEVICE, START_EXCESS, plan.start_excess_bytes, None),
        MemoryLine(
            Tier.HOST,
            "slots",
            plan.slots.total_bytes,
            resident_set_bytes(slot.span for slot in store.slots),
        ),
        MemoryLine(
            Tier.HOST,
            STAGING,
            plan.staging_bytes,
            present_bytes([store.staging] if store.staging is not None else []),
        ),
        MemoryLine(Tier.HOST, WHOLE, plan.whole.host_bytes(plan.request), None),
        MemoryLine(Tier.NVME, "swap file", plan.swap_file_bytes, disk_bytes(store.swap_file)),
    ]
    return [line for line in lines if line.planned_bytes or line.actual_bytes]


def peak_lines(plan: MemoryPlan, store: Store) -> list[MemoryLine]:
    """Compare the plan of what comes and goes with the peaks that the ledger has seen."""
    peaks = store.ledger.peaks
    planned = {
        LIVE_PARAMETERS: plan.live_parameter_bytes,
        GRADIENT_SCRATCH: plan.gradient_scratch_bytes,
    }
    return [
        MemoryLine(Tier.DEVICE, what, planned_bytes, peaks.get(what))
        for what, planned_bytes in planned.items()
    ]


def present_bytes(memories: Iterable[Memory]) -> int:
    """Return the bytes that are in memory: pages of the host, all of what is on a device."""
    found = list(memories)
    spans = [each for each in found if isinstance(each, Span)]
    on_device = sum(each.size_bytes for each in found if not isinstance(each, Span))
    return resident_set_bytes(spans) + on_device


class PlanCheck:
    """Compares the plan with what is there when steps end: all of it once, peaks each time."""

    def __init__(self) -> None:
        self.first_step: list[dict[str, Any]] | None = None
        """What the comparison after the first step has found."""
        self._named: set[str] = set()
        """What has exceeded its plan: each is worth one warning."""

    def close_step(self, plan: MemoryPlan, store: Store, steps: int) -> None:
        """Warn of every category that took more than was planned, by name and with both numbers.

        Args:
            plan: the plan of this rank.
            store: what was allocated from it.
            steps: how many steps were taken.
        """
        if self.first_step is None:
            lines = memory_lines(plan, store)
            self.first_step = [line.to_dict() for line in lines]
            store.heap.trim()  # kernels were compiled
        else:
            lines = peak_lines(plan, store)
        when = "the first step" if steps == 1 else f"step {steps}"
        for line in lines:
            if not line.exceeds or line.what in self._named:
                continue
            self._named.add(line.what)
            warnings.warn(
                f"{when} took {line.actual_bytes} bytes of {line.tier.value} memory for"
                f" {line.what}, but {line.planned_bytes} were planned; the budget may be exceeded:"
                " lower tiers.host_memory by the difference, or look for what holds several units"
                " at once (a backward with create_graph=True does: tiers.double_backward plans for"
                " it)",
                RuntimeWarning,
                stacklevel=5,
            )


def memory_report(plan: MemoryPlan, store: Store, *, baseline_bytes: int) -> dict[str, Any]:
    """Return planned and actual bytes by category and tier, and those of the whole process.

    Args:
        plan: the plan of this rank.
        store: what was allocated from it.
        baseline_bytes: resident bytes of the process before anything was allocated.
    """
    process = process_bytes("VmRSS", "VmHWM", "VmLck", "VmPin")
    return {
        "lines": [line.to_dict() for line in memory_lines(plan, store)],
        "process": {
            "rss_at_start_bytes": baseline_bytes,
            "rss_bytes": process["VmRSS"],
            "peak_rss_bytes": process["VmHWM"],
            "locked_bytes": process["VmLck"],
            "pinned_bytes": process["VmPin"],  # by a ring: the same pages, counted once a buffer
        },
    }


def memory_table(report: dict[str, Any]) -> Table:
    """Return a memory report as a table for people."""
    table = Table(title="Memory of this rank", title_justify="left")
    table.add_column("tier")
    table.add_column("what")
    table.add_column("planned", justify="right")
    table.add_column("actual", justify="right")
    for line in report["lines"]:
        actual = line["actual_bytes"]
        table.add_row(
            line["tier"],
            line["what"],
            f"{line['planned_bytes']:,}",
            "-" if actual is None else f"{actual:,}",
        )
    table.add_section()
    for name, size in report["process"].items():
        table.add_row("", name.removesuffix("_bytes").replace("_", " "), "", f"{size:,}")
    return table
