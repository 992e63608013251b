"""What this machine can give: host memory within its limits, cores within its cpuset."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HOST_MEMORY_MARGIN = 0.8
"""Share of the available host memory that "auto" takes; the rest is for Python and the batch."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIST = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _memory_available_bytes() -> int:
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_MEMINFO} has no MemAvailable line; set tiers.host_memory")


def _cgroup_directories() -> list[tuple[Path, str, str]]:
    """Return `(directory, limit file, usage file)` of every memory cgroup this process is in."""
    found = []
    try:
        lines = _CGROUP_LIST.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if not controllers:
            names, root = ("memory.max", "memory.current"), _CGROUP_ROOT
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            root = _CGROUP_ROOT / "memory"
        else:
            continue
        directory = root / relative
        while True:
            found.append((directory, *names))
            if directory == root or root not in directory.parents:
                break
            directory = directory.parent
    return found


def _reclaimable_bytes(directory: Path) -> int:
    """Return the file pages of a cgroup that the kernel gives up before it kills anybody."""
    try:
        lines = (directory / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    fields = dict(line.split() for line in lines)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A cgroup that bounds the memory of this process."""

    version: str
    path: Path
    limit_bytes: int
    usage_bytes: int


def memory_limits() -> list[MemoryLimit]:
    """Return every cgroup, of v1 or v2, that bounds the memory of this process."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = []
    for directory, limit_name, usage_name in _cgroup_directories():
        limit = _read_int(directory / limit_name)
        usage = _read_int(directory / usage_name)
        if limit is not None and usage is not None and limit < total:
            version = "cgroup v2" if limit_name == "memory.max" else "cgroup v1"
            found.append(MemoryLimit(version, directory, limit, usage))
    return found


def available_host_bytes() -> int:
    """Return the host bytes that can still be used: MemAvailable within every cgroup limit.

    Never MemTotal: virtual machines grow and shrink.
    """
    available = _memory_available_bytes()
    for directory, limit_name, usage_name in _cgroup_directories():
        limit = _read_int(directory / limit_name)
        usage = _read_int(directory / usage_name)
        if limit is not None and usage is not None:
            held = max(usage - _reclaimable_bytes(directory), 0)
            available = min(available, max(limit - held, 0))
    return available


def thread_count(local_world_size: int) -> int:
    """Return the threads that one rank may use: its share of the cpuset, or OMP_NUM_THREADS."""
    cores = max(len(os.sched_getaffinity(0)) // max(local_world_size, 1), 1)
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(wanted), cores) if wanted.isdigit() and int(wanted) else cores
