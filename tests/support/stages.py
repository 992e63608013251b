"""Train the same model under every stage, on every tier of the optimizer, and say what came of it.

`run_all` runs here; `python stages.py OUT NVME_PATH few|all` does under torchrun.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zero
from tests.support.configs import BETAS, EPS, LR, WEIGHT_DECAY, make_config
from tests.support.grid import run_step
from tests.support.observe import as_bits, digest, full_parameters, rank_pieces
from tests.support.reference import ReferenceAdamW
from tests.support.tiny import make_batch, make_model

STEPS = 3
CLIP = 0.5
EXTRA = (1, 3, 70)


def cells(*, few: bool) -> list[dict[str, Any]]:
    """Return every stage with every tier of the optimizer and both types, or some of them."""
    every = [
        {"stage": stage, "device": device, "dtype": dtype}
        for dtype, device, stage in itertools.product(
            ("fp32", "bf16"), ("none", "cpu", "nvme"), (0, 1, 2, 3)
        )
    ]
    chosen = {("fp32", "none", 0), ("fp32", "none", 3), ("fp32", "nvme", 1), ("bf16", "none", 3)}
    chosen |= {("bf16", "cpu", 1), ("bf16", "nvme", 2)}
    return [
        cell
        for cell in every
        if not few or (cell["dtype"], cell["device"], cell["stage"]) in chosen
    ]


def config_of(cell: dict[str, Any], nvme_path: str) -> dict[str, Any]:
    """Return the configuration of a cell; on NVMe little of it stays resident."""
    return make_config(
        stage=cell["stage"],
        optimizer=cell["device"],
        nvme_path=nvme_path,
        dtype=cell["dtype"],
        accumulation=2,
        clip=CLIP,
        host_memory="90KB" if cell["device"] == "nvme" else "1GB",
        sub_group_size=1024,
    )


def local_digest(engine: zero.ZeroEngine) -> str:
    """Return a hash of what this rank's model holds, without asking another rank."""
    with torch.no_grad():
        named = engine.module.named_parameters()
        return digest({name: as_bits(parameter) for name, parameter in named})


def run_cell(cell: dict[str, Any], nvme_path: str) -> dict[str, Any]:
    """Train beside the reference."""
    model = make_model(extra=EXTRA)
    masters = {name: as_bits(each.float()) for name, each in model.named_parameters()}
    engine, _, _, _ = zero.initialize(model=model, config=config_of(cell, nvme_path))
    reference = ReferenceAdamW(masters, bf16=list(masters) if cell["dtype"] == "bf16" else ())
    outcome: dict[str, Any] = {"losses": [], "ledger": [], "process_io": [], "problems": []}
    for step in range(STEPS):
        gradients = run_step(engine, step, 2, outcome)
        norm = reference.step(
            gradients, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip=CLIP,
            pieces=rank_pieces(engine),
        )  # fmt: skip
        if norm != engine.get_global_grad_norm():
            outcome["problems"].append(f"step {step}: norm {norm}")
        ours = full_parameters(engine)
        outcome["problems"].extend(
            f"step {step}: {name} differs from the reference"
            for name in masters
            if not np.array_equal(ours[name].view(np.uint8), reference.param(name).view(np.uint8))
        )
    moved = engine.ledger.snapshot()
    found = {
        "cell": cell,
        "world_size": engine.world_size,
        "stage": engine.zero_optimization_stage(),
        "problems": outcome["problems"],
        "losses": outcome["losses"],
        "digest": digest(full_parameters(engine)),
        "moved_bytes": [moved.nvme_read_bytes, moved.nvme_write_bytes],
        "is_plain": all(type(each) is torch.nn.Parameter for each in model.parameters()),
        "plan": [line["what"] for line in engine.memory_report()["lines"]],
    }
    if cell["stage"] < 3:
        found["local"] = local_digest(engine)
    engine.destroy()
    return found


def run_changes(stage: int, dtype: str, nvme_path: str) -> list[str]:
    """Change a model in every way that there is between steps, and give a digest after each."""
    cell = {"stage": stage, "device": "nvme", "dtype": dtype}
    model = make_model(extra=EXTRA)
    model.blocks[1].requires_grad_(requires_grad=False)
    engine, _, _, _ = zero.initialize(model=model, config=config_of(cell, nvme_path))
    rank = engine.global_rank
    average = zero.ShardedAverage(model, decay=0.5)
    weight = model.blocks[0].up.weight
    found: list[str] = []

    def note() -> None:
        found.append(digest(full_parameters(engine))[:16])
        if stage < 3:
            found[-1] += "" if local_digest(engine)[:16] == found[-1] else " not on this rank"

    def step(number: int) -> None:
        for micro in range(2):
            engine.backward(engine(*make_batch(2 * number + micro, rank)))
        engine.step()
        note()

    step(0)
    _change_values(engine, note)
    step(1)
    average.update()
    with average.applied():
        note()
    note()
    with zero.GatheredParameters([weight, model.norm.bias], modifier_rank=engine.world_size - 1):
        weight.data[1:3] = 0.25 + rank
        model.norm.bias.data.fill_(rank)
    note()
    step(2)
    zero.load_weights(model, make_model(seed=7, extra=EXTRA).state_dict())
    note()
    model.blocks[1].requires_grad_(requires_grad=True)
    step(3)
    zero.resize_parameter(engine, model.embedding.weight, (35, 16))
    step(4)
    engine.destroy()
    return found


def _change_values(engine: zero.ZeroEngine, note: Callable[[], None]) -> None:
    """Set one parameter as a whole, and change it and another in place."""
    weight = engine.module.blocks[0].up.weight
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(weight.shape, generator=generator)
    zero.safe_set_full_fp32_param(weight, values)
    note()
    with torch.no_grad():
        weight.mul_(0.3)
        engine.module.norm.weight.data.add_(0.01)


def run_all(nvme_path: str, *, few: bool) -> dict[str, Any]:
    """Run everything, or some of it."""
    return {
        "cells": [run_cell(cell, nvme_path) for cell in cells(few=few)],
        "changes": {
            f"{stage} {dtype}": run_changes(stage, dtype, nvme_path)
            for stage in ((2, 3) if few else (1, 2, 3))
            for dtype in (("bf16",) if few else ("fp32", "bf16"))
        },
        "refusal": refusal(nvme_path),
    }


def refusal(nvme_path: str) -> str:
    """Set a piece of what every rank has, and say what came of it."""
    cell = {"stage": 1, "device": "none", "dtype": "fp32"}
    engine, _, _, _ = zero.initialize(model=make_model(), config=config_of(cell, nvme_path))
    weight = engine.module.norm.weight
    own = zero.safe_get_local_fp32_param(weight)
    try:
        zero.safe_set_local_fp32_param(weight, own)
    except zero.ShardedAccessError as error:
        return str(error)
    finally:
        engine.destroy()
    return "set"


def main() -> None:
    """Run everything and write one JSON file a rank."""
    out, nvme_path = Path(sys.argv[1]), sys.argv[2]
    few = sys.argv[3] == "few"
    torch.set_num_threads(1)
    zero.init_distributed()
    rank = torch.distributed.get_rank()
    (out / f"rank{rank}.json").write_text(json.dumps(run_all(nvme_path, few=few)), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
