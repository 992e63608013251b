"""The directories that a rank's swap file is striped over, and how much each may hold."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace

from offload import SwapDirectory
from zero.config import preflight
from zero.settings import NvmeSettings


def nvme_budget(
    nvme: Sequence[NvmeSettings], local_world_size: int, alignment_bytes: int
) -> int | None:
    """Return the most that a rank may use in all directories; None if one has no limit."""
    total_bytes = 0
    for entry in nvme:
        if entry.capacity_bytes is None:
            return None
        share_bytes = entry.capacity_bytes // local_world_size
        if len(nvme) > 1:  # stripes are whole sectors
            share_bytes -= share_bytes % alignment_bytes
        total_bytes += share_bytes
    return total_bytes if nvme else None


def check_paths(
    nvme: Sequence[NvmeSettings], swap_file_bytes: int, local_world_size: int
) -> tuple[SwapDirectory, ...]:
    """Return where a rank's swap file goes, once every directory was looked at.

    Raises:
        ConfigError: a directory is on a network file system.
        OSError: a directory cannot be used, or they are too full together.
    """
    needed_bytes = swap_file_bytes * local_world_size
    if len(nvme) == 1:
        _look_at(nvme[0], needed_bytes)
        return (SwapDirectory(nvme[0].path),)
    usable = [_usable(entry) for entry in nvme]
    if needed_bytes > sum(entry.capacity_bytes or 0 for entry in usable):
        rooms = ", ".join(f"{entry.path}: {entry.capacity_bytes}" for entry in usable)
        raise OSError(
            errno.ENOSPC,
            f"tiers.nvme: the plan needs {needed_bytes} bytes, and the directories together may "
            f"hold fewer ({rooms}); free some space, add a directory, or raise tiers.host_memory",
        )
    return tuple(
        replace(entry, capacity_bytes=(entry.capacity_bytes or 0) // local_world_size)
        for entry in usable
    )


def describe_paths(directories: Sequence[SwapDirectory]) -> str:
    """Return the directories in words."""
    return ", ".join(str(entry.path) for entry in directories)


def _usable(entry: NvmeSettings) -> SwapDirectory:
    """Return a directory with what all ranks of the node may use there."""
    free_bytes = _look_at(entry, 0)
    limit = entry.capacity_bytes
    room_bytes = free_bytes if limit is None else min(limit, free_bytes)
    return SwapDirectory(entry.path, room_bytes, entry.weight)


def _look_at(entry: NvmeSettings, needed_bytes: int) -> int:
    found = preflight(entry.path, needed_bytes, allow_any_file_system=entry.allow_any_file_system)
    return found.free_bytes
