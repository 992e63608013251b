"""Train a byte-level transformer on real text while its parameters and state live on NVMe.

Run `bash scripts/demo.sh` the first time, or see `python scripts/train_lm.py --help`. Under
torchrun each process is a rank, and rank 0 prints. Exit codes: 0 done; 1 the training failed;
2 something given cannot be used, said in one line before any work; 130 stopped by Ctrl-C, 143 by
SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from lm_options import (
    Overrides,
    UsageError,
    check_writable,
    override,
    parse_arguments,
    prepare_swap_folders,
    read_settings,
)
from lm_text import Text, TextError, load_text

if TYPE_CHECKING:
    from lm_model import ModelShape
    from lm_report import StepReport
    from rich.console import Console

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
MAX_FINAL_STEPS = 10  # one batch says little: the final loss is the mean of the last ones
PROMPT_BYTES = 24


class Stopped(Exception):  # noqa: N818
    """The run ended because a signal asked for it."""

    def __init__(self, signal_number: int, steps: int) -> None:
        name = "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name
        super().__init__(f"stopped by {name} after step {steps}; nothing is left on disk")
        self.exit_code = 128 + signal_number


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for, checked."""

    options: argparse.Namespace
    settings: dict[str, Any]
    text: Text
    shape: ModelShape
    console: Console
    entropy: float


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line and return the exit code."""
    warnings.showwarning = _warn_in_one_line
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # generated text may be beyond the terminal's set
    try:
        train(parse_arguments(arguments))
    except UsageError as error:
        return _complain(str(error), 2)
    except Stopped as stop:
        return _complain(str(stop), stop.exit_code)
    except KeyboardInterrupt:
        return _complain("stopped by Ctrl-C; nothing is left on disk", 128 + signal.SIGINT)
    except BrokenPipeError:
        # The reader of the output has left; Python's own flush at exit must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"the training failed: {error}", 1, every_rank=True)
    return 0


def train(options: argparse.Namespace) -> None:
    """Plan, train and report; what cannot be used raises UsageError before any state exists."""
    job = check_job(options)
    engine = start_engine(job)
    try:
        run(engine, job)
    finally:
        engine.destroy()
        leave_process_group()


def check_job(options: argparse.Namespace) -> Job:
    """Check the options, the configuration, the text and the installation."""
    settings = override(read_settings(options.config), Overrides.from_arguments(options))
    with _as_usage_error(TextError):
        text = load_text(options.text, options.sequence)
    for option in ("json", "ledger", "trace"):
        check_writable(getattr(options, option), f"--{option}")
    with _as_usage_error(ImportError, hint="run bash scripts/demo.sh, which installs it"):
        from lm_model import ModelShape
        from lm_report import make_console
    with _as_usage_error(ValueError):
        shape = ModelShape(
            options.hidden, options.layers, options.heads, options.sequence, options.tied
        )
    return Job(options, settings, text, shape, make_console(RANK), text.unigram_entropy())


def start_engine(job: Job) -> Any:
    """Print the plan, and only then allocate what it says."""
    import torch
    from lm_model import build_model, initialize_module

    with _as_usage_error(ImportError, hint="run bash scripts/demo.sh, which installs it"):
        import zero
    unusable = (zero.ConfigError, zero.PlanError, OSError)
    with _as_usage_error(RuntimeError, hint="choose a smaller --hidden or --sequence"):
        skeleton = build_model(job.shape, on_meta=True)
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    prepare_swap_folders(job.settings)
    with _as_usage_error(*unusable):
        plan = zero.plan_memory(skeleton, job.settings, WORLD_SIZE)
    job.console.print(
        f"text: {job.text.origin}; byte-unigram entropy {job.entropy:.3f} nats\n"
        f"model: {parameters:,} parameters, {job.shape.layers} blocks of width {job.shape.hidden}",
        soft_wrap=True,
        markup=False,
    )
    job.console.print(zero.plan_table(plan))
    torch.manual_seed(job.options.seed)
    meta = job.options.meta
    with _as_usage_error(*unusable):
        engine, *_ = zero.initialize(
            model=skeleton if meta else build_model(job.shape, on_meta=False),
            config=job.settings,
            init_fn=initialize_module if meta else None,
        )
    return engine


def run(engine: Any, job: Job) -> None:
    """Train, then report and generate a sample."""
    from lm_report import ProgressLine, bytes_table, sample, time_table
    from lm_training import StopSignals, Trainer, generate

    options, console = job.options, job.console
    if options.trace is not None:
        engine.ledger.start_trace()
    started = engine.ledger.snapshot()
    with StopSignals() as stop, ProgressLine(console, options.steps) as progress:
        trainer = Trainer(engine, job.text, options.sequence, options.seed, stop)
        reports = trainer.run(options.steps, progress)
    moved = engine.ledger.snapshot().minus(started)
    summary = summarize(reports, job)
    write_ledger(engine, options)
    summary["bytes_by_class"] = dict(moved.bytes_by_class)
    summary["seconds"] = {**trainer.phases, **moved.seconds}
    if trainer.stopped:
        write_summary(summary, job)
        raise Stopped(stop.received or signal.SIGINT, len(reports))
    note = f", rank 0 of {engine.world_size}" if engine.world_size > 1 else ""
    console.print(time_table(trainer.phases, moved.seconds, len(reports)))
    console.print(bytes_table(moved.bytes_by_class, len(reports), note))
    console.print(verdict(summary), soft_wrap=True)
    if options.generate:
        prompt = job.text.content.strip()[:PROMPT_BYTES] or job.text.content[:PROMPT_BYTES]
        written = generate(engine, prompt, options.generate, options.sequence, options.seed)
        console.print("sample (the prompt, then what the model makes of it):")
        console.print(sample(prompt, written), soft_wrap=True)
        summary["sample"] = written.decode("utf-8", errors="replace")
    write_summary(summary, job)


def summarize(reports: list[StepReport], job: Job) -> dict[str, Any]:
    """Return what the steps amount to, ready for JSON."""
    final_steps = max(1, min(MAX_FINAL_STEPS, len(reports) // 3))
    final_loss = sum(report.loss for report in reports[-final_steps:]) / final_steps
    seconds = sum(report.seconds for report in reports)
    return {
        "steps": len(reports),
        "interrupted": len(reports) < job.options.steps,
        "losses": [report.loss for report in reports],
        "final_loss": final_loss,
        "final_steps": final_steps,
        "unigram_entropy": job.entropy,
        "below_entropy": final_loss < job.entropy,
        "tokens_per_second": sum(report.tokens for report in reports) / seconds,
        "training_seconds": seconds,
        "nvme_read_bytes": sum(report.read_bytes for report in reports),
        "nvme_write_bytes": sum(report.write_bytes for report in reports),
        "peak_host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def verdict(summary: dict[str, Any]) -> str:
    """Return one line on whether the model has learned more than how frequent each byte is."""
    relation = "below" if summary["below_entropy"] else "not yet below (train for more --steps)"
    return (
        f"loss {summary['losses'][0]:.3f} at first, {summary['final_loss']:.3f} over the last "
        f"{summary['final_steps']} steps: {relation} the byte-unigram entropy of the text, "
        f"{summary['unigram_entropy']:.3f} nats; {summary['tokens_per_second']:,.0f} tokens/s"
    )


def write_summary(summary: dict[str, Any], job: Job) -> None:
    """Write the summary where --json asked for it."""
    if job.options.json is not None and RANK == 0:
        job.options.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def write_ledger(engine: Any, options: argparse.Namespace) -> None:
    """Write what --ledger and --trace asked for, of rank 0."""
    if RANK == 0 and options.ledger is not None:
        options.ledger.write_text(engine.ledger.report().json_lines(), encoding="utf-8")
    if RANK == 0 and options.trace is not None:
        options.trace.write_text(json.dumps(engine.ledger.trace("rank 0")), encoding="utf-8")


def leave_process_group() -> None:
    """End torch's process group, if the engine started one under a launcher and left it."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@contextlib.contextmanager
def _as_usage_error(*kinds: type[Exception], hint: str = "") -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise UsageError(f"{error}; {hint}" if hint else str(error)) from error


def _complain(message: str, exit_code: int, *, every_rank: bool = False) -> int:
    """Write one line to stderr, on rank 0 unless the other ranks may know something else."""
    if RANK == 0 or every_rank:
        sys.stderr.write(f"train_lm: {' '.join(message.split())}\n")
    return exit_code


def _warn_in_one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    _complain(f"warning: {message}", 0)


if __name__ == "__main__":
    sys.exit(main())
