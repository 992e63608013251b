"""What ranks do that have a GPU each. Run under torchrun as `gpu_ranks.py FOLDER`.

Every rank writes what came of each part to `FOLDER/rankN.json`. `FOLDER/one` holds a checkpoint of
one rank when they begin, and `FOLDER/several` one of theirs when they end.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import zero
from tests.support.configs import make_config
from tests.support.grid import CLIP, run_cell
from tests.support.observe import state_digest
from tests.support.ranks import (
    changes,
    different_seeds,
    loading,
    set_gradients,
    touches,
    unused_everywhere,
)
from tests.support.tiny import make_batch, make_model

CASES = (touches, changes, loading, set_gradients, unused_everywhere, different_seeds)
STEPS = 40
LIMIT_S = 150
"""After so long a rank says where it hangs, and ends."""


def rank_cells() -> list[dict[str, Any]]:
    """Return the cells of the grid: (type, tier, parameters too, update device, stage, more)."""
    chosen: list[tuple[str, str, bool, str, int, dict[str, Any]]] = [
        ("bf16", "none", False, "auto", 3, {}),
        ("bf16", "cpu", True, "auto", 3, {}),
        ("bf16", "cpu", True, "cpu", 3, {}),
        ("bf16", "cpu", True, "auto", 3, {"device_memory": "24MB"}),
        ("bf16", "cpu", True, "auto", 3, {"communication_data_type": "fp32"}),
        ("bf16", "nvme", True, "auto", 3, {}),
        ("bf16", "nvme", True, "cpu", 3, {}),
        ("bf16", "none", False, "auto", 2, {}),
        ("bf16", "cpu", False, "auto", 1, {}),
        ("bf16", "nvme", False, "cpu", 2, {}),
        ("fp32", "none", False, "auto", 3, {}),
        ("fp32", "nvme", True, "auto", 3, {}),
        ("fp32", "cpu", False, "auto", 0, {}),
    ]
    return [
        {
            "dtype": dtype,
            "device": device,
            "with_parameters": with_parameters,
            "update_device": update_device,
            "stage": stage,
            "accumulation": 2,
            "clip": CLIP,
            **more,
        }
        for dtype, device, with_parameters, update_device, stage, more in chosen
    ]


def config(folder: Path, tier: str) -> dict[str, Any]:
    """Return a configuration that pages, or keeps all on a tier."""
    more: dict[str, Any] = {"host_memory": "1GB"}
    if tier == "nvme":
        more = {"nvme_path": str(folder), "sub_group_size": 1024, "host_memory": "100KB"}
    return make_config(parameters=tier, optimizer=tier, dtype="bf16", clip=1.0, **more)


def train(engine: zero.ZeroEngine, first: int, last: int) -> list[float]:
    """Train some steps and return the losses."""
    losses = []
    for step in range(first, last):
        batch = make_batch(step, engine.global_rank)
        loss = engine(*(each.to(engine.device) for each in batch))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def growth(folder: Path) -> list[Any]:
    """Return device memory after some steps and after many, and what the copies moved."""
    engine, _, _, _ = zero.initialize(
        model=make_model(dtype=torch.bfloat16), config=config(folder, "cpu")
    )
    seen: list[Any] = []
    for first, last in ((0, 10), (10, STEPS)):
        train(engine, first, last)
        gc.collect()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    seen.append(dict(engine.ledger.copied_bytes))
    engine.destroy()
    return seen


def elastic(folder: Path) -> dict[str, Any]:
    """Load what one rank saved, tell the state, train on and save; tell the state again."""
    engine, _, _, _ = zero.initialize(
        model=make_model(dtype=torch.bfloat16), config=config(folder, "nvme")
    )
    if not engine.plan.memory.swap_file_bytes:
        raise RuntimeError("nothing rests on NVMe, so nothing would be shown of it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the other world size
        engine.load_checkpoint(folder / "one")
    loaded = state_digest(engine)
    train(engine, 3, 5)
    engine.save_checkpoint(folder / "several")
    found = {"loaded": loaded, "saved": state_digest(engine), "device": str(engine.device)}
    engine.destroy()
    return found


def main() -> None:
    """Run all parts, and write down what came of each."""
    folder = Path(sys.argv[1])
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    zero.init_distributed()
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {"outcomes": [], "backend": torch.distributed.get_backend_config()}
    begin = time.monotonic()

    def note(what: str) -> None:
        (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        sys.stderr.write(f"rank {rank}: {what} after {time.monotonic() - begin:.1f} s\n")

    for cell in rank_cells():
        found["outcomes"].append(run_cell(cell, str(folder)))
        note(f"cell {cell['dtype']} {cell['device']} stage {cell['stage']}")
    found["cases"] = {case.__name__: case(str(folder), rank) for case in CASES}
    note("cases")
    found["growth"] = growth(folder)
    note("growth")
    found["elastic"] = elastic(folder)
    note("elastic")
    faulthandler.cancel_dump_traceback_later()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
