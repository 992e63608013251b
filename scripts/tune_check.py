"""Does training move bytes as fast as the tuner said? A configuration's step beside its disk.

    tierzero-nvme-tune /nvme0 --apply ds_config.json
    python scripts/tune_check.py ds_config.json

It trains a stack of linear layers whose optimizer state does not fit the budget, so that every step
pages all of it in and out. The bytes that a step moves each second stand beside the mix that the
same disk gives with the same settings, measured before and after each step. The configuration's own
budget, batch and sub-group size are replaced, everything else stays. Exit status 0: the step moves
at least --least of the mix.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from places import json_option

import zero
from aio_ops.tune.bench import Allowance, Bench
from aio_ops.tune.settings import Setting, Workload
from estimators.command import output_option

WIDTH = 2048
WARM_UP_STEPS = 1
BENCH_S = 0.2
HALF_BYTES = 128 << 20  # of the file that the mix is measured on


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=json_option, help="a configuration that --apply has changed")
    parser.add_argument("--layers", type=int, default=64, help="of 4.2 M parameters (default 64)")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--host-memory", default="600MB", help="the budget (default 600MB)")
    parser.add_argument("--sub-group-size", type=int, default=1 << 21, help="default 2097152")
    parser.add_argument("--least", type=float, default=0.9, help="of the mix (default 0.9)")
    parser.add_argument("--json", type=output_option)
    return parser.parse_args(arguments)


def adapted(document: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration with a budget that makes every step page."""
    changed: dict[str, Any] = json.loads(json.dumps(document))
    for name in ("train_batch_size", "gradient_accumulation_steps", "scheduler"):
        changed.pop(name, None)
    changed["train_micro_batch_size_per_gpu"] = 1
    changed["zero_optimization"]["sub_group_size"] = options.sub_group_size
    changed.setdefault("tiers", {})["host_memory"] = options.host_memory
    changed.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-4}})
    return changed


def setting_of(document: dict[str, Any]) -> Setting:
    """Return the setting that the configuration names."""
    aio = document["aio"]
    engine = aio["engine"]
    on_threads = engine in ("threads", "python")
    depth = aio["intra_op_parallelism"] if on_threads else aio["queue_depth"]
    return Setting(engine, aio["block_size"], depth)


def measure(
    document: dict[str, Any], options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Return what each step moved a second, and the mix of the disk around it."""
    directory = Path(document["tiers"]["nvme"][0]["path"])
    setting = setting_of(document)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(options.layers))
    )
    engine, _, _, _ = zero.initialize(model=model, config=adapted(document, options))
    steps, mixes = [], []
    batch = torch.randn(1, WIDTH, device=engine.device)
    with Bench(directory, HALF_BYTES, Allowance(10**12)) as bench:
        bench.fill(setting.engine)
        around = [bench.measure(setting, Workload.MIX, BENCH_S).rate]
        for number in range(options.steps + WARM_UP_STEPS):
            engine.backward(engine(batch).square().mean())
            before, begin = engine.ledger.snapshot(), time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - begin
            moved = engine.ledger.snapshot().minus(before)
            around.append(bench.measure(setting, Workload.MIX, BENCH_S).rate)
            if number >= WARM_UP_STEPS:
                steps.append((moved.nvme_read_bytes + moved.nvme_write_bytes) / seconds)
                mixes.append(statistics.mean(around[-2:]))
    engine.destroy()
    return steps, mixes


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and say whether it is enough."""
    options = options_of(arguments)
    document = json.loads(options.config.read_text(encoding="utf-8"))
    if not document.get("tiers", {}).get("nvme") or "engine" not in document.get("aio", {}):
        raise SystemExit(
            f"{options.config} names no tuned setting: `tierzero-nvme-tune DIR --apply "
            f"{options.config}` first"
        )
    steps, mixes = measure(document, options)
    if not min(steps):
        raise SystemExit("no step moved a byte; does the configuration offload to nvme?")
    table = Table("step", "moved (GB/s)", "mix of the disk (GB/s)", "share")
    for number, (own, mix) in enumerate(zip(steps, mixes, strict=True)):
        table.add_row(str(number + 1), f"{own / 1e9:.2f}", f"{mix / 1e9:.2f}", f"{own / mix:.0%}")
    console = Console()
    console.print(table)
    share = statistics.median(own / mix for own, mix in zip(steps, mixes, strict=True))
    enough = share >= options.least
    console.print(
        f"training moves {share:.0%} of the mix, {'as' if enough else 'less than'} asked for"
        f" ({options.least:.0%})",
        highlight=False,
    )
    if options.json:
        found = {"share": share, "steps": steps, "mixes": mixes}
        options.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
