"""Measure a file striped over two throttled drives against each of them alone.

Makes an ext4 file system on a loop device for each rate, limits what this process may read from
and write to it (cgroup v1 `blkio.throttle` or cgroup v2 `io.max`; needs root), and takes all of it
away again. Exits with 77 and says why where that cannot be.

    python scripts/stripe_bench.py --rates 90 30
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aio_ops import Engine, HostArena, Span, Ticket, TransferFile, open_engine

CANNOT = 77
REQUEST_BYTES = 8 << 20
IN_FLIGHT = 8
WORKLOADS = ("read", "write", "mixed")
IMAGE_BYTES = 512 << 20
FILE_BYTES = 256 << 20  # of a member alone; a striped one has as much in all
CGROUPS = Path("/sys/fs/cgroup")


Submit = Callable[[TransferFile, int, Span], Ticket]


class CannotThrottleError(Exception):
    """This machine lets us make no drive of a known rate."""


def run(*command: str) -> str:
    """Run a command of the system and return what it printed."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stderr or result.stdout).strip()
        raise CannotThrottleError(f"`{' '.join(command)}` failed: {said}")
    return result.stdout.strip()


@contextlib.contextmanager
def loop_drive(parent: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Mount a new ext4 file system on a loop device; yield its directory and device number."""
    image, directory = parent / f"{name}.image", parent / name
    directory.mkdir()
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, IMAGE_BYTES)
    device = run("losetup", "--find", "--show", "--direct-io=on", str(image))
    try:
        run("mkfs.ext4", "-q", "-m", "0", device)
        run("mount", "-t", "ext4", device, str(directory))
        try:
            number = Path(device).stat().st_rdev
            yield directory, f"{os.major(number)}:{os.minor(number)}"
        finally:
            run("umount", str(directory))
    finally:
        run("losetup", "--detach", device)


@contextlib.contextmanager
def throttled(limits: dict[str, int]) -> Iterator[None]:
    """Limit this process to so many bytes a second, read and written, from devices by number."""
    group, rules = _rules(limits)
    try:
        group.mkdir()
    except OSError as error:
        raise CannotThrottleError(f"cannot make the cgroup {group}: {error.strerror}") from error
    before = _own_group(group.parent)
    try:
        try:
            for name, line in rules:
                (group / name).write_text(line, encoding="ascii")
            (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        except OSError as error:
            raise CannotThrottleError(f"cannot set up {group}: {error.strerror}") from error
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        group.rmdir()


def _rules(limits: dict[str, int]) -> tuple[Path, list[tuple[str, str]]]:
    """Return the cgroup to make, and what to write to which of its files."""
    name = f"stripe-bench-{os.getpid()}"
    if (CGROUPS / "blkio" / "cgroup.procs").exists():
        return CGROUPS / "blkio" / name, [
            (f"blkio.throttle.{direction}_bps_device", f"{number} {rate}")
            for number, rate in limits.items()
            for direction in ("read", "write")
        ]
    subtree = CGROUPS / "cgroup.subtree_control"
    if not subtree.exists() or "io" not in subtree.read_text(encoding="ascii").split():
        raise CannotThrottleError("neither cgroup v1 blkio nor the io controller of v2 is there")
    return CGROUPS / name, [
        ("io.max", f"{number} rbps={rate} wbps={rate}") for number, rate in limits.items()
    ]


def _own_group(root: Path) -> Path:
    """Return the directory of the cgroup that this process is in now."""
    wanted = "blkio" if root.name == "blkio" else ""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if wanted in controllers.split(","):
            return root / path.lstrip("/")
    return root


def rate_of(engine: Engine, file: TransferFile, arena: HostArena, workload: str, s: float) -> float:
    """Return the bytes a second of requests one after another over the file, eight in flight."""
    whole = arena.whole()
    spans = deque(whole.sub(index * REQUEST_BYTES, REQUEST_BYTES) for index in range(IN_FLIGHT))
    places = file.size_bytes // REQUEST_BYTES
    under_way: deque[Ticket] = deque()
    moved_bytes = turn = 0
    start = time.perf_counter()
    while True:
        running = time.perf_counter() - start < s
        if running and len(under_way) < IN_FLIGHT:
            submit, place = _next(engine, workload, turn, places)
            under_way.append(submit(file, place * REQUEST_BYTES, spans[0]))
            spans.rotate(-1)
            turn += 1
        elif under_way:
            under_way.popleft().wait()
            moved_bytes += REQUEST_BYTES
        else:
            return moved_bytes / (time.perf_counter() - start)


def _next(engine: Engine, workload: str, turn: int, places: int) -> tuple[Submit, int]:
    """Return what goes next and where; mixed reads one half of the file and writes the other."""
    if workload != "mixed":
        submit = engine.submit_read if workload == "read" else engine.submit_write
        return submit, turn % places
    place = turn // 2 % (places // 2)
    if turn % 2:
        return engine.submit_write, places // 2 + place
    return engine.submit_read, place


def rates_of(engine: Engine, file: TransferFile, seconds: float) -> dict[str, float]:
    """Return the rate of each workload on a file, all of which is written first."""
    with contextlib.closing(file), HostArena(IN_FLIGHT * REQUEST_BYTES) as arena:
        for offset in range(0, file.size_bytes, REQUEST_BYTES):
            engine.submit_write(file, offset, arena.whole().sub(0, REQUEST_BYTES)).wait()
        return {name: rate_of(engine, file, arena, name, seconds) for name in WORKLOADS}


def measure(parent: Path, rates: list[int], kind: str, seconds: float) -> dict[str, object]:
    """Set the drives up, measure each alone and all of them striped, and take them down."""
    with contextlib.ExitStack() as stack:
        drives = [
            stack.enter_context(loop_drive(parent, f"drive{index}")) for index in range(len(rates))
        ]
        stack.enter_context(throttled(dict(zip((each for _, each in drives), rates, strict=True))))
        directories = [directory for directory, _ in drives]
        with open_engine(kind, directory=directories[0]) as engine:
            alone = [
                rates_of(engine, engine.create_file(each, FILE_BYTES), seconds)
                for each in directories
            ]
            file = engine.create_striped_file(directories, FILE_BYTES)
            shares = [own / FILE_BYTES for own in file.layout.member_bytes]
            together = rates_of(engine, file, seconds)
            return {
                "engine": engine.name,
                "limits": rates,
                "alone": alone,
                "shares": shares,
                "striped": together,
                "ratio": {
                    name: together[name] / sum(each[name] for each in alone) for name in WORKLOADS
                },
            }


def report(found: dict[str, Any]) -> None:
    """Print a table."""
    alone, striped, ratio = found["alone"], found["striped"], found["ratio"]
    print(f"engine {found['engine']}; shares by measured weights: {found['shares']}")
    for name in WORKLOADS:
        each = ", ".join(f"{rates[name] / 1e6:.1f}" for rates in alone)
        print(f"{name:6} alone {each} MB/s, striped {striped[name] / 1e6:.1f}: {ratio[name]:.3f}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=int, nargs="+", default=[90, 30], help="MB/s of each drive")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each workload")
    parser.add_argument("--parent", type=Path, help="where the drives' images go")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rates = [rate * 1_000_000 for rate in options.rates]
    with tempfile.TemporaryDirectory(dir=options.parent) as name, warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that both lie on one device
        try:
            found = measure(Path(name), rates, options.engine, options.seconds)
        except CannotThrottleError as error:
            print(f"cannot throttle: {error}", file=sys.stderr)
            return CANNOT
    if options.json:
        print(json.dumps(found))
    else:
        report(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
