"""The command line of the tuner: `tierzero-nvme-tune`, `scripts/nvme_tune.py`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from aio_ops.tune import gpu, report
from aio_ops.tune.apply import ApplyError, apply, check_applicable, fragment
from aio_ops.tune.checks import TuneError, check, half_bytes_of
from aio_ops.tune.results import Result
from aio_ops.tune.settings import Setting, Workload
from aio_ops.tune.show import Display, fragment_lines
from aio_ops.tune.tuner import Request, tune
from aio_ops.tune.words import part_of, to_json, verdict

_EPILOG = """\
example:
  tierzero-nvme-tune /nvme0 /nvme1 --report tune.png --apply ds_config.json

It needs no rights but to write in DIR, drops no caches (I/O is direct), and leaves nothing behind:
its scratch files have no name, and the kernel frees them however the process ends.

exit status: 0 tuned; 1 a directory or file cannot be used; 2 wrong options; 130 interrupted
"""
_DRIVE_BYTES = 600e12  # what a common 1 TB drive is warranted to have written
_UNITS = {
    **{f"{letter}{suffix}": 1 << 10 * power for power, letter in enumerate("KMGT", 1)
       for suffix in ("", "IB")},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
}  # fmt: skip


def size(text: str) -> int:
    """Return the bytes of a size: 400M or 400MiB in binary units, as the field writes, or 20GB."""
    digits = text.rstrip("kmgtibKMGTIB ")
    unit = text[len(digits) :].strip().upper()
    try:
        value = int(float(digits) * (_UNITS[unit] if unit else 1))
    except (KeyError, ValueError, OverflowError):
        wanted = "400M (binary), 20GB or 20GiB"
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write one such as {wanted}"
        ) from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size above zero")
    return value


def positive(text: str) -> float:
    """Return a number of seconds above zero."""
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} seconds cannot be used; give 1 to 1000000")
    return value


def report_path(text: str) -> Path:
    """Return where a report goes, whose kind can be written."""
    path = Path(text)
    if path.suffix not in (".png", ".html"):
        raise argparse.ArgumentTypeError(f"{text} must end in .png or .html")
    return path


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog="tierzero-nvme-tune",
        description="Find the fastest way to move bytes between memory and the disks under DIR.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("directories", metavar="DIR", nargs="*", type=Path)
    made.add_argument("--seconds", type=positive, default=60.0, help="in all (default 60)")
    made.add_argument(
        "--max-write", type=size, default=100 * 10**9, metavar="SIZE",
        help="most bytes to write in all (default 100 GB)",
    )  # fmt: skip
    made.add_argument("--sustain", type=positive, default=0.0, metavar="SECONDS",
                      help="then write for so long, to see where a write cache ends")  # fmt: skip
    made.add_argument("--exhaustive", action="store_true",
                      help="then measure the whole grid beside the choice")  # fmt: skip
    made.add_argument("--json", type=Path, metavar="FILE", help="all that was measured; - prints")
    made.add_argument("--report", type=report_path, metavar="FILE.png|.html", help="with curves")
    made.add_argument("--apply", type=Path, metavar="ds_config.json",
                      help="merge the choice into a configuration")  # fmt: skip
    field = made.add_argument_group("flags of the ZeRO field")
    field.add_argument("--nvme_dir", nargs="+", type=Path, default=[], metavar="DIR")
    field.add_argument("--io_size", type=size, default=400 << 20, metavar="SIZE",
                       help="half of the scratch file (default 400M)")  # fmt: skip
    field.add_argument("--loops", type=int, default=5, metavar="N",
                       help="rounds of --exhaustive (default 5)")  # fmt: skip
    field.add_argument("--no_read", action="store_true", help="measure writes alone")
    field.add_argument("--no_write", action="store_true", help="measure reads alone")
    field.add_argument("--gpu", action="store_true", help="also the path to a GPU's memory")
    field.add_argument("--log_dir", type=Path, metavar="DIR", help="tune.json and tune.html there")
    field.add_argument("--verbose", action="store_true", help="a line for every round")
    field.add_argument("--flush_page_cache", action="store_true", help="without effect")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    made = parser()
    options = made.parse_args(arguments)
    if options.no_read and options.no_write:
        made.error("--no_read and --no_write leave nothing to measure; drop one")
    if options.loops < 1:
        made.error(f"--loops {options.loops}: at least one round is needed")
    if not options.directories and not options.nvme_dir:
        made.error("name a directory on the disk to tune: tierzero-nvme-tune DIR")
    display = Display(options.seconds, verbose=options.verbose)
    if str(options.json) == "-":
        display.console.stderr = True
    try:
        return _run(options, display)
    except (TuneError, ApplyError) as error:
        return _fail(str(error))
    except OSError as error:  # a disk that fails midway says which transfer
        return _fail(f"{error}; nothing was left behind")
    except KeyboardInterrupt:
        sys.stderr.write("tierzero-nvme-tune: interrupted; nothing was left behind\n")
        return 130


def _fail(text: str) -> int:
    sys.stderr.write(f"tierzero-nvme-tune: {text}\n")
    return 1


def _run(options: argparse.Namespace, display: Display) -> int:
    directories = _distinct([*options.directories, *options.nvme_dir], display)
    request = Request(
        directories=directories,
        seconds=options.seconds,
        most_write_bytes=options.max_write,
        half_bytes=options.io_size,
        workloads=_workloads(options),
        gpu=options.gpu,
        sustain_s=options.sustain,
        exhaustive=options.exhaustive,
        rounds=options.loops,
    )
    _check_before(request, options)
    _state(request, options, display)
    with display:
        result = tune(request, display.watch)
    for line in verdict(result):
        display.say(line)
    _write(result, options, display)
    return 0


def _workloads(options: argparse.Namespace) -> tuple[Workload, ...]:
    if options.no_write:
        return (Workload.READ,)
    return (Workload.WRITE,) if options.no_read else tuple(Workload)


def _distinct(directories: list[Path], display: Display) -> tuple[Path, ...]:
    """Return each directory once; what names the same one again is said and left out."""
    known: dict[tuple[int, int], Path] = {}
    for directory in directories:
        check(directory)
        status = directory.stat()
        first = known.setdefault((status.st_dev, status.st_ino), directory)
        if first is not directory:
            display.say(f"{directory} is the same directory as {first}: it is measured once")
    return tuple(known.values())


def _check_before(request: Request, options: argparse.Namespace) -> None:
    """Raise what would stop the end of the run now, not after it."""
    if request.gpu and (reason := gpu.refusal()) is not None:
        raise TuneError(f"--gpu: there is no GPU that can be used: {reason}; leave --gpu out")
    if options.report is not None or options.log_dir is not None:
        report.require(options.report)
    for path in filter(None, (options.json, options.report)):
        if str(path) != "-" and not path.parent.is_dir():
            raise TuneError(f"{path} cannot be written: {path.parent} is no directory; make it")
    if options.apply is not None:
        any_part = fragment(Setting("threads", 1 << 20, 4), request.directories, bursts=True)
        check_applicable(options.apply, any_part)
        for directory in request.directories:
            disk = check(directory)
            if disk.remote or disk.in_memory:
                raise ApplyError(f"--apply is refused: {disk.warning()}")


def _state(request: Request, options: argparse.Namespace, display: Display) -> None:
    """Say what will be done before it is: where, how long, how much is written."""
    most = request.most_write_bytes
    for directory in request.directories:
        disk = check(directory)
        display.say(f"{directory}: {disk.describe()}")
        half_bytes_of(request.half_bytes, disk)
    display.say(
        f"about {request.seconds:.0f} s"
        + (f" and a long write of {request.sustain_s:.0f} s" if request.sustain_s else "")
        + f"; at most {most / 1e9:.1f} GB are written ({most / _DRIVE_BYTES:.3%} of what a drive "
        "of 600 TB endurance takes; --max-write lowers it)"
    )
    identities = [check(directory).identity for directory in request.directories]
    if len(set(identities)) < len(identities):
        display.say("some of these directories lie on one file system: they share its disk")
    if options.flush_page_cache:
        display.say("--flush_page_cache has no effect: direct I/O leaves no page cache to flush")
    if request.exhaustive:
        display.say(f"the whole grid comes after that, {request.rounds} rounds of it")


def _write(result: Result, options: argparse.Namespace, display: Display) -> None:
    """Write what was asked for, and apply the choice."""
    document = json.dumps(to_json(result), indent=1) + "\n"
    if str(options.json) == "-":
        sys.stdout.write(document)
    elif options.json is not None:
        options.json.write_text(document, encoding="utf-8")
    if options.report is not None:
        report.write(result, options.report)
        display.say(f"report: {options.report}")
    if options.log_dir is not None:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        (options.log_dir / "tune.json").write_text(document, encoding="utf-8")
        report.write(result, options.log_dir / "tune.html")
        display.say(f"logs: {options.log_dir}")
    part = part_of(result)
    if part is None:
        return
    if options.apply is None:
        display.say("for the configuration (or --apply FILE):", *fragment_lines(part))
        return
    kept = apply(options.apply, part)
    if kept is None:
        display.say(f"{options.apply} has the choice already; it stays as it is")
        return
    display.say(
        f"{options.apply} has the choice now, {kept.name} beside it is the file as it was; check "
        f"it with `python -m zero.config check {options.apply}`"
    )
