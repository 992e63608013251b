"""A memory cgroup of one's own, where the machine allows it: a process in it that breaks the limit
is killed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class MemoryCgroup:
    """A cgroup below the one that this process is in."""

    folder: Path
    version: int

    def join(self) -> None:
        """Move the calling process into the cgroup."""
        (self.folder / "cgroup.procs").write_text("0", encoding="ascii")

    @property
    def held_bytes(self) -> int:
        """Bytes that cannot be reclaimed: anonymous memory and mapped files."""
        names = ("rss", "mapped_file") if self.version == 1 else ("anon", "file_mapped")
        lines = (self.folder / "memory.stat").read_text(encoding="ascii").splitlines()
        fields = dict(line.split() for line in lines)
        return sum(int(fields[name]) for name in names)

    def limit(self, size_bytes: int) -> None:
        """Kill whoever takes more from now on."""
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.folder / name).write_text(str(size_bytes), encoding="ascii")


def _candidates() -> Iterator[tuple[Path, int]]:
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _ROOT / "memory" / path.lstrip("/"), 1
        elif not controllers:
            yield _ROOT / path.lstrip("/"), 2


@contextmanager
def memory_cgroup() -> Iterator[tuple[MemoryCgroup | None, str]]:
    """Lend a new cgroup below one's own, or None and the reason."""
    reasons = []
    for parent, version in _candidates():
        folder = parent / f"tierzero-test-{os.getpid()}-{next(_NUMBERS)}"
        limit = folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")
        try:
            folder.mkdir()
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            if limit.exists():
                yield MemoryCgroup(folder, version), ""
                return
            reasons.append(f"{folder} has no {limit.name}")
        finally:
            folder.rmdir()
    yield None, "; ".join(reasons) or "this process is in no memory cgroup"
