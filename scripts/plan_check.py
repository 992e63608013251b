"""Holds what `python -m zero plan` says against what training takes, on the device that is there.

    python scripts/plan_check.py DIRECTORY                  # all shapes, a table
    python scripts/plan_check.py DIRECTORY --case JSON      # one, in this process: JSON

Every case runs in a process of its own. Pools are compared with the pages that are present in the
arena and with the blocks of the swap file, the process with VmHWM on the CPU, the device with
`max_memory_allocated` on a GPU, and the least time of a step with the median time that steps take.
The rates that it follows from are the best that the same process shows before, between and after
its steps (`plan_rates.py`). A case is bound by I/O if link or drive need longer, at these rates,
than a whole step of the same shape takes with nothing offloaded; there the bound is to be within
twice of the step.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import plan_models  # noqa: E402
from places import folder_option  # noqa: E402
from plan_rates import DriveProbe, MachineRates  # noqa: E402

import zero  # noqa: E402
from estimators import Section, Tier  # noqa: E402
from estimators.activations import Batch  # noqa: E402
from estimators.command import output_option  # noqa: E402
from estimators.estimate import Estimate, estimate, estimate_placed  # noqa: E402
from estimators.hardware import Bandwidths  # noqa: E402
from estimators.inputs import DeviceKind, Node, PlanInputs  # noqa: E402
from estimators.models import model_of_config  # noqa: E402
from offload import disk_bytes, process_bytes  # noqa: E402
from zero.memory import present_bytes  # noqa: E402
from zero.plan_inputs import ELEMENTS, TIERS  # noqa: E402

PLACEMENTS = {
    "none": ("none", "none"),
    "cpu": ("cpu", "cpu"),
    "nvme": ("none", "nvme"),
    "all on nvme": ("nvme", "nvme"),
}
GB = 10**9
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROBE_BYTES = {"cpu": 64 << 20, "cuda": 192 << 20}


@dataclass(frozen=True)
class Case:
    """One shape, placed one way."""

    name: str
    config: dict[str, Any]
    placement: str
    samples: int = 2
    sequence: int = 256
    checkpointing: bool = False
    dtype: str = "fp32"
    host_bytes: int = 64_000_000
    steps: int = 2
    device: str = "cpu"
    directory: str = "/tmp"  # where swap files go
    quick: bool = False  # rates are not measured


def llama(hidden: int, width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Return a configuration of a dense decoder."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 2048,
    }
    return {"model_type": "llama", **sizes, **more}


def experts(hidden: int, width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Return a configuration of a decoder with routed experts."""
    routed = {"num_local_experts": 6, "num_experts_per_tok": 2, **more}
    return {**llama(hidden, width, layers, heads, **routed), "model_type": "mixtral"}


def encoder(hidden: int, width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Return a configuration of an encoder."""
    sizes = {"max_position_embeddings": 1024, "hidden_dropout_prob": 0.0, **more}
    return {**llama(hidden, width, layers, heads, **sizes), "model_type": "bert"}


CPU_SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"config": llama(512, 1408, 6, 8)},
    "wide vocabulary": {"config": llama(256, 704, 4, 4, vocab_size=32000)},
    "deep and narrow": {"config": llama(192, 512, 32, 4)},
    "shared keys, tied": {
        "config": llama(512, 1408, 5, 8, num_key_value_heads=2, tie_word_embeddings=True)
    },
    "biased, wide heads": {
        "config": llama(384, 1024, 6, 6, head_dim=128, attention_bias=True, mlp_bias=True)
    },
    "experts": {"config": experts(256, 704, 4, 4)},
    "many experts": {"config": experts(192, 256, 4, 4, num_local_experts=16)},
    "encoder": {"config": encoder(384, 1536, 6, 6)},
    "small wide encoder": {"config": encoder(512, 2048, 3, 8, vocab_size=8000)},
    "long sequence": {"config": llama(384, 1024, 4, 6), "samples": 1, "sequence": 1024},
    "checkpointed": {"config": llama(384, 1024, 8, 6), "samples": 4, "checkpointing": True},
    "one block": {"config": llama(768, 2048, 1, 8)},
}

GPU_SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"config": llama(2048, 5632, 5, 16, vocab_size=32000), "host_bytes": 4 * GB},
    "wide vocabulary": {
        "config": llama(1536, 4096, 4, 12, vocab_size=128256), "host_bytes": 6 * GB,
    },
    "deep and narrow": {
        "config": llama(512, 1408, 48, 8, vocab_size=32000),
        "samples": 8,
        "host_bytes": 3 * GB // 2,
    },
    "experts": {
        "config": experts(2048, 5632, 2, 16, vocab_size=32000), "samples": 4, "host_bytes": 7 * GB,
    },
    "encoder": {
        "config": encoder(2048, 8192, 6, 16, vocab_size=30522),
        "sequence": 512,
        "samples": 4,
        "host_bytes": 4 * GB,
    },
}  # fmt: skip
_GPU_DEFAULTS = {
    "samples": 2,
    "sequence": 1024,
    "dtype": "bf16",
    "steps": 4,
}


def cases(device: str, directory: str, *, quick: bool = False) -> list[Case]:
    """Return all cases of a device."""
    shapes = CPU_SHAPES if device == "cpu" else GPU_SHAPES
    usual = {} if device == "cpu" else _GPU_DEFAULTS
    common = {"device": device, "directory": directory, "quick": quick}
    return [
        Case(name=name, placement=placement, **{**usual, **shape, **common})
        for name, shape in shapes.items()
        for placement in PLACEMENTS
    ]


def ds_config(case: Case) -> dict[str, Any]:
    """Return the configuration that a case trains with."""
    stage: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,  # what is kept is not read, and the plan says how much is
    }
    for key, device in zip(
        ("offload_param", "offload_optimizer"), PLACEMENTS[case.placement], strict=True
    ):
        if device != "none":
            stage[key] = {"device": device}
        if device == "nvme":
            stage[key]["nvme_path"] = case.directory
    tiers: dict[str, Any] = {"host_memory": case.host_bytes if "nvme" in case.placement else "4GB"}
    if case.device != "cpu":
        tiers["host_memory"] = case.host_bytes if "nvme" in case.placement else "60GB"
    return {
        "bf16": {"enabled": case.dtype == "bf16"},
        "train_micro_batch_size_per_gpu": case.samples,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": stage,
        "tiers": tiers,
    }


def predict(case: Case, engine: zero.ZeroEngine) -> Estimate:
    """Return what is planned from the configuration alone."""
    parameters, optimizer = PLACEMENTS[case.placement]
    budget = engine.plan.memory.host_budget_bytes
    kind = DeviceKind.CPU if case.device == "cpu" else DeviceKind.CUDA
    return estimate(
        PlanInputs(
            model_of_config(case.config, case.name),
            Node(kind, host_bytes=budget),
            Batch(case.samples, case.sequence, checkpointing=case.checkpointing),
            element=ELEMENTS[case.dtype],
            parameter_tier=TIERS[parameters],
            optimizer_tier=TIERS[optimizer],
            reuse_numel=0,
        )
    )


def with_rates(planned: Estimate, bandwidths: Bandwidths) -> Estimate:
    """Return the same plan with the times that follow from other rates."""
    node = dataclasses.replace(planned.inputs.node, bandwidths=bandwidths)
    return estimate_placed(dataclasses.replace(planned.inputs, node=node), planned.memory)


def warm_up(case: Case) -> None:
    """Train one step of a tiny model, so that everything is loaded that training loads."""
    config = llama(64, 128, 2, 2, vocab_size=64) | {"model_type": case.config["model_type"]}
    config |= {"num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 64}
    tiny = dataclasses.replace(case, config=config, samples=1, sequence=16, host_bytes=1_000_000)
    engine = start(tiny)
    train_step(engine, tiny, 0)
    engine.destroy()


def start(case: Case) -> zero.ZeroEngine:
    """Return an engine for a model that is built on meta."""
    with torch.device("meta"):
        model = plan_models.build(case.config, checkpointing=case.checkpointing)
    engine, _, _, _ = zero.initialize(
        model=model, config=ds_config(case), init_fn=plan_models.initialise
    )
    return engine


def train_step(engine: zero.ZeroEngine, case: Case, step: int) -> float:
    """Train one step and return its seconds."""
    tokens, targets = plan_models.batch(case.config, case.samples, case.sequence, step)
    tokens, targets = tokens.to(case.device), targets.to(case.device)
    begun = time.perf_counter()
    engine.backward(engine(tokens, targets))
    engine.step()
    if case.device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


@dataclass
class Outcome:
    """What was planned and what was found, of one case."""

    name: str
    placement: str
    pools: list[dict[str, Any]] = field(default_factory=list)
    planned_peak_bytes: int = 0
    peak_bytes: int = 0
    baseline_bytes: int = 0
    planned_swap_bytes: int = 0
    swap_blocks_bytes: int | None = None
    nvme_bytes_moved: int = 0
    planned_nvme_bytes: int = 0
    lower_bound_s: float = 0.0
    binding: str = ""
    moving_s: float = 0.0
    """What link or drive need at least, the longer one."""
    expected_s: float = 0.0
    step_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    device_planned: int = 0
    io_bound: bool | None = None
    """None where the shape was not trained with nothing offloaded."""

    @property
    def ratio(self) -> float:
        """Peak that was planned, of the one that was measured."""
        return self.planned_peak_bytes / self.peak_bytes


def run(case: Case, rates: MachineRates | None = None) -> Outcome:
    """Train one case and return what was planned and what was found.

    Args:
        case: what is trained.
        rates: what cases before it in this process have shown of the machine.
    """
    is_cpu = case.device == "cpu"
    torch.set_num_threads(1 if is_cpu else 8)
    warm_up(case)
    if not is_cpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts from here
    baseline = process_bytes("VmRSS")["VmRSS"]
    engine = start(case)
    planned = predict(case, engine)
    outcome = Outcome(case.name, case.placement)
    outcome.device_planned = planned.tensor_bytes
    seconds = [train_step(engine, case, step) for step in range(2)]
    # Memory and pools are looked at before anything is probed: the probes need memory too.
    if is_cpu:
        outcome.baseline_bytes = baseline
        outcome.planned_peak_bytes = baseline + planned.memory.host_bytes + planned.tensor_bytes
        outcome.peak_bytes = process_bytes("VmHWM")["VmHWM"]
    else:
        outcome.planned_peak_bytes = planned.tensor_bytes
        outcome.peak_bytes = torch.cuda.max_memory_allocated()
    compare_pools(outcome, planned, engine, is_cpu=is_cpu)
    snapshot = engine.ledger.report().to_dicts()[-1]
    outcome.nvme_bytes_moved = sum(snapshot["nvme_bytes"].values())
    traffic = planned.traffic
    outcome.planned_nvme_bytes = traffic.total_read_bytes + traffic.total_written_bytes
    if not case.quick:
        rates = rates or MachineRates(case.device, DTYPES[case.dtype])
        seconds += probed_steps(engine, case, rates)
        planned = with_rates(planned, rates.bandwidths())
    engine.destroy()
    time_of = planned.time
    outcome.lower_bound_s, outcome.binding = time_of.lower_bound, time_of.binding
    outcome.moving_s = max(time_of.link if not is_cpu else 0.0, time_of.drive)
    outcome.expected_s, outcome.step_s = time_of.expected, statistics.median(seconds[1:])
    outcome.steps_s = seconds
    return outcome


def probed_steps(engine: zero.ZeroEngine, case: Case, rates: MachineRates) -> list[float]:
    """Train more steps, looking at the machine before each of them and after the last."""
    drive = None
    if "nvme" in case.placement:
        drive = DriveProbe(Path(case.directory), PROBE_BYTES[case.device])
    seconds = []
    try:
        for step in range(2, case.steps):
            rates.sample(drive)
            seconds.append(train_step(engine, case, step))
        rates.sample(drive)
    finally:
        if drive is not None:
            drive.close()
    return seconds


def compare_pools(
    outcome: Outcome, planned: Estimate, engine: zero.ZeroEngine, *, is_cpu: bool
) -> None:
    """Fill in the pools: pages present in each part of the arena, blocks of the swap file."""
    store = engine._runtime.store
    tiers = (Tier.DEVICE, Tier.HOST) if is_cpu else (Tier.HOST,)
    for tier in tiers:
        for section in Section:
            spans = store.residents.spans(tier, section)
            outcome.pools.append(
                {
                    "tier": tier.value,
                    "what": section.name.lower(),
                    "planned": planned.memory.resident_section_bytes(tier, section),
                    "present": present_bytes(spans),
                }
            )
    outcome.planned_swap_bytes = planned.memory.swap_file_bytes
    outcome.swap_blocks_bytes = disk_bytes(store.swap_file)


def run_apart(case: Case) -> Outcome:
    """Run a case in a process of its own."""
    arguments = [case.directory, "--case", json.dumps(dataclasses.asdict(case))]
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{case.name}, {case.placement}: {done.stderr[-2000:]}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def row(outcome: Outcome) -> str:
    """Return one line of the table."""
    moves = {None: "?", True: "yes", False: "no"}[outcome.io_bound]
    return (
        f"| {outcome.name} | {outcome.placement} | {outcome.planned_peak_bytes / 1e6:,.0f}"
        f" | {outcome.peak_bytes / 1e6:,.0f} | {outcome.ratio:.3f}"
        f" | {outcome.lower_bound_s:.3f} ({outcome.binding}) | {outcome.step_s:.3f}"
        f" | {outcome.step_s / outcome.lower_bound_s if outcome.lower_bound_s else 0:.2f}"
        f" | {moves} |"
    )


def verdicts(found: list[Outcome], *, quick: bool) -> list[tuple[str, int, int]]:
    """Return what is to hold, of how many outcomes it holds, and of how many it should."""
    near = sum(0.9 <= each.ratio <= 1.1 for each in found)
    lines = [("peak within 10 %", near, len(found))]
    if not quick:
        above = sum(each.lower_bound_s <= each.step_s for each in found)
        moving = [each for each in found if each.io_bound]
        close = sum(each.step_s <= 2 * each.lower_bound_s for each in moving)
        lines.append(("bound not above the step", above, len(found)))
        lines.append(("bound by I/O: within twice", close, len(moving)))
    return lines


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the cases that were asked for."""
    return [
        case
        for case in cases(options.device, str(options.directory), quick=options.quick)
        if (not options.only or options.only in f"{case.name}, {case.placement}")
        and (not options.placement or case.placement in options.placement)
    ]


def collect(options: argparse.Namespace) -> list[Outcome]:
    """Run the cases that were asked for, print a line of each and keep them in the file."""
    found: list[Outcome] = []
    alone: dict[str, float] = {}
    shared: dict[str, MachineRates] = {}
    print(
        "| shape | lowest tier | planned MB | measured MB | ratio | at least s | step s | x | I/O |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case in chosen(options):
        if options.together:
            if case.dtype not in shared:
                shared[case.dtype] = MachineRates(case.device, DTYPES[case.dtype])
            outcome = run(case, shared[case.dtype])
        else:
            outcome = run_apart(case)
        if case.placement == "none":
            alone[case.name] = outcome.step_s
        if case.name in alone and not case.quick:
            outcome.io_bound = outcome.moving_s > alone[case.name]
        found.append(outcome)
        print(row(outcome), flush=True)
        if options.json is not None:
            text = json.dumps([dataclasses.asdict(each) for each in found], indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")
    return found


def main() -> int:
    """Run one case, or all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=folder_option)
    parser.add_argument("--case", metavar="JSON", help="one case, in this process")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="TEXT", help="cases whose name or placement has it")
    parser.add_argument("--placement", choices=PLACEMENTS, action="append", help="only these")
    parser.add_argument("--together", action="store_true", help="all cases in this process")
    parser.add_argument("--quick", action="store_true", help="do not measure rates")
    parser.add_argument("--json", type=output_option, metavar="FILE")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(dataclasses.asdict(run(Case(**json.loads(options.case))))))
        return 0
    found = collect(options)
    held = verdicts(found, quick=options.quick)
    for what, count, wanted in held:
        print(f"{what}: {count} of {wanted}")
    return 0 if all(count == wanted for _, count, wanted in held) else 1


if __name__ == "__main__":
    sys.exit(main())
