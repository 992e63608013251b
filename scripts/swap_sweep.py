"""Find out how to page a model on this machine: memory, sub-groups, read-ahead, format, device.

    python scripts/swap_sweep.py 125M --dir /nvme0 --report sweep.png --apply ds_config.json
    python scripts/swap_sweep.py ds_config.json --model 1.3B --synthetic --seconds 120
    python scripts/swap_sweep.py my_models:make --dir /nvme0 --budgets 8GB 16GB

MODEL_OR_CONFIG is a size (125M, 1.3B: a transformer of about so many parameters), a model's
config.json (hidden_size, num_hidden_layers), a function `module:function` that returns a model and
a batch for it, or a ZeRO configuration, which is then swept around (--model says the model).

Every case trains a few steps through zero.initialize, or with --synthetic moves the same bytes
through the same plan without a model. Every case is measured once, then the better half of each
amount of memory again, down to the last three. Compared are the seconds of the update and of waits
before it: computing is the same in all cases, and disturbed by others. Each measurement is kept in
the --results file at once: a sweep that was killed, or whose --seconds were over, goes on when it
is started again.
"""

import argparse
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.markup import escape

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import charts
from swap_sweep_cases import Case, Results, Step, best_of, choose, next_case, size_text
from swap_sweep_loops import Job, base_of, everything_bytes, job_of, measure, rests_on_nvme
from swap_sweep_report import panels_of, row_of, table_of, to_json, verdict

from aio_ops.tune import ApplyError, TuneError
from aio_ops.tune.apply import apply, check_applicable, merge, read
from aio_ops.tune.checks import check
from aio_ops.tune.command import report_path, size
from estimators.command import output_option
from zero import ConfigError, PlanError
from zero.config import load_config
from zero.machine import available_host_bytes

_WIDTH_OF_A_FILE = 150


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model_or_config", metavar="MODEL_OR_CONFIG")
    add("--dir", type=Path, metavar="DIR", help="where swap files go (default: what a config says)")
    add("--model", default="125M", help="beside a ZeRO configuration (default 125M)")
    add("--synthetic", action="store_true", help="move the same bytes without a model")
    add("--seconds", type=float, default=300.0, help="stop after so long (default 300)")
    add("--steps", type=int, default=2, help="timed of each measurement (default 2)")
    add("--sequence", type=int, default=64, help="tokens of a batch (default 64)")
    add("--dtype", choices=("fp32", "bf16"), help="of the model (default: as configured, or bf16 "
        "on a GPU or with --synthetic, else fp32)")  # fmt: skip
    add("--offload-param", action="store_true", help="parameters rest on NVMe as well")
    swept = parser.add_argument_group("what is swept").add_argument
    swept("--budgets", nargs="+", default=["25%", "50%"], metavar="SIZE",
          help="host memory: 8G, or a share of what everything takes (25%% 50%%)")  # fmt: skip
    swept("--sub-groups", nargs="+", type=size, default=[1 << 19, 1 << 21, 1 << 23],
          metavar="N", help="elements (default 512K 2M 8M)")  # fmt: skip
    swept("--slots", nargs="+", type=int, default=[3, 6, 12], metavar="N",
          help="read-ahead and write-behind (default 3 6 12)")  # fmt: skip
    swept("--bursts", nargs="+", type=int, default=[0], metavar="N", help="default 0: mixed")
    swept("--formats", nargs="+", metavar="F",
          help="of the state (default: exact, and for bf16 fp32 too)")  # fmt: skip
    swept("--devices", nargs="+", metavar="D", help="of the update (default: all there are)")
    out = parser.add_argument_group("what is written").add_argument
    out("--results", type=output_option, default=Path("swap_sweep.jsonl"), metavar="FILE",
        help="measurements to go on from (default swap_sweep.jsonl)")  # fmt: skip
    out("--json", type=output_option, metavar="FILE", help="all that was measured")
    out("--report", type=report_path, metavar="FILE.png|.html", help="with charts")
    out("--apply", type=Path, metavar="ds_config.json", help="merge the best into a configuration")
    return parser.parse_args(arguments)


def what_to_sweep(options: argparse.Namespace) -> tuple[Job, dict[str, Any]]:
    """Return the model and the configuration that cases change."""
    job = job_of(options.model_or_config, options.sequence)
    document: dict[str, Any] = {}
    if job is None:
        document = read(Path(options.model_or_config))
        job = job_of(options.model, options.sequence)
        if job is None:
            raise SystemExit(f"--model {options.model}: a size such as 125M, a model's config.json "
                             "or module:function is needed")  # fmt: skip
        return job, base_of(document, options.dir, options.dtype)
    if options.dir is None:
        raise SystemExit("--dir is needed: name the directory where swap files go")
    section = {"device": "nvme", "nvme_path": str(options.dir.resolve())}
    zero_section: dict[str, Any] = {"stage": 3, "offload_optimizer": section}
    if options.offload_param:
        zero_section["offload_param"] = section
    on_gpu = torch.cuda.is_available()
    dtype = options.dtype or ("bf16" if on_gpu or options.synthetic else "fp32")
    return job, base_of({"zero_optimization": zero_section}, options.dir, dtype)


def cases_of(options: argparse.Namespace, config: dict[str, Any], whole_bytes: int) -> list[Case]:
    """Return every combination that is asked for."""
    is_bf16 = bool((config.get("bf16") or {}).get("enabled"))
    formats = options.formats or (["exact", "fp32"] if is_bf16 else ["exact"])
    for name in formats:
        load_config(merge(config, {"tiers": {"state_format": name}}))  # refused with its reason
    budgets = sorted({_budget(text, whole_bytes) for text in options.budgets})
    grid = itertools.product(
        budgets, formats, options.sub_groups, options.slots, options.bursts,
        options.devices or _devices(config),
    )  # fmt: skip
    return [Case(*each) for each in grid]


def _budget(text: str, whole_bytes: int) -> int:
    try:
        wanted = (
            int(float(text[:-1]) / 100 * whole_bytes)
            if text.endswith("%")
            else size(text.removesuffix("B"))
        )
    except (ValueError, argparse.ArgumentTypeError):
        raise SystemExit(f"--budgets {text}: write a size such as 8G, or a share such as 25%") from None  # fmt: skip  # noqa: E501
    available = available_host_bytes()
    if wanted > available:
        raise SystemExit(
            f"--budgets {text} is {size_text(wanted)}, and this machine has {size_text(available)}"
        )
    return wanted


def _devices(config: dict[str, Any]) -> list[str]:
    """Return where the optimizer can run here; "auto" stands for all where there is no GPU."""
    if not torch.cuda.is_available():
        return ["auto"]
    found = []
    for name in ("cpu", "device"):
        try:
            load_config(merge(config, {"tiers": {"update_device": name}}))
        except ConfigError:
            continue
        found.append(name)
    return found


def sweep(
    results: Results,
    cases: list[Case],
    run: Callable[[Case], Step],
    show: Callable[[Case], bool],
) -> None:
    """Measure until all is clear; whoever calls ends it when time is over."""
    while (case := next_case(cases, results)) is not None:
        try:
            results.add(case, run(case))
        except (PlanError, ConfigError, OSError) as error:
            results.refuse(case, f"{case.describe()}: {error}")
        if not show(case):
            return


class Progress:
    """A live table on a terminal, lines elsewhere; says when time is over."""

    def __init__(self, results: Results, cases: list[Case], seconds: float) -> None:
        self.console = Console(highlight=False, emoji=False)
        if not self.console.is_terminal:
            self.console.width = _WIDTH_OF_A_FILE
        self._results, self._cases, self._seconds = results, cases, seconds
        self._begin = time.perf_counter()
        self.live = Live(console=self.console, auto_refresh=False)

    def say(self, *lines: str) -> None:
        """Print lines as they are."""
        for line in lines:
            self.console.print(escape(line), soft_wrap=True)

    def show(self, case: Case) -> bool:
        """Show what was measured, and return whether there is time for more."""
        spent = time.perf_counter() - self._begin
        if self.console.is_terminal:
            title = f"{spent:.0f} of {self._seconds:.0f} s"
            self.live.update(table_of(self._results, title), refresh=True)
        else:
            steps = self._results.steps.get(case)
            said = "refused" if steps is None else f"{row_of(case, steps)[7]} s of update and waits"
            self.say(f"{spent:6.1f} s  {case.describe()}: {said}")
        return spent < self._seconds


def prepare(options: argparse.Namespace, config: dict[str, Any]) -> None:
    """Refuse now what would stop the end of the sweep."""
    if not rests_on_nvme(config):
        raise SystemExit(
            f"{options.model_or_config} offloads nothing to nvme, so nothing pages: add "
            '"offload_optimizer": {"device": "nvme", "nvme_path": ...} to zero_optimization'
        )
    for entry in load_config(config).settings(1).tiers.nvme:
        disk = check(entry.path)
        if disk.remote or disk.in_memory:
            raise SystemExit(f"{disk.warning()}")
    charts.require(options.report)
    if options.apply is not None:
        check_applicable(options.apply, Case(1 << 30, "exact", 1 << 20, 3, 0, "auto").part())


def finish(options: argparse.Namespace, results: Results, cases: list[Case], whole: int) -> int:
    """Print and write what was found; return the exit status."""
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    lines = verdict(results, cases, whole)
    best = best_of(cases, results)
    console.print(table_of(results, "the best"))
    console.print("\n".join(map(escape, lines)), soft_wrap=True)
    if options.json is not None:
        document = json.dumps(to_json(results, cases, whole), indent=1)
        options.json.write_text(document + "\n", encoding="utf-8")
    if not best:
        return 1
    if options.report is not None:
        order = sorted(results.steps)
        head = [str(column.header) for column in table_of(results, "").columns]
        rows = [row_of(case, results.steps[case]) for case in order]
        panels = panels_of(results, cases)
        charts.write(options.report, "swap_sweep", lines, panels, [head, *rows])
        console.print(f"report: {options.report}")
    part = choose(best, results).part()
    if options.apply is None:
        console.print("for the configuration (or --apply FILE):", json.dumps(part, indent=2))
        return 0
    kept = apply(options.apply, part)
    said = "has it already" if kept is None else f"has it now, {kept.name} is the file as it was"
    console.print(f"{options.apply} {said}", soft_wrap=True)
    return 0


def run(options: argparse.Namespace) -> int:
    """Sweep, and return the exit status."""
    job, config = what_to_sweep(options)
    prepare(options, config)
    whole_bytes = everything_bytes(job, config)
    cases = cases_of(options, config, whole_bytes)
    asked = {
        "model": job.name,
        "loop": "synthetic" if options.synthetic else "training",
        "sequence": options.sequence,
        "steps": options.steps,
        "config": config,
    }
    with Results(options.results, asked) as results:
        progress = Progress(results, cases, options.seconds)
        progress.say(
            f"{job.name}: {size_text(whole_bytes)} of host memory would hold everything; "
            f"{len(cases)} cases, {results.found} measurements are in {options.results}"
        )
        with progress.live if progress.console.is_terminal else progress.console:
            sweep(
                results,
                cases,
                lambda case: measure(job, config, case, options.steps, synthetic=options.synthetic),
                progress.show,
            )
        return finish(options, results, cases, whole_bytes)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    options = options_of(arguments)
    warnings.simplefilter("ignore")
    try:
        return run(options)
    except (TuneError, ApplyError, ConfigError) as error:
        sys.stderr.write(f"swap_sweep: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"swap_sweep: interrupted; start it again to go on from {options.results}\n")  # fmt: skip  # noqa: E501
        return 130


if __name__ == "__main__":
    sys.exit(main())
