"""What the memory of a process consists of, phase by phase, as the kernel counts it."""

from __future__ import annotations

import collections
import contextlib
from pathlib import Path
from typing import Any

_SELF = Path("/proc/self")
_FIELDS = ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem")
_RESET_PEAK = "5"


class MemoryWatch:
    """Notes what is resident at the end of each phase, and the most that was within it."""

    def __init__(self) -> None:
        self.phases: list[dict[str, Any]] = []

    def note(self, phase: str) -> None:
        """End a phase: the next one has a peak of its own."""
        self.phases.append({"phase": phase, **resident()})
        with contextlib.suppress(OSError):  # not every sandbox knows it: peaks then only grow
            (_SELF / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")

    def peak_bytes(self, after: str = "", without: str = "") -> int:
        """Return the most that was resident, of all phases or of those after one.

        Phases of the name `without` do not count.
        """
        names = [each["phase"] for each in self.phases]
        start = names.index(after) + 1 if after else 0
        counted = (each for each in self.phases[start:] if each["phase"] != without)
        return max(int(each["VmHWM"]) for each in counted)


def resident() -> dict[str, int]:
    """Return the resident bytes of this process by kind, and its peak since the last reset."""
    found = {}
    for line in (_SELF / "status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in _FIELDS:
            found[name] = int(value.split()[0]) * 1024
    return found


def mappings(least_bytes: int = 4 << 20) -> list[tuple[str, int]]:
    """Return `(what, resident bytes)` of this process's mappings, greatest first.

    Files are summed up by name. What has none is summed up by size: blocks of 64 MiB and more,
    which arenas and large tensors take, and smaller ones, which are heaps.
    """
    sizes: collections.Counter[str] = collections.Counter()
    name = ""
    for line in (_SELF / "smaps").read_text(encoding="utf-8").splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            fields = line.split(maxsplit=5)
            name = Path(fields[5]).name if len(fields) > 5 else _unnamed(first)
        elif first == "Rss:":
            sizes[name] += int(line.split()[1]) * 1024
    return [each for each in sizes.most_common() if each[1] >= least_bytes]


def _unnamed(bounds: str) -> str:
    start, stop = (int(each, 16) for each in bounds.split("-"))
    size = stop - start
    if size >= 1 << 28:
        return f"without name, {size >> 20} MiB"
    return "without name, 64 MiB and more" if size >= 1 << 26 else "without name, smaller"
