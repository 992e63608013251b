"""Whole training steps on one GPU: one row of the table a call.

    gpu_bench.py --row host-exact --out results        measures a row and writes results/ROW.json
    gpu_bench.py --program --row host-exact            the same, the peer's steps and ours by turns
    gpu_bench.py --merge results --report rows.png     prints the table of all rows and draws it

A row names where optimizer state (and parameters) may rest and how much host memory there is. The
model is Llama-shaped with 1.364 B parameters, batch 4 x 1024 tokens, bf16, clipping at 1.0; with
`--model transformers` it is the peer's, with its initial weights and tokens. In rows that page,
the drive is measured before the first step that counts and after each one. `gpu_suite.py` runs all
rows beside the peer's program. Under torchrun each rank has a GPU; budgets are a row's times the
ranks, and what rank 0 saw is written, as ROW-xRANKS.json.
"""

from __future__ import annotations

import argparse
import cProfile
import errno
import importlib
import importlib.util
import io
import json
import math
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import charts
import gpu_chart
import gpu_drive
import gpu_groups
from gpu_model import Built, build_llama, build_transformers
from gpu_process import MemoryWatch, mappings
from gpu_rows import ROWS, Row, make_config, planned_device_bytes, within_peer
from gpu_sizes import Sizes
from gpu_table import merge
from gpu_turns import Turns

import zero
from estimators.command import count_option
from estimators.words import parse_bytes
from zero.errors import ConfigError, PlanError

Loss = Callable[[torch.nn.Module], torch.Tensor]

_HEAD_WIDTH = 128
_SIZES = (
    ("hidden", 2048, "width of the model, a multiple of 128"),
    ("layers", 24, "blocks"),
    ("vocabulary", 32000, "tokens that there are"),
    ("length", 1024, "tokens of a sample"),
    ("batch", 4, "samples of a step"),
)
_DRIVE = "drive"
"""Phases of the memory in which nothing of ours runs."""
_ALONE: tuple[str, ...] = ("peer", "name", "steps", "phases", "profile", "tiers", "vocabulary")
_ALONE += ("host_memory", "device_memory")
"""Options that a row beside a peer's program does not have: there the peer decides."""


class RowRun:
    """One row on its way. What was found is written anew after each step that counts."""

    def __init__(self, options: argparse.Namespace, row: Row, sizes: Sizes, ranks: int) -> None:
        self._options, self._sizes = options, sizes
        name = options.name or options.row
        self._outcome: dict[str, Any] = {
            "row": name if ranks == 1 else f"{name}-x{ranks}",
            "command": sys.argv,
            "peer": None,
        }
        if options.peer is not None:
            self._outcome["peer"] = json.loads(options.peer.read_text(encoding="utf-8"))
            row = within_peer(row, sizes, self._outcome["peer"])
        self._row = row
        self._outcome |= {"settings": vars(row), "steps": options.steps or row.steps}
        self._planned = planned_device_bytes(row, sizes) if ranks == 1 else None
        self._is_written = not dist.is_initialized() or dist.get_rank() == 0
        self._watch = MemoryWatch()
        self._ours: dict[str, Any] = {}
        self._rows: list[dict[str, float]] = []
        pages = row.optimizer == "nvme" and not row.takes_peer_memory and options.drive_mebibytes
        self._drive = gpu_drive.DriveWatch(options.nvme, options.drive_mebibytes) if pages else None

    def run(self) -> None:
        """Train the row."""
        options, row, watch = self._options, self._row, self._watch
        if options.model == "transformers":
            importlib.import_module("transformers.models.llama.modeling_llama")
        watch.note("imported")
        train_plainly()
        watch.note("torch has trained")
        begin = time.perf_counter()
        built = build(options, row, self._sizes)
        synchronize()
        made = time.perf_counter()
        watch.note("model built")
        with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
            engine, _, _, _ = zero.initialize(
                model=built.model, config=make_config(row, folder, options.batch, options.tiers)
            )
            synchronize()
            self._ours["startup_seconds"] = {
                "build": made - begin,
                "shard": time.perf_counter() - made,
            }
            self._ours["plan"] = engine.plan.to_dict()
            watch.note("initialized")
            reset_peak()
            for step in range(1, row.warm_up + self._outcome["steps"] + 1):
                self._step(engine, built.loss, step)
            if options.profile:
                profile(engine, built.loss, options)
            engine.destroy()
        if self._drive is not None:
            self._drive.close()

    def _step(self, engine: zero.ZeroEngine, loss_of: Loss, step: int) -> None:
        """Run a step in its turn, and look at the drive before and after those that count."""
        if self._options.turns is not None:
            self._options.turns.wait()
        self._rows.append(train_step(engine, loss_of, self._options))
        self._watch.note(f"step {step}")
        warm_up, count = self._row.warm_up, self._row.warm_up + self._outcome["steps"]
        note = "" if step > warm_up else ", not counted"
        say(f"step {step} of {count}{note}: {self._rows[-1]['seconds']:.3f} s")
        if self._drive is not None and step >= warm_up and any(paged(engine).values()):
            self._drive.measure()
            self._watch.note(_DRIVE)
        if step > warm_up and self._is_written:
            self._write(engine)

    def _write(self, engine: zero.ZeroEngine) -> None:
        counted, watch = self._rows[self._row.warm_up :], self._watch
        ours = self._ours | summary(engine, counted)
        ours |= {
            "rows": self._rows,
            "planned_device_bytes": self._planned,
            "rss_bytes": {
                "imported": watch.phases[0]["VmRSS"],
                "before": watch.phases[2]["VmRSS"],
                "peak": watch.peak_bytes(after="model built", without=_DRIVE),
            },
            "memory_phases": watch.phases,
            "mappings": mappings(),
        }
        if self._drive is not None and self._drive.rates:
            seconds = [each["seconds"] for each in counted]
            ours["drive"] = gpu_drive.compare(
                self._drive.rates, **ours["paged_bytes"], seconds=seconds
            )
        path = self._options.out / f"{self._outcome['row']}.json"
        text = json.dumps(self._outcome | {"ours": ours}, indent=1)
        path.with_suffix(".part").write_text(text, encoding="utf-8")
        path.with_suffix(".part").replace(path)


def say(text: str) -> None:
    """Tell on standard error how far a run is."""
    print(f"gpu_bench: {text}", file=sys.stderr, flush=True)


def train_plainly() -> None:
    """Train a step of a tiny model with torch alone, so that the libraries it needs are loaded.

    What a process takes for them is no part of what tierzero takes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = Sizes(hidden=128, layers=1, vocabulary=64, length=64, batch=1, fuses_norms=True)
    built = build_llama(sizes, device, checkpoints=False)
    built.loss(built.model).backward()  # type: ignore[no-untyped-call]
    synchronize()


def build(options: argparse.Namespace, row: Row, sizes: Sizes) -> Built:
    """Return the model and what computes its loss."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.model == "transformers":
        return build_transformers(sizes, device, checkpoints=row.checkpoints)
    return build_llama(sizes, device, checkpoints=row.checkpoints)


def paged(engine: zero.ZeroEngine) -> dict[str, int]:
    """Return the bytes that the last step has moved to and from NVMe."""
    moved: dict[str, int] = engine.ledger.report().to_dicts()[-1]["nvme_bytes"]
    return {
        f"{verb}_bytes": sum(size for name, size in moved.items() if f"nvme {way}" in name)
        for way, verb in (("read", "read"), ("write", "written"))
    }


def train_step(
    engine: zero.ZeroEngine, loss_of: Loss, options: argparse.Namespace
) -> dict[str, float]:
    """Run one step and return its seconds; phases are only known where they are waited for."""
    synchronize()
    times = [time.perf_counter()]
    loss = loss_of(engine)
    lap(times, waits=options.phases)
    engine.backward(loss)
    lap(times, waits=options.phases)
    engine.step()
    lap(times, waits=True)
    names = ("forward", "backward", "step")
    spent = {name: times[at + 1] - times[at] for at, name in enumerate(names)}
    return {**spent, "seconds": times[-1] - times[0], "loss": loss.item()}


def summary(engine: zero.ZeroEngine, rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return median and spread, memory, and what the ledger has counted of the last step."""
    seconds = [row["seconds"] for row in rows]
    last = engine.ledger.report().to_dicts()[-1]
    return {
        "parameters": sum(each.numel() for each in engine.module.parameters()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "ranks": engine.world_size,
        "median_seconds": statistics.median(seconds),
        "spread_seconds": [min(seconds), max(seconds)],
        "counted_seconds": seconds,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        "ledger": last,
        "paged_bytes": paged(engine),
        "memory": engine.memory_report()["lines"],
    }


def profile(engine: zero.ZeroEngine, loss_of: Loss, options: argparse.Namespace) -> None:
    """Write the time line of a step as torch's profiler sees it, and what the host did in one."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    engine.ledger.start_trace()
    with torch.profiler.profile(activities=kinds) as found:
        train_step(engine, loss_of, options)
    found.export_chrome_trace(str(options.out / f"{options.row}.trace.json.gz"))
    trace = options.out / f"{options.row}.ledger.json"
    trace.write_text(json.dumps(engine.ledger.trace()), encoding="utf-8")
    host = cProfile.Profile()
    host.enable()
    train_step(engine, loss_of, options)
    host.disable()
    text = io.StringIO()
    for order in ("tottime", "cumulative"):
        pstats.Stats(host, stream=text).sort_stats(order).print_stats(45)
    path = options.out / f"{options.row}.host.txt"
    path.write_text(text.getvalue(), encoding="utf-8")


def lap(times: list[float], *, waits: bool) -> None:
    """Note the time, after everything issued has ended if `waits`."""
    if waits:
        synchronize()
    times.append(time.perf_counter())


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Begin to look for the peak of device memory."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def parse() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", choices=ROWS, metavar="ROW", help=f"one of {', '.join(ROWS)}")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="print the table of its rows")
    parser.add_argument("--report", type=Path, help="with --merge: their chart, .png or .html")
    parser.add_argument("--out", type=Path, default=Path(), help="where results go (default: here)")
    temporary = Path(tempfile.gettempdir())
    parser.add_argument("--nvme", type=Path, default=temporary, help="folder of the swap file")
    parser.add_argument("--peer", type=Path, help="what the peer took (JSON): sets the budgets")
    parser.add_argument(
        "--model",
        choices=("own", "transformers"),
        default="own",
        help="beside a program it is the peer's",
    )
    parser.add_argument("--steps", type=count_option, help="left out: 5, in slow rows 3 or 6")
    parser.add_argument("--phases", action="store_true", help="wait between the phases of a step")
    parser.add_argument("--profile", action="store_true", help="profile two steps at the end")
    tiers = "keys of the section `tiers` instead of the row's"
    parser.add_argument("--tiers", nargs="*", default=[], metavar="KEY=VALUE", help=tiers)
    for name, value, what in _SIZES:
        parser.add_argument(f"--{name}", type=count_option, default=value, help=what)
    parser.add_argument("--host-memory", type=bytes_option, help="4GB, say, instead of the row's")
    parser.add_argument("--device-memory", type=bytes_option, help="8GB, say, instead of the row's")
    parser.add_argument("--name", help="of the result, instead of the row's")
    parser.add_argument("--turns", type=Turns.of, help=argparse.SUPPRESS)
    gpu_groups.add_programs(parser)
    options = parser.parse_args()
    if options.merge is None and options.row is None:
        parser.error("name a row with --row, or a folder with --merge")
    if options.merge is not None and options.row is not None:
        parser.error("--merge makes the table of a folder, --row measures; give one of them")
    if options.report is not None and options.merge is None:
        parser.error("--report draws what --merge finds; name the folder with it")
    check_row(parser, options)
    for name in _ALONE if runs_beside(options) else ():
        if getattr(options, name) != parser.get_default(name):
            parser.error(
                f"--{name.replace('_', '-')} is not for a row beside a program; leave it out"
            )
    charts.require(options.report)
    if options.merge is not None and not any(options.merge.glob("*.json")):
        parser.error(f"{options.merge} has no results: run --row ROW --out {options.merge} first")
    return options


def bytes_option(text: str) -> int:
    """Return bytes of a command line, written as `4GB`, `4GiB` or a number; for `argparse`."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_row(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a message if a row cannot run with these options."""
    for name in ("steps", *(name for name, _, _ in _SIZES)):
        if getattr(options, name) == 0:
            parser.error(f"--{name} must be at least 1, got 0")
    if options.hidden % _HEAD_WIDTH:
        parser.error(f"--hidden must be a multiple of {_HEAD_WIDTH}, got {options.hidden}")
    for change in options.tiers:
        if "=" not in change:
            parser.error(f"--tiers takes KEY=VALUE, got {change!r}")
    if not options.nvme.is_dir() and not runs_beside(options):
        parser.error(f"--nvme: there is no folder {options.nvme}; make it first")
    if options.peer is not None:
        check_peer(parser, options.peer)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {options.out} cannot be made: {error.strerror}")
    needs = options.model == "transformers"
    if needs and importlib.util.find_spec("transformers") is None:
        parser.error("--model transformers needs the package transformers, which is not installed")


def check_peer(parser: argparse.ArgumentParser, path: Path) -> None:
    """End with a message if a file does not say what a peer took."""
    if not path.is_file():
        parser.error(f"--peer: there is no file {path}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        parser.error(f"--peer: {path} is not JSON: {error}")
    if not isinstance(found, dict):
        parser.error(f"--peer: {path} holds {type(found).__name__}, not an object as of a peer's")
    for name in ("gpu_peak_gb", "rss_peak_gb", "baseline_bytes"):
        size = found.get(name, 0)
        if not isinstance(size, int | float) or not 0 <= size < math.inf:
            parser.error(f"--peer: {name} in {path} must be a number from 0 on, got {size!r}")
    if "baseline_bytes" in found and "rss_peak_gb" not in found:
        parser.error(
            f"--peer: {path} has baseline_bytes, but not the rss_peak_gb that it is part of"
        )


def runs_beside(options: argparse.Namespace) -> bool:
    """Tell whether a row runs beside a peer's program."""
    return options.program is not None or options.torch_program is not None


def run_alone(options: argparse.Namespace) -> None:
    """Measure a row of ours, on all ranks that there are.

    Raises:
        SystemExit: if the row cannot run with these options or on this machine.
    """
    row = ROWS[options.row]
    for name in ("host_memory", "device_memory"):
        if (value := getattr(options, name)) is not None:
            row = replace(row, **{name: value})
    sizes = Sizes(
        options.hidden,
        options.layers,
        options.vocabulary,
        options.length,
        options.batch,
        fuses_norms=options.model == "own",
    )
    zero.init_distributed()  # under torchrun it chooses the GPU as well
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if isinstance(row.host_memory, int):
        row = replace(row, host_memory=row.host_memory * ranks)
    if isinstance(row.device_memory, int):
        row = replace(row, device_memory=row.device_memory * ranks)
    if not torch.cuda.is_available():
        say("there is no GPU: this runs on the processor")
    try:
        RowRun(options, row, sizes, ranks).run()
    except (ConfigError, PlanError) as error:
        raise SystemExit(f"gpu_bench: row {options.row} cannot run here: {error}") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SystemExit(f"gpu_bench: row {options.row} has no room: {error.strerror}") from None
    say(f"results are in {options.out}")
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    """Measure a row, or merge what was measured."""
    options = parse()
    if options.merge is not None:
        print(merge(options.merge))
        if options.report is not None:
            gpu_chart.write(options.merge, options.report)
        return
    if runs_beside(options):
        gpu_groups.run_row(options.row, options)
        print(merge(options.out))
        return
    run_alone(options)


if __name__ == "__main__":
    main()
