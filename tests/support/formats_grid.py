"""Train with every fused optimizer and every format in one process a rank; write JSON.

Run as `python formats_grid.py OUT NVME_PATH`, or under torchrun for more ranks.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zero
from estimators import step_traffic
from tests.support.configs import make_config, slot_budget
from tests.support.observe import (
    as_bits,
    digest,
    full_gradients,
    full_parameters,
    process_io_bytes,
    rank_pieces,
)
from tests.support.reference_rules import HYPERPARAMETERS, ReferenceRule
from tests.support.tiny import make_batch, make_model

STEPS = 3
CLIP = 0.5
NAMES = {"adam": "Adam", "lion": "Lion", "adagrad": "Adagrad", "sgd": "SGD", "adamw": "AdamW"}
EXTRA = (40_000,)
SUB_GROUP_SIZE = 8192
LOSSY_RULES = ("adamw", "lion")


def cells() -> list[dict[str, Any]]:
    """Return optimizer x tier x type in exact formats, then the lossy formats on each tier."""
    exact = [
        {"rule": rule, "device": device, "dtype": dtype, "format": state_format}
        for rule in HYPERPARAMETERS
        for device, (dtype, state_format) in itertools.product(
            ("none", "nvme"), (("fp32", "exact"), ("bf16", "exact"), ("bf16", "fp32"))
        )
    ]
    lossy = [
        {"rule": rule, "device": device, "dtype": "bf16", "format": state_format}
        for state_format in ("bf16", "compact")
        for rule in LOSSY_RULES
        for device in ("none", "cpu", "nvme")
    ]
    return exact + lossy


def cell_config(cell: dict[str, Any], nvme_path: str) -> dict[str, Any]:
    """Return the configuration of a cell; with NVMe the host holds two slots and nothing else."""
    if cell["device"] != "nvme":
        return _config(cell, cell["device"], nvme_path, "1GB")
    probe = zero.plan_memory(make_model(extra=EXTRA), _config(cell, "none", nvme_path, "1GB"))
    budget = slot_budget(
        probe.memory.request.segments,
        slots=2,
        world_size=probe.memory.request.world_size,
        parameters="nvme",
        optimizer="nvme",
        sub_group_size=SUB_GROUP_SIZE,
        state_format=cell["format"],
        rule=probe.memory.request.rule,
    )
    return _config(cell, "nvme", nvme_path, budget)


def _config(
    cell: dict[str, Any], device: str, nvme_path: str, host_memory: int | str
) -> dict[str, Any]:
    config = make_config(
        parameters=device,
        optimizer=device,
        nvme_path=nvme_path,
        dtype=cell["dtype"],
        accumulation=2,
        clip=CLIP,
        host_memory=host_memory,
        sub_group_size=SUB_GROUP_SIZE,
        state_format=cell["format"],
    )
    if cell["rule"] != "adamw":
        params = dict(HYPERPARAMETERS[cell["rule"]])
        if "betas" in params:
            params["betas"] = list(params["betas"])
        if cell["rule"] == "adam":
            params["adam_w_mode"] = False
        config["optimizer"] = {"type": NAMES[cell["rule"]], "params": params}
    return config


def run_cell(cell: dict[str, Any], nvme_path: str) -> dict[str, Any]:
    """Train a cell, beside the reference where the format is exact, and report what happened."""
    model = make_model(extra=EXTRA)
    masters = {name: as_bits(each.float()) for name, each in model.named_parameters()}
    engine, _, _, _ = zero.initialize(model=model, config=cell_config(cell, nvme_path))
    reference = None
    if cell["format"] in ("exact", "fp32"):
        bf16 = list(masters) if cell["dtype"] == "bf16" else ()
        reference = ReferenceRule(cell["rule"], masters, bf16=bf16)
    outcome: dict[str, Any] = {
        "cell": cell,
        "kernels": engine.plan.kernels_name,
        "losses": [],
        "mismatches": [],
        "moved": [],
    }
    for step in range(STEPS):
        gradients = run_step(engine, step, outcome, reads_gradients=reference is not None)
        ours = full_parameters(engine)
        if reference is None:
            continue
        pieces = rank_pieces(engine)
        reference.step(gradients, clip=CLIP, pieces=pieces, **HYPERPARAMETERS[cell["rule"]])
        outcome["mismatches"].extend(
            f"step {step}: {name}"
            for name in masters
            if not np.array_equal(ours[name].view(np.uint8), reference.param(name).view(np.uint8))
        )
    outcome["digest"] = digest(full_parameters(engine))
    engine.destroy()
    return outcome


def run_step(
    engine: zero.ZeroEngine, step: int, outcome: dict[str, Any], *, reads_gradients: bool
) -> dict[str, np.ndarray]:
    """Run one step of two micro-batches and note its losses and bytes."""
    written = set(engine._runtime.store.written_states)
    io_before, before = process_io_bytes(), engine.ledger.snapshot()
    for micro in range(2):
        loss = engine(*make_batch(2 * step + micro, engine.global_rank))
        engine.backward(loss)
        outcome["losses"].append(loss.item())
    observing = engine.ledger.snapshot()
    gradients = full_gradients(engine) if reads_gradients else {}
    observed = engine.ledger.snapshot().minus(observing)
    engine.step()
    moved = engine.ledger.snapshot().minus(before)
    io_after = process_io_bytes()
    planned = step_traffic(engine.plan.memory, 2, written_states=written)
    outcome["moved"].append(
        {
            "read": moved.nvme_read_bytes - observed.nvme_read_bytes,
            "written": moved.nvme_write_bytes,
            "planned_read": planned.total_read_bytes,
            "planned_written": planned.total_written_bytes,
            "kernel_read": io_after[0] - io_before[0] - observed.nvme_read_bytes,
            "kernel_written": io_after[1] - io_before[1],
        }
    )
    return gradients


def main() -> None:
    """Run every cell and write one JSON file a rank."""
    out, nvme_path = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    zero.init_distributed()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    outcomes = [run_cell(cell, nvme_path) for cell in cells()]
    (out / f"rank{rank}.json").write_text(json.dumps(outcomes), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
