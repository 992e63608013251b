"""What this machine and a directory offer to each engine, and why an engine cannot be had."""

import contextlib
import os
import platform
import resource
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aio_ops.linux import require_linux, stated_direct_alignments
from aio_ops.memory import HostArena
from aio_ops.native_engine import native_unavailable_reason
from aio_ops.swapfile import SwapFile
from aio_ops.transfer import Ticket, TransferError, TransferFile

NATIVE_KINDS = ("io_uring", "kernel_aio", "threads")  # the best first
_TEST_BYTES = 4096
_TEST_DEPTH = 8
_UNLIMITED = "unlimited"


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What was found out; None stands for what the machine does not say."""

    path: Path
    kernel: str
    io_uring_disabled: int | None
    seccomp: bool | None
    memlock_bytes: int | None
    memlock_unlimited: bool
    aio_max: int | None
    aio_used: int | None
    file_system: str | None
    direct: bool
    memory_alignment_bytes: int | None
    offset_alignment_bytes: int | None
    rotational: bool | None
    free_bytes: int
    refusals: Mapping[str, str]

    @property
    def best(self) -> str:
        """The engine to use: the best that was not refused."""
        return next((kind for kind in NATIVE_KINDS if kind not in self.refusals), "python")

    @property
    def reason(self) -> str:
        """Why that engine, in one line: what was refused before it and why."""
        better = [kind for kind in NATIVE_KINDS if kind in self.refusals]
        refused = "; ".join(f"{kind} was refused: {self.refusals[kind]}" for kind in better)
        return refused or f"the best engine, and it works in {self.path}"

    def lines(self) -> list[str]:
        """Return the report as text, a fact a line."""
        memlock = _UNLIMITED if self.memlock_unlimited else f"{self.memlock_bytes} bytes"
        return [
            f"path: {self.path}",
            f"kernel: {self.kernel}",
            f"kernel.io_uring_disabled: {_said(self.io_uring_disabled)}",
            f"seccomp filter on this process: {_said(self.seccomp)}",
            f"memory that may be locked: {memlock}",
            f"kernel AIO events: {_said(self.aio_used)} of {_said(self.aio_max)} in use",
            f"file system: {_said(self.file_system)}, {self.free_bytes} bytes free",
            f"direct I/O: {_said(self.direct)}",
            f"its alignments: memory {_said(self.memory_alignment_bytes)}, "
            f"offsets {_said(self.offset_alignment_bytes)}",
            f"rotational disk: {_said(self.rotational)}",
            *(f"{kind}: {self.refusals.get(kind, 'works')}" for kind in NATIVE_KINDS),
            f"best engine: {self.best}",
        ]


def report(path: Path, *, stops_at_best: bool = False) -> ProbeReport:
    """Find out what `path`, a directory that may be written to, and this machine offer.

    Each engine is tried on a small file in the directory, which leaves nothing behind; to choose
    one, those after the best that works need not be tried.
    """
    require_linux()
    path = Path(path)
    status = os.statvfs(path)
    soft_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = soft_limit == resource.RLIM_INFINITY
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # `direct` says it
        file = SwapFile.create(path, _TEST_BYTES)
    with file:
        memory_alignment_bytes, offset_alignment_bytes = stated_direct_alignments(file.fileno())
        refusals = _try_engines(file, stops_at_best=stops_at_best)
        return ProbeReport(
            path=path,
            kernel=platform.release(),
            io_uring_disabled=_number_in(Path("/proc/sys/kernel/io_uring_disabled")),
            seccomp=_has_seccomp(),
            memlock_bytes=None if unlimited else soft_limit,
            memlock_unlimited=unlimited,
            aio_max=_number_in(Path("/proc/sys/fs/aio-max-nr")),
            aio_used=_number_in(Path("/proc/sys/fs/aio-nr")),
            file_system=_file_system(path),
            direct=file.direct,
            memory_alignment_bytes=memory_alignment_bytes,
            offset_alignment_bytes=offset_alignment_bytes,
            rotational=_is_rotational(path),
            free_bytes=status.f_bavail * status.f_frsize,
            refusals=refusals,
        )


def _said(value: object) -> str:
    match value:
        case None:
            return "not known"
        case bool():
            return "yes" if value else "no"
        case _:
            return str(value)


def _try_engines(file: SwapFile, *, stops_at_best: bool) -> dict[str, str]:
    """Return why each engine that was tried and does not work on the file does not."""
    refusal = native_unavailable_reason()
    if refusal is not None:
        return dict.fromkeys(NATIVE_KINDS, refusal)
    refusals: dict[str, str] = {}
    for kind in NATIVE_KINDS:
        refusal = try_engine(kind, file)
        if refusal is not None:
            refusals[kind] = refusal
        elif stops_at_best:
            break
    return refusals


def polling_refusal(directory: Path, polling: str) -> str | None:
    """Return why io_uring cannot poll in a directory, or None when it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        file = SwapFile.create(directory, _TEST_BYTES)
    with file:
        if not file.direct:
            return f"{directory} takes no direct I/O"
        return try_engine("io_uring", file, polling)


def try_engine(kind: str, file: TransferFile, polling: str = "none") -> str | None:
    """Return why an engine does not work on a file, or None when it moves bytes there and back."""
    from aio_ops.engine import open_engine  # it uses this module to choose

    if kind == "kernel_aio" and not file.direct:
        return f"{file.path.parent} takes no direct I/O, and without it kernel AIO waits"
    try:
        engine = open_engine(kind, queue_depth=_TEST_DEPTH, thread_count=1, polling=polling)
    except (OSError, RuntimeError) as error:
        return str(error)
    data = bytes(number % 251 for number in range(_TEST_BYTES))
    with engine, HostArena(2 * _TEST_BYTES) as arena:
        source, target = arena.carve(_TEST_BYTES), arena.carve(_TEST_BYTES)
        source.view()[:] = data
        refusal = _failure_of(lambda: engine.submit_write(file, 0, source))
        refusal = refusal or _failure_of(lambda: engine.submit_read(file, 0, target))
        if refusal is None and target.view() != data:
            refusal = f"{kind} does not read back what it wrote in {file.path.parent}"
    return refusal


def _failure_of(start: Callable[[], Ticket]) -> str | None:
    try:
        start().wait()
    except TransferError as error:
        return str(error)
    return None


def _number_in(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


def _has_seccomp() -> bool | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("Seccomp:"):
                return int(line.split()[1]) != 0
    return None


def _file_system(path: Path) -> str | None:
    """Return the type of the mount that holds `path`: the one with the same device."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields = line.split(" ")
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return None


def _is_rotational(path: Path) -> bool | None:
    device = path.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for place in (disk, disk.resolve().parent):  # a partition's queue is with its disk
        number = _number_in(place / "queue" / "rotational")
        if number is not None:
            return number != 0
    return None
