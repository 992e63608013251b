"""Whole training steps on one GPU, beside the peer's: one row of the table a call.

    gpu_bench.py --row host-exact --out results        measures a row and writes results/ROW.json
    gpu_bench.py --merge results                       prints the table of all rows there

A row names where optimizer state (and parameters) may rest and how much host memory there is. The
model is Llama-shaped with 1.364 B parameters, batch 4 x 1024 tokens, bf16, clipping at 1.0. With
`--peer PROGRAM` the peer's program for the same row runs before and after ours, its last line is
JSON as that of `peer_deepspeed_gpu.py` in the issue's benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_model import Llama, Shape

import zero
from offload import process_bytes

GB = 1_000_000_000


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    optimizer: str
    parameters: str = "none"
    host_memory: int | str = "auto"
    device_memory: int | str = "auto"
    state_format: str = "exact"
    peer_case: str = "cpu"
    checkpoints: bool = False
    warm_up: int = 2


ROWS = {
    "host-exact": Row("cpu", device_memory=8 * GB),
    "host-compact": Row("cpu", device_memory=8 * GB, state_format="compact"),
    "nvme-18gb-exact": Row("nvme", host_memory=18 * GB, device_memory=8 * GB, peer_case="nvme"),
    "nvme-4gb-exact": Row(
        "nvme", host_memory=4 * GB, device_memory=8 * GB, peer_case="nvme", warm_up=1
    ),
    "nvme-4gb-compact": Row(
        "nvme",
        host_memory=4 * GB,
        device_memory=8 * GB,
        state_format="compact",
        peer_case="nvme",
        warm_up=1,
    ),
    "all-nvme-4gb-exact": Row(
        "nvme", "nvme", host_memory=4 * GB, peer_case="nvme_param", checkpoints=True, warm_up=1
    ),
    "all-nvme-4gb-compact": Row(
        "nvme",
        "nvme",
        host_memory=4 * GB,
        state_format="compact",
        peer_case="nvme_param",
        checkpoints=True,
        warm_up=1,
    ),
    "device-exact": Row("none", peer_case="none"),
}


def make_config(row: Row, nvme_path: str, batch: int, changes: list[str]) -> dict[str, Any]:
    """Return the configuration of a row; `changes` are `key=value` of `tiers`."""
    stage: dict[str, Any] = {"stage": 3}
    for key, device in (("offload_optimizer", row.optimizer), ("offload_param", row.parameters)):
        if device != "none":
            stage[key] = {"device": device}
            if device == "nvme":
                stage[key]["nvme_path"] = nvme_path
    tiers: dict[str, Any] = {
        "host_memory": row.host_memory,
        "device_memory": row.device_memory,
        "state_format": row.state_format,
    }
    for change in changes:
        name, _, value = change.partition("=")
        tiers[name] = int(value) if value.isdigit() else value
    return {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": stage,
        "tiers": tiers,
    }


def run_ours(options: argparse.Namespace, row: Row) -> dict[str, Any]:
    """Train a row and return what it took."""
    shape = Shape(options.hidden, options.layers, options.vocabulary, options.length)
    has_gpu = torch.cuda.is_available()
    begin = time.perf_counter()
    torch.manual_seed(0)
    with torch.device("cuda" if has_gpu else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = Llama(shape, checkpoints=row.checkpoints)
        torch.set_default_dtype(torch.float32)
    synchronize()
    built = time.perf_counter()
    baseline = process_bytes("VmRSS")["VmRSS"]  # with CUDA's own memory
    with tempfile.TemporaryDirectory(dir=options.nvme) as folder:
        config = make_config(row, folder, options.batch, options.tiers)
        engine, _, _, _ = zero.initialize(model=model, config=config)
        synchronize()
        ready = time.perf_counter()
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(
            0, options.vocabulary, (options.batch, options.length), generator=generator
        ).to(engine.device)
        reset_peak()
        start = process_bytes("VmRSS")["VmRSS"]
        rows = [train_step(engine, tokens, options) for _ in range(row.warm_up + options.steps)]
        outcome = summary(engine, rows[row.warm_up :])
        outcome["rows"] = rows
        outcome["startup_seconds"] = {"build": built - begin, "shard": ready - built}
        outcome["rss_bytes"] = {
            "before": baseline,
            "start": start,
            "peak": process_bytes("VmHWM")["VmHWM"],
        }
        outcome["plan"] = engine.plan.to_dict()
        if options.profile:
            outcome["profile"] = profile(engine, tokens)
        engine.destroy()
    return outcome


def train_step(
    engine: zero.ZeroEngine, tokens: torch.Tensor, options: argparse.Namespace
) -> dict[str, float]:
    """Run one step and return its seconds; phases are only known where they are waited for."""
    synchronize()
    times = [time.perf_counter()]
    loss = engine(tokens)
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
        "median_seconds": statistics.median(seconds),
        "spread_seconds": [min(seconds), max(seconds)],
        "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        "ledger": last,
        "memory": engine.memory_report()["lines"],
    }


def profile(engine: zero.ZeroEngine, tokens: torch.Tensor) -> str:
    """Return the longest operations of one step, as torch's profiler sees them."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as found:
        engine.backward(engine(tokens))
        engine.step()
        synchronize()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table: str = found.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60)
    return table


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


def run_peer(program: str, row: Row) -> dict[str, Any]:
    """Run the peer's program for a row and return the last line of its output."""
    done = subprocess.run(
        [*shlex.split(program), row.peer_case],
        env={**os.environ, "CKPT": "1" if row.checkpoints else ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def peer_seconds(outcome: dict[str, Any]) -> float | None:
    """Return the median step of a peer's outcome, the first one left out."""
    rows = outcome.get("rows", [])[1:]
    return statistics.median(row[3] for row in rows) if rows else None


def merge(folder: Path) -> str:
    """Return the table of all rows in a folder, as Markdown."""
    lines = [
        "| row | ours, s | spread, s | peer, s | ratio | device peak, GB | RSS peak, GB"
        " | start-up, s | in / out over the link, GB | NVMe read / written, GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        ours = found["ours"]
        peers = [each for each in map(peer_seconds, found.get("peers", [])) if each is not None]
        peer = statistics.median(peers) if peers else None
        seconds, ledger = ours["median_seconds"], ours["ledger"]
        copied = ledger.get("copied_bytes", {})
        nvme = ledger["nvme_bytes"]
        cells = [
            found["row"],
            f"{seconds:.3f}",
            " to ".join(f"{each:.3f}" for each in ours["spread_seconds"]),
            f"{peer:.2f}" if peer else "-",
            f"{peer / seconds:.1f}" if peer else "-",
            f"{ours['device_peak_bytes'] / GB:.2f}",
            f"{ours['rss_bytes']['peak'] / GB:.2f}",
            f"{sum(ours['startup_seconds'].values()):.1f}",
            f"{copied.get('in', 0) / GB:.1f} / {copied.get('out', 0) / GB:.1f}",
            " / ".join(
                f"{sum(size for name, size in nvme.items() if name.startswith(way)) / GB:.1f}"
                for way in ("nvme read", "nvme write")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure a row, or merge what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", choices=ROWS)
    parser.add_argument("--merge", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--nvme", default=tempfile.gettempdir())
    parser.add_argument("--peer", help="command of the peer's program; left out: ours alone")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--phases", action="store_true", help="wait between the phases of a step")
    parser.add_argument("--profile", action="store_true", help="profile one step at the end")
    parser.add_argument("--tiers", nargs="*", default=[], metavar="KEY=VALUE")
    for name, value in (("hidden", 2048), ("layers", 24), ("vocabulary", 32000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    if options.merge is not None:
        print(merge(options.merge))
        return
    if options.row is None:
        parser.error("name a row with --row, or a folder with --merge")
    row = ROWS[options.row]
    outcome: dict[str, Any] = {"row": options.row, "command": sys.argv, "peers": []}
    if options.peer:
        outcome["peers"].append(run_peer(options.peer, row))
    outcome["ours"] = run_ours(options, row)
    if options.peer:
        outcome["peers"].append(run_peer(options.peer, row))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.row}.json"
    path.write_text(json.dumps(outcome, indent=1), encoding="utf-8")
    print(outcome["ours"].pop("profile", ""))
    print(json.dumps({key: value for key, value in outcome["ours"].items() if key != "plan"}))


if __name__ == "__main__":
    main()
