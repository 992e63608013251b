"""What a durable run tells of itself."""

from __future__ import annotations

from dataclasses import dataclass

BY_CHECKPOINT = (
    "call engine.save_checkpoint(folder), and load that with engine.load_checkpoint(folder) in a"
    " run of another tiers.durable.name"
)
"""How a run goes on that cannot as it is."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What `zero.initialize` found and took up."""

    name: str
    step: int
    sequence: int
    read_bytes: int
    seconds: float
    fell_back: tuple[str, ...] = ()
    """Why newer commits were not taken, a line for each."""
    changes: tuple[str, ...] = ()
    """What differs from the run that committed, and what was done, a line for each."""

    def describe(self) -> str:
        """Return it in one line, and one more for everything that was not as before."""
        line = (
            f"durable run {self.name!r}: resumed at step {self.step} (commit {self.sequence};"
            f" {self.read_bytes:,} bytes read and checked in {self.seconds:.2f} s)"
        )
        return "\n".join((line, *self.fell_back, *self.changes))


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What the last commit was, and what it cost beyond training."""

    step: int
    sequence: int
    resident_bytes: int
    """Written from memory; what rests on NVMe had been written by the steps."""
    manifest_bytes: int
    seconds: float


def other_plan(then_bytes: int, now_bytes: int) -> str:
    """Say that a run was planned otherwise, and how to go on."""
    planned = f"with {then_bytes} bytes of tiers.host_memory, and {now_bytes} are given now, or "
    budget = f"tiers.host_memory to {then_bytes} and the rest" if then_bytes != now_bytes else "it"
    return (
        f"it was planned {planned if then_bytes != now_bytes else ''}with another optimizer, other"
        " types, parameter groups, frozen parameters, offload devices, tiers.device_memory,"
        f" sub_group_size or state_format, or by another version; set {budget} as it was. To go on"
        f" with what is given now, start it once more as it was, {BY_CHECKPOINT}"
    )
