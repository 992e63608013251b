"""Run the equivalence grid in one process a rank and write what each cell did as JSON.

Run as `python grid.py OUT NVME_PATH`, or under torchrun for more ranks.
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
from tests.support.configs import BETAS, EPS, LR, WEIGHT_DECAY, make_config, slot_budget
from tests.support.observe import (
    as_bits,
    digest,
    full_gradients,
    full_parameters,
    process_io_bytes,
    rank_pieces,
)
from tests.support.reference import ReferenceAdamW
from tests.support.tiny import make_batch, make_model

STEPS = 5
CLIP = 0.5
SUB_GROUP_SIZE = 65536
EXTRA = (1, 2, 3, 7, 262143, 262144, 262145)


def cells() -> list[dict[str, Any]]:
    """Return the grid: tier x what is offloaded x accumulation x clipping x type."""
    return [
        {
            "device": device,
            "with_parameters": with_parameters,
            "accumulation": accumulation,
            "clip": clip,
            "dtype": dtype,
        }
        for dtype, accumulation, clip, with_parameters, device in itertools.product(
            ("fp32", "bf16"), (1, 4), (0.0, CLIP), (False, True), ("none", "cpu", "nvme")
        )
    ]


def cell_config(cell: dict[str, Any], world_size: int, nvme_path: str) -> dict[str, Any]:
    """Return the configuration of a cell; nvme cells get exactly two slots a rank.

    `update_device`, `device_memory`, `stage` and `communication_data_type` may be added to a cell.
    """
    config = _tier_config(cell, world_size, nvme_path)
    config["zero_optimization"]["stage"] = cell.get("stage", 3)
    config["tiers"]["update_device"] = cell.get("update_device", "auto")
    config["tiers"]["state_format"] = cell.get("state_format", "exact")
    config["tiers"]["device_memory"] = cell.get("device_memory", "auto")
    config["communication_data_type"] = cell.get("communication_data_type")
    return config


def _tier_config(cell: dict[str, Any], world_size: int, nvme_path: str) -> dict[str, Any]:
    optimizer = cell["device"]
    parameters = cell["device"] if cell["with_parameters"] else "none"
    common = {
        "parameters": parameters,
        "optimizer": optimizer,
        "nvme_path": nvme_path,
        "dtype": cell["dtype"],
        "accumulation": cell["accumulation"],
        "clip": cell["clip"],
        "sub_group_size": SUB_GROUP_SIZE,
    }
    if optimizer != "nvme":
        return make_config(**common, host_memory="1GB")
    probe = make_config(**{**common, "optimizer": "cpu", "parameters": "none"}, host_memory="1GB")
    plan = zero.plan_memory(make_model(extra=EXTRA), probe, world_size)
    budget = slot_budget(
        plan.memory.request.segments,
        slots=2,
        world_size=world_size,
        parameters=parameters,
        optimizer=optimizer,
        sub_group_size=SUB_GROUP_SIZE,
    )
    return make_config(**common, host_memory=budget)


def run_cell(cell: dict[str, Any], nvme_path: str) -> dict[str, Any]:
    """Train `STEPS` steps beside the reference and report what happened on this rank."""
    model = make_model(extra=EXTRA)
    masters = {name: as_bits(each.float()) for name, each in model.named_parameters()}
    config = cell_config(cell, _world_size(), nvme_path)
    engine, _, _, _ = zero.initialize(model=model, config=config)
    reference = ReferenceAdamW(masters, bf16=list(masters) if cell["dtype"] == "bf16" else ())
    outcome: dict[str, Any] = {
        "cell": cell,
        "world_size": engine.world_size,
        "slots": engine.plan.memory.slots.count,
        "swap_file_bytes": engine.plan.memory.swap_file_bytes,
        "engine": engine.plan.engine_name,
        "kernels": engine.plan.kernels_name,
        **{key: [] for key in ("losses", "norms", "mismatches", "ledger", "process_io")},
    }
    for step in range(STEPS):
        gradients = run_step(engine, step, cell["accumulation"], outcome)
        norm = reference.step(
            gradients,
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            clip=cell["clip"],
            pieces=rank_pieces(engine),
        )
        outcome["norms"].append([norm, engine.get_global_grad_norm()])
        ours = full_parameters(engine)
        outcome["mismatches"].extend(
            f"step {step}: {name}"
            for name in masters
            if not np.array_equal(ours[name].view(np.uint8), reference.param(name).view(np.uint8))
        )
    final = full_parameters(engine)
    outcome["digest"] = digest(final)
    outcome["came_ahead"] = sum(event == "prefetch" for event, _ in engine.ledger.events)
    if cell["dtype"] == "fp32":
        outcome["torch_difference"] = torch_difference(cell, engine, final)
    engine.destroy()
    return outcome


def run_step(
    engine: zero.ZeroEngine, step: int, accumulation: int, outcome: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Run one step, note losses and bytes in `outcome`, and return the accumulated gradients."""
    written = set(engine._runtime.store.written_states)
    io_before, before = process_io_bytes(), engine.ledger.snapshot()
    for micro in range(accumulation):
        batch = make_batch(step * accumulation + micro, engine.global_rank)
        loss = engine(*(each.to(engine.device) for each in batch))
        engine.backward(loss)
        outcome["losses"].append(loss.item())
    observing = engine.ledger.snapshot()
    gradients = full_gradients(engine)
    observed = engine.ledger.snapshot().minus(observing)
    engine.step()
    moved = engine.ledger.snapshot().minus(before)
    io_after = process_io_bytes()
    planned = step_traffic(engine.plan.memory, accumulation, written_states=written)
    outcome["ledger"].append(
        {
            "read": moved.nvme_read_bytes - observed.nvme_read_bytes,
            "written": moved.nvme_write_bytes,
            "planned_read": planned.total_read_bytes,
            "planned_written": planned.total_written_bytes,
        }
    )
    outcome["process_io"].append(
        {
            "read": io_after[0] - io_before[0] - moved.nvme_read_bytes,
            "written": io_after[1] - io_before[1] - moved.nvme_write_bytes,
        }
    )
    return gradients


def torch_difference(
    cell: dict[str, Any], engine: zero.ZeroEngine, final: dict[str, np.ndarray]
) -> float:
    """Return the largest difference from an unsharded torch AdamW on the same data and device."""
    trained = _torch_trained(cell["accumulation"], cell["clip"], engine.world_size, engine.device)
    return max(
        float(np.abs(final[name] - values).max(initial=0.0)) for name, values in trained.items()
    )


_TORCH_CACHE: dict[tuple[int, float, int, str], dict[str, np.ndarray]] = {}


def _torch_trained(
    accumulation: int, clip: float, world_size: int, device: torch.device
) -> dict[str, np.ndarray]:
    key = (accumulation, clip, world_size, device.type)
    if key not in _TORCH_CACHE:
        model = make_model(extra=EXTRA).to(device)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
        )
        for step in range(STEPS):
            for micro, rank in itertools.product(range(accumulation), range(world_size)):
                batch = make_batch(step * accumulation + micro, rank)
                loss = model(*(each.to(device) for each in batch))
                (loss / (accumulation * world_size)).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        _TORCH_CACHE[key] = {name: as_bits(each) for name, each in model.named_parameters()}
    return _TORCH_CACHE[key]


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


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
