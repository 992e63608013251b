"""The machine without its disks: kernel, processor, limits, memory that may be locked, GPU."""

import contextlib
import importlib.metadata
import os
import platform
import resource
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from aio_ops.disk import pci_link
from aio_ops.doctor.rows import Check, Row, fail, ok, warn
from aio_ops.engine import open_engine
from aio_ops.native_engine import native_unavailable_reason
from aio_ops.pinned import PinnedArena, open_cuda

_MIB = 1 << 20
_PINNED_BYTES = 64 * _MIB
_LEAST_MEMLOCK_BYTES = 64 * _MIB
_LEAST_SHM_BYTES = 1 << 30
_LEAST_FILES = 1024
_CAP_IPC_LOCK = 14
_FEATURES = {"x86_64": ("avx2", "fma", "f16c", "avx512f"), "aarch64": ("asimd", "sve", "fphp")}


def checks() -> list[tuple[str, Check]]:
    """Return the checks of this module in the order in which they are shown."""
    return [
        ("system", system),
        ("Python", python),
        ("tierzero", package),
        ("native I/O", native),
        ("CPU", processor),
        ("memory lock", memory_lock),
        ("pinned memory", pinned),
        ("huge pages", huge_pages),
        ("shared memory", shared_memory),
        ("limits", limits),
        ("io_uring", io_uring),
        ("kernel AIO", kernel_aio),
        ("GPU", gpu),
        ("GDS", gds),
    ]


def system() -> Row:
    """Say what runs here."""
    found = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform != "linux":
        return fail("system", found, "tierzero needs Linux: direct I/O and unnamed files")
    return ok("system", found)


def python() -> Row:
    """Say which Python this is."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < (3, 11):  # noqa: UP036  a copy may be run by any Python
        return fail("Python", found, "use Python 3.11 or newer")
    return ok("Python", found)


def package() -> Row:
    """Say which version is installed."""
    try:
        return ok("tierzero", importlib.metadata.version("tierzero"))
    except importlib.metadata.PackageNotFoundError:
        return warn("tierzero", "used from its sources, not installed", "pip install .")


def native() -> Row:
    """Say whether the native engines load, and why not."""
    reason = native_unavailable_reason()
    if reason is None:
        return ok("native I/O", "loads")
    remedy = "reinstall with a C++20 compiler; until then the slower pure-Python engine serves"
    if os.environ.get("TIERZERO_REQUIRE_NATIVE") == "1":
        return fail("native I/O", f"{reason}, and TIERZERO_REQUIRE_NATIVE=1 asks for it", remedy)
    return warn("native I/O", reason, remedy)


def processor() -> Row:
    """Say what the processor is, and how much of it this process may use."""
    facts = dict(_pairs(Path("/proc/cpuinfo")))
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    wanted = _FEATURES.get(platform.machine(), ())
    has = [name for name in wanted if name in flags]
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = cpu_quota()
    cores = f"{usable} of {total} cores"
    if quota is not None:
        cores += f", of which its cgroup grants the time of {quota:.1f}"
    model = facts.get("model name", platform.machine())
    found = f"{model}, {cores}; {' '.join(has) or 'no vector features stated'}"
    if quota is not None and quota < usable:
        return warn(
            "CPU", found, "raise the container's limit (--cpus), or set OMP_NUM_THREADS to it"
        )
    if wanted and wanted[0] not in has and flags:
        return warn("CPU", found, f"updates are slow without {wanted[0]}; use a newer processor")
    return ok("CPU", found)


def cpu_quota() -> float | None:
    """Return how many cores' time the cgroup grants, by v2 or v1, or None for all."""
    text = _text(Path("/sys/fs/cgroup/cpu.max"))
    if text is None:
        quota = _text(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
        period = _text(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
        text = f"{quota} {period}" if quota and period else ""
    quota, _, period = text.partition(" ")
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None
    return int(quota) / int(period)


def memory_lock() -> Row:
    """Say how much memory may be locked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if may_lock_anything():
        beyond = "" if soft == resource.RLIM_INFINITY else ", but this process may lock more"
        return ok("memory lock", f"{_limit(soft)}{beyond}")
    if soft != resource.RLIM_INFINITY and soft < _LEAST_MEMLOCK_BYTES:
        return warn(
            "memory lock",
            f"{_limit(soft)} (hard {_limit(hard)}): slots cannot be pinned",
            "raise `ulimit -l` (in a container: --ulimit memlock=-1)",
        )
    return ok("memory lock", _limit(soft))


def may_lock_anything() -> bool:
    """Return whether the limit of locked memory does not hold for this process."""
    for name, value in _pairs(Path("/proc/self/status")):
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_IPC_LOCK & 1)
    return False


def pinned() -> Row:
    """Lock and, with a GPU, register some memory as the slots are."""
    has_gpu = open_cuda(0)[0] is not None
    try:
        with (
            warnings.catch_warnings(record=True),
            PinnedArena(_PINNED_BYTES, device=0 if has_gpu else None) as arena,
        ):
            pages = "huge pages" if arena.hugepages else "4 KiB pages"
            node = "" if arena.numa_node is None else f", NUMA node {arena.numa_node}"
            found = f"{_PINNED_BYTES // _MIB} MiB locked on {pages}{node}"
            if has_gpu and not arena.cuda_registered:
                return warn(
                    "pinned memory",
                    f"{found}, but CUDA refuses it: {arena.cuda_refusal}",
                    "copies to the GPU are slower; allow more locked memory (`ulimit -l`)",
                )
    except OSError as error:
        return warn(
            "pinned memory",
            f"{_PINNED_BYTES // _MIB} MiB cannot be locked: {os.strerror(error.errno or 0)}",
            "raise `ulimit -l`, or write pin_memory: false",
        )
    return ok("pinned memory", found + (", registered with CUDA" if has_gpu else ""))


def huge_pages() -> Row:
    """Say whether transparent huge pages can be had."""
    text = _text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    if text is None:
        return warn("huge pages", "this kernel has none", "direct I/O is slower on 4 KiB pages")
    if "[never]" in text:
        return warn(
            "huge pages",
            "switched off",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (direct I/O is two to "
            "three times faster on them)",
        )
    return ok("huge pages", text)


def shared_memory() -> Row:
    """Say how large /dev/shm is, which data loaders and collectives use."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        text = f"/dev/shm: {error.strerror}"
        return warn("shared memory", text, "mount a tmpfs there; data loaders need it")
    free_bytes = status.f_bavail * status.f_frsize
    found = f"/dev/shm has {free_bytes / 1e9:.2f} GB free"
    if free_bytes < _LEAST_SHM_BYTES:
        return warn(
            "shared memory",
            f"{found}: data loaders and several ranks may die of SIGBUS (exit code -7)",
            "start the container with --shm-size=8g or --ipc=host",
        )
    return ok("shared memory", found)


def limits() -> Row:
    """Say how many files may be open and how large they may be."""
    files, size = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _file_size_limit()
    found = f"{files} open files; files of {size}"
    if size != "any size":
        return fail("limits", found, "swap files need more: `ulimit -f unlimited`")
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        return warn("limits", found, f"raise `ulimit -n` to {_LEAST_FILES} at least")
    return ok("limits", found)


def _file_size_limit() -> str:
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return "any size" if soft == resource.RLIM_INFINITY else f"at most {soft} bytes"


def io_uring() -> Row:
    """Open a ring, and say why that cannot be."""
    return _engine("io_uring", "io_uring")


def kernel_aio() -> Row:
    """Open a context, and say how many events are left."""
    used, most = _text(Path("/proc/sys/fs/aio-nr")), _text(Path("/proc/sys/fs/aio-max-nr"))
    row = _engine("kernel AIO", "kernel_aio")
    return Row(row.what, row.status, f"{row.found}; {used} of {most} events in use", row.remedy)


def _engine(what: str, kind: str) -> Row:
    if native_unavailable_reason() is not None:
        return warn(what, "needs the native module", "see native I/O")
    try:
        open_engine(kind, queue_depth=32).close()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        found, _, remedy = reason.partition("; ")
        return warn(what, found, f"{remedy or 'see the reason'}; other engines serve meanwhile")
    return ok(what, "works")


def gpu() -> Row:
    """Say which GPU the driver has and how it is linked; none is well: training runs on the CPU."""
    cuda, reason = open_cuda(0)
    if cuda is None:
        return ok("GPU", f"none ({reason}): training runs on the CPU")
    place = Path("/sys/bus/pci/devices") / cuda.pci_bus_id.lower()
    link, rate = pci_link(place) if place.exists() else (None, None)
    speed = "" if rate is None else f", {rate / 1e9:.0f} GB/s each way"
    found = f"{cuda.pci_bus_id}, {link or 'link not stated'}{speed}"
    width, most = _text(place / "current_link_width"), _text(place / "max_link_width")
    if width and most and width.isdigit() and most.isdigit() and int(width) < int(most):
        return warn("GPU", f"{found}, of x{most}", "move the card to a slot with all lanes")
    return ok("GPU", found)


def gds() -> Row:
    """Say that GPUDirect Storage is not used."""
    return ok("GDS", "not used: bytes for a GPU go through pinned slots")


def _limit(size_bytes: int) -> str:
    return "unlimited" if size_bytes == resource.RLIM_INFINITY else f"{size_bytes // 1024} KiB"


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first value of each name in a file of `name: value` lines."""
    for line in (_text(path) or "").splitlines():
        name, separator, value = line.partition(":")
        if separator:
            yield name.strip(), value.strip()


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return None
