"""The disks of given directories: what they are, and how fast, in two seconds at most."""

import statistics
import warnings
from pathlib import Path

from aio_ops import probe
from aio_ops.disk import Disk
from aio_ops.doctor.rows import Row, fail, ok, warn
from aio_ops.probe import ProbeReport
from aio_ops.tune.bench import Allowance, Bench
from aio_ops.tune.checks import TuneError, check
from aio_ops.tune.settings import Setting, Workload

_HALF_BYTES = 32 << 20
_PIECE_S = 0.06
_SLOW_BYTES_PER_S = 0.5e9
_LEAST_FREE_BYTES = 4 * _HALF_BYTES


def disk(directory: Path) -> Row:
    """Say what a directory offers to swap files."""
    what = f"disk {directory}"
    try:
        found = check(directory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            report = probe.report(directory)
    except TuneError as error:
        text, _, remedy = str(error).partition("; ")
        return fail(what, text, remedy)
    except OSError as error:
        text, _, remedy = (error.strerror or str(error)).partition("; ")
        remedy = remedy or "give this user the right to write there, or name another directory"
        return fail(what, f"cannot be written: {text}", remedy)
    return _judge(what, found, report)


def _judge(what: str, found: Disk, report: ProbeReport) -> Row:
    text = f"{found.describe()}; {_direct(report)}; best engine {report.best}"
    if found.free_bytes < _LEAST_FREE_BYTES:
        remedy = "free some space, or name another directory"
        if not found.free_bytes:
            return fail(what, f"{text}; it is full", remedy)
        return warn(what, f"{text}; too full to be measured", remedy)
    rates = quick_rates(found.path, report.best)
    text += "; " + ", ".join(f"{work.value} {rate / 1e9:.2f} GB/s" for work, rate in rates.items())
    warning = found.warning()
    if warning is not None:
        return warn(what, text, warning)
    if not report.direct:
        return warn(
            what, text, "use a directory on ext4 or xfs: without direct I/O swapping is slow"
        )
    if rates[Workload.MIX] < _SLOW_BYTES_PER_S:
        return warn(what, text, "this is slow for paging; use an NVMe drive, or see "
                    f"`tierzero-nvme-tune {found.path}`")  # fmt: skip
    return ok(what, text)


def _direct(report: ProbeReport) -> str:
    if not report.direct:
        return "no direct I/O"
    stated = report.offset_alignment_bytes
    return "direct I/O" if stated is None else f"direct I/O at multiples of {stated} bytes"


def quick_rates(directory: Path, engine: str) -> dict[Workload, float]:
    """Measure each workload three times, briefly, and return the medians."""
    setting = Setting(engine, 1 << 20, 32 if engine in ("io_uring", "kernel_aio") else 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        bench = Bench(directory, _HALF_BYTES, Allowance(10**10))
    rates: dict[Workload, list[float]] = {workload: [] for workload in Workload}
    with bench:
        bench.fill(engine)
        for _ in range(3):
            for workload, own in rates.items():
                own.append(bench.measure(setting, workload, _PIECE_S).rate)
    return {workload: statistics.median(own) for workload, own in rates.items()}
