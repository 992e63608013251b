"""What swap_sweep.py measures, the file that it goes on from, and who is measured again."""

import fcntl
import json
import os
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

KEPT = 3
"""Cases of each budget that are measured to the end."""

LEAST_ROUNDS = 3
WORTH = 1.02
"""A gain below this is worth no more memory."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One way to page."""

    host_bytes: int
    state_format: str
    sub_group_numel: int
    slot_count: int
    write_burst: int
    update_device: str

    def describe(self) -> str:
        """Return it in words."""
        bursts = f", bursts of {self.write_burst}" if self.write_burst > 1 else ""
        where = "" if self.update_device == "auto" else f", updated on the {self.update_device}"
        return (
            f"{size_text(self.host_bytes)} of host memory, format {self.state_format}, sub-groups "
            f"of {numel_text(self.sub_group_numel)}, {self.slot_count} slots{bursts}{where}"
        )

    def part(self) -> dict[str, Any]:
        """Return it as a part of a configuration."""
        return {
            "zero_optimization": {"sub_group_size": self.sub_group_numel},
            "tiers": {
                "host_memory": self.host_bytes,
                "state_format": self.state_format,
                "slot_count": self.slot_count,
                "write_burst": self.write_burst,
                "update_device": self.update_device,
            },
        }


@dataclass(frozen=True, slots=True)
class Step:
    """What a training step of one case took, by the median of those timed."""

    seconds: float
    paging_seconds: float
    """Of the update, and of waits before it: what a case changes. Computing is the same in all."""
    read_bytes: int
    write_bytes: int
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds by activity."""


def size_text(size_bytes: int) -> str:
    """Return bytes in GB or MB."""
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 10**9 else f"{size_bytes / 1e6:.3g} MB"


def numel_text(numel: int) -> str:
    """Return a number of elements."""
    for unit, shift in (("Mi", 20), ("Ki", 10)):
        if numel % (1 << shift) == 0:
            return f"{numel >> shift} {unit}"
    return str(numel)


def seconds_text(seconds: float) -> str:
    """Return a time with three digits."""
    return f"{seconds:.3g}"


class Results:
    """Measurements in a file of JSON lines, which a sweep that was killed goes on from."""

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        self.path = path
        self.steps: dict[Case, list[Step]] = {}
        self.refused: dict[Case, str] = {}
        self.found = 0
        """Measurements that were there already."""
        try:
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise SystemExit(f"--results {path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"another sweep writes {path}; wait for it, or name another with --results"
            ) from None
        self._file.seek(0)
        text = self._file.read()
        whole, _, torn = text.rpartition("\n")
        if torn:  # killed while it wrote
            self._file.truncate(len(text.encode()) - len(torn.encode()))
        lines = whole.splitlines()
        header = {"sweep": 1, "asked": asked}
        if not lines:
            self._append(header)
            return
        self._check(lines[0], header)
        for line in lines[1:]:
            self._take(json.loads(line))
        self.found = sum(map(len, self.steps.values())) + len(self.refused)

    def add(self, case: Case, step: Step) -> None:
        """Keep a measurement, so that no kill can lose it."""
        self._append({"case": asdict(case), "step": asdict(step)})
        self.steps.setdefault(case, []).append(step)

    def refuse(self, case: Case, reason: str) -> None:
        """Keep why a case cannot be measured."""
        self._append({"case": asdict(case), "refused": reason})
        self.refused[case] = reason

    def seconds(self, case: Case) -> float:
        """Return the seconds of a step of a case that was measured, the median."""
        return statistics.median(step.seconds for step in self.steps[case])

    def paging(self, case: Case) -> float:
        """Return the seconds that are compared: of the update and of waits before it."""
        return statistics.median(step.paging_seconds for step in self.steps[case])

    def close(self) -> None:
        """Close the file; it stays."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _append(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _check(self, line: str, header: dict[str, Any]) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or "sweep" not in found:
            raise SystemExit(f"{self.path} is no results file of a sweep; name another")
        if found == header:
            return
        asked = found.get("asked", {})
        differing = [
            f"{name}: {asked.get(name)!r} there, {value!r} now"
            for name, value in header["asked"].items()
            if asked.get(name) != value
        ]
        raise SystemExit(
            f"{self.path} holds another sweep ({'; '.join(differing)}); delete it, or name another "
            "with --results"
        )

    def _take(self, row: dict[str, Any]) -> None:
        case = Case(**row["case"])
        if "refused" in row:
            self.refused[case] = row["refused"]
        else:
            self.steps.setdefault(case, []).append(Step(**row["step"]))


def next_case(cases: Sequence[Case], results: Results) -> Case | None:
    """Return what to measure next, or None when all is clear.

    Every case once, in a random but fixed order; then the better half of each budget again, and so
    on down to the last few, which are measured `LEAST_ROUNDS` times. All follows from what has been
    measured, so a sweep that was killed goes on as if it had not been.
    """
    usable = [case for case in cases if case not in results.refused]
    for round_number in range(1, LEAST_ROUNDS + len(usable).bit_length()):
        alive = [
            case
            for budget in sorted({case.host_bytes for case in usable})
            for case in _alive(
                [case for case in usable if case.host_bytes == budget], results, round_number
            )
        ]
        missing = [case for case in alive if len(results.steps.get(case, ())) < round_number]
        if missing:
            return random.Random(round_number).sample(sorted(missing), len(missing))[0]
        if round_number >= LEAST_ROUNDS and _is_last(alive):
            return None
    return None


def _is_last(alive: Sequence[Case]) -> bool:
    budgets = [case.host_bytes for case in alive]
    return max(map(budgets.count, budgets), default=0) <= KEPT


def _alive(cases: list[Case], results: Results, round_number: int) -> list[Case]:
    """Return which cases of one budget are in a round: half of those of the round before."""
    alive = cases
    for earlier in range(1, round_number):
        if any(len(results.steps.get(case, ())) < earlier for case in alive):
            return alive
        if len(alive) > KEPT:
            ranked = sorted(alive, key=lambda case: _up_to(results, case, earlier))
            alive = ranked[: max(KEPT, (len(alive) + 1) // 2)]
    return alive


def _up_to(results: Results, case: Case, rounds: int) -> float:
    return statistics.median(step.paging_seconds for step in results.steps[case][:rounds])


def best_of(cases: Iterable[Case], results: Results) -> dict[int, Case]:
    """Return the fastest case of each budget, of those measured most often."""
    best: dict[int, Case] = {}
    for budget in sorted({case.host_bytes for case in cases}):
        own = [case for case in cases if case.host_bytes == budget and case in results.steps]
        most = max((len(results.steps[case]) for case in own), default=0)
        last = [case for case in own if len(results.steps[case]) == most]
        if last:
            best[budget] = min(last, key=results.paging)
    return best


def choose(best: dict[int, Case], results: Results) -> Case:
    """Return the fastest of all, or one with less memory that is as good as it."""
    fastest = min(map(results.paging, best.values()))
    return next(case for _, case in sorted(best.items()) if results.paging(case) <= WORTH * fastest)
