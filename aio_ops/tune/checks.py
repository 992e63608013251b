"""What can be tuned at all, found out before anything is written."""

import warnings
from pathlib import Path

from aio_ops.disk import Disk, look_at
from aio_ops.tune.bench import Allowance, Bench

SMALLEST_HALF_BYTES = 16 << 20


class TuneError(Exception):
    """Why a directory cannot be tuned: what happened, and what to do."""


def check(directory: Path) -> Disk:
    """Return the disk under a directory that can be tuned, or raise TuneError."""
    if not directory.exists():
        raise TuneError(
            f"{directory} does not exist (working directory {Path.cwd()}); make it with "
            f"`mkdir -p {directory}`, or name another"
        )
    if not directory.is_dir():
        raise TuneError(f"{directory} is not a directory; name the one it lies in")
    try:
        return look_at(directory)
    except OSError as error:
        raise TuneError(f"{directory} cannot be looked at: {error.strerror}") from error


def half_bytes_of(wanted_bytes: int, disk: Disk) -> int:
    """Return how large half of the scratch file is: at most what half of the free space holds."""
    room_bytes = disk.free_bytes // 4 >> 20 << 20
    if room_bytes < SMALLEST_HALF_BYTES:
        raise TuneError(
            f"{disk.path} has {disk.free_bytes} bytes free, and measuring takes at least "
            f"{4 * SMALLEST_HALF_BYTES} (a scratch file of half of that); free some space, or "
            "name another directory"
        )
    return max(SMALLEST_HALF_BYTES, min(wanted_bytes, room_bytes) >> 22 << 22)


def open_bench(directory: Path, half_bytes: int, allowance: Allowance) -> Bench:
    """Open a bench, or say why the directory has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it is not direct is told
            return Bench(directory, half_bytes, allowance)
    except OSError as error:
        remedy = "give this user the right to write there, or name another directory"
        raise TuneError(
            f"{directory} cannot be measured: {error.strerror or error}; {remedy}"
        ) from error
