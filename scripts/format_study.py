"""Train the same model with the state in each format, paired by seed: table, JSON and curve.

    python scripts/format_study.py --json study.json --plot study.png

The byte-level model of the demo is trained on the standard library of the running Python (or
--text) in bf16, on a GPU if there is one. Runs with one seed start from the same weights and see
the same batches in the same order. What is compared is the mean loss of the last steps.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import charts
from format_optimizer import FormatAdamW
from lm_model import ModelShape, build_model
from lm_text import Text, load_text

from estimators import StateFormat
from estimators.command import output_option

LAST_STEPS = 50
BOUND = 0.005
"""How far the mean loss of a format may be from that of `exact`, either way."""


def parse_options() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    known = [each.value for each in StateFormat]
    usual = ["exact", "bf16", "compact"]
    formats = f"state formats, of {', '.join(known)} (default: {' '.join(usual)})"
    add("--formats", nargs="+", choices=known, default=usual, metavar="FORMAT", help=formats)
    add("--seeds", type=int, default=3, help="runs of each format (default: %(default)s)")
    add("--steps", type=int, default=1000, help="steps of a run (default: %(default)s)")
    add("--batch", type=int, default=16, help="sequences of a step (default: %(default)s)")
    add("--hidden", type=int, default=512, help="width of the model (default: %(default)s)")
    add("--layers", type=int, default=6, help="blocks of the model (default: %(default)s)")
    add("--sequence", type=int, default=256, help="bytes of a sequence (default: %(default)s)")
    add("--lr", type=float, default=6e-4, help="learning rate (default: %(default)s)")
    add("--at-once", type=int, default=1, help="runs that share the device, each in a process")
    add("--text", type=Path, metavar="PATH", help="default: the standard library of this Python")
    add("--json", type=output_option, metavar="FILE", help="write losses and comparison there")
    add(
        "--plot",
        type=output_option,
        metavar="FILE",
        help="draw the losses (needs matplotlib)",
    )
    add("--read", type=Path, metavar="FILE", help="show results of --json instead of training")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    options = parser.parse_args()
    for name in ("seeds", "steps", "batch", "hidden", "layers", "sequence", "at_once"):
        if getattr(options, name) < 1:
            shown = name.replace("_", "-")
            parser.error(f"--{shown} must be at least 1, got {getattr(options, name)}")
    if options.read is not None and not options.read.is_file():
        parser.error(f"--read {options.read}: there is no such file")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device; leave it out to train on the CPU")
    if options.plot is not None and options.plot.suffix != ".png":
        parser.error(f"--plot {options.plot}: the name must end in .png")
    charts.require(options.plot)
    return options


def batches(text: Text, options: argparse.Namespace, seed: int) -> Tensor:
    """Return the batches of a run, shape [step, batch, sequence + 1], on the device."""
    generator = random.Random(seed)
    count = options.steps * options.batch
    windows = text.windows(count, options.sequence + 1, generator)
    joined = torch.frombuffer(bytearray(b"".join(windows)), dtype=torch.uint8)
    return joined.view(options.steps, options.batch, options.sequence + 1).to(options.device)


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Return the rate of a step: a linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, options.steps // 20)
    if step < warm_up:
        return float(options.lr * (step + 1) / warm_up)
    done = (step - warm_up) / max(1, options.steps - warm_up)
    return float(options.lr * (0.55 + 0.45 * math.cos(math.pi * done)))


def train(
    state_format: StateFormat, seed: int, data: Tensor, options: argparse.Namespace
) -> tuple[list[float], FormatAdamW]:
    """Train one run and return the loss of every step."""
    torch.manual_seed(seed)
    heads = max(1, options.hidden // 64)
    shape = ModelShape(options.hidden, options.layers, heads, options.sequence)
    model = build_model(shape, on_meta=False).to(options.device, torch.bfloat16)
    optimizer = FormatAdamW(model, state_format, seed)
    losses: list[Tensor] = []
    for step in range(options.steps):
        tokens = data[step].long()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = torch.nn.utils.get_total_norm(optimizer.gradients()).item()
        losses.append(loss.detach())
        hyperparameters = {
            "lr": learning_rate(step, options),
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.1,
        }
        optimizer.step(min(1.0, 1.0 / (norm + 1e-6)), hyperparameters)
    return torch.stack(losses).tolist(), optimizer


def run_one(name: str, seed: int, text: Text, options: argparse.Namespace) -> dict[str, object]:
    """Train one run and return what it gave."""
    data = batches(text, options, seed)
    start = time.perf_counter()
    losses, optimizer = train(StateFormat(name), seed, data, options)
    return {
        "format": name,
        "seed": seed,
        "last_mean": statistics.fmean(losses[-LAST_STEPS:]),
        "seconds": time.perf_counter() - start,
        "parameters": sum(piece.parameter.numel() for piece in optimizer.pieces),
        "state_bytes": optimizer.state_bytes,
        "kernels": optimizer.kernels.name,
        "losses": losses,
    }


def outcomes(text: Text, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield every format with every seed, as they come."""
    wanted = [(name, seed) for seed in range(options.seeds) for name in options.formats]
    if options.at_once <= 1:
        for name, seed in wanted:
            yield run_one(name, seed, text, options)
        return
    context = multiprocessing.get_context("spawn")  # a device does not survive a fork
    with ProcessPoolExecutor(options.at_once, mp_context=context) as pool:
        futures = [pool.submit(run_one, name, seed, text, options) for name, seed in wanted]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)  # those behind one that failed are not begun


def study(options: argparse.Namespace, console: Console) -> dict[str, object]:
    """Run every format with every seed; return the results as plain data, written as they come."""
    text = load_text(options.text, options.sequence)
    runs: list[dict[str, object]] = []
    for run in outcomes(text, options):
        runs.append(run)
        console.print(
            f"seed {run['seed']}, {run['format']}: {run['last_mean']:.5f} nats a byte in"
            f" {run['seconds']:.1f} s"
        )
        if options.json is not None:
            results = describe(runs, text, options)
            options.json.write_text(json.dumps(results), encoding="utf-8")
    return describe(runs, text, options)


def describe(
    runs: list[dict[str, object]], text: Text, options: argparse.Namespace
) -> dict[str, object]:
    """Return the runs, what they ran on, and their comparison."""
    return {
        "text": text.origin,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "torch": torch.__version__,
        "options": {key: str(value) for key, value in vars(options).items()},
        "runs": runs,
        "comparison": compare(runs, options.formats),
    }


def compare(runs: list[dict[str, object]], formats: list[str]) -> list[dict[str, object]]:
    """Pair the runs of each format with those of the first by seed, where a seed has them all."""
    means = {(run["format"], run["seed"]): float(str(run["last_mean"])) for run in runs}
    seeds = sorted({int(str(run["seed"])) for run in runs})
    seeds = [seed for seed in seeds if all((name, seed) in means for name in formats)]
    if not seeds:
        return []
    first = formats[0]
    rows: list[dict[str, object]] = []
    for name in formats:
        run = next(run for run in runs if run["format"] == name)
        ratios = [means[name, seed] / means[first, seed] - 1.0 for seed in seeds]
        rows.append(
            {
                "format": name,
                "bytes_per_parameter": float(str(run["state_bytes"]))
                / float(str(run["parameters"])),
                "mean_loss": statistics.fmean(means[name, seed] for seed in seeds),
                "differences": ratios,
                "mean_difference": statistics.fmean(ratios),
                "within_bound": abs(statistics.fmean(ratios)) <= BOUND,
            }
        )
    return rows


def show(results: dict[str, object], console: Console) -> None:
    """Print the comparison."""
    lengths = [len(run["losses"]) for run in results.get("runs", ())]  # type: ignore[attr-defined]
    last = min([LAST_STEPS, *lengths])
    table = Table(title=f"Loss of the last {last} steps", title_justify="left")
    for heading in ("format", "bytes a parameter", "nats a byte", "difference", "of each seed"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    for row in results["comparison"]:  # type: ignore[attr-defined]
        table.add_row(
            row["format"],
            f"{row['bytes_per_parameter']:.2f}",
            f"{row['mean_loss']:.4f}",
            f"{row['mean_difference']:+.3%}",
            ", ".join(f"{each:+.3%}" for each in row["differences"]),
        )
    console.print(table)


def plot(results: dict[str, object], path: Path) -> None:
    """Draw the smoothed loss of every run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"exact": "black", "fp32": "grey", "bf16": "tab:blue", "compact": "tab:orange"}
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for run in results["runs"]:  # type: ignore[attr-defined]
        losses = torch.tensor(run["losses"])
        smooth = losses.unfold(0, min(25, len(losses)), 1).mean(dim=1)
        label = run["format"] if run["seed"] == 0 else None
        axes.plot(smooth, color=colours[run["format"]], linewidth=0.8, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a byte (mean of 25 steps)")
    axes.set_yscale("log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the study and report it."""
    options = parse_options()
    console = Console()
    if options.read is not None:
        results = json.loads(options.read.read_text(encoding="utf-8"))
    else:
        results = study(options, console)
    show(results, console)
    if options.plot is not None:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
