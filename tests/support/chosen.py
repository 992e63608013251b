"""Cells of the equivalence grid that hypothesis chooses: budgets, sizes, orders, settings.

In one process `run_chosen` runs a cell; for more ranks `python chosen.py OUT NVME_PATH CELLS` runs
a JSON list of them under torchrun and writes what each rank saw.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import zero
from estimators import minimum_host_bytes
from estimators.placement import in_play_bytes
from tests.support.configs import BETAS, EPS, LR, WEIGHT_DECAY, make_config
from tests.support.grid import run_step
from tests.support.observe import as_bits, digest, full_parameters, rank_pieces
from tests.support.reference import ReferenceAdamW
from tests.support.tiny import TinyTransformer

STEPS = 3
DEVICES = ("none", "cpu", "nvme")


class OrderedTransformer(TinyTransformer):
    """Uses its blocks in the order that it is told: some twice, some not at all."""

    order: tuple[int, ...] = ()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        for index in self.order:
            x = self.blocks[index](x)
        for parameter in self.extra:
            x = x + parameter.square().sum() * 1e-3
        logits = self.head(self.norm(x))
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@st.composite
def chosen_cells(draw: st.DrawFn) -> dict[str, Any]:
    """Choose one cell: at least one of parameters and optimizer state may page."""
    layers = draw(st.integers(2, 4))
    order = st.lists(st.integers(0, layers - 1), min_size=1, max_size=layers + 1)
    parameters, optimizer = draw(
        st.sampled_from([(a, b) for a in DEVICES for b in DEVICES if "nvme" in (a, b)])
    )
    return {
        "parameters": parameters,
        "optimizer": optimizer,
        "layers": layers,
        "extra": draw(st.lists(st.integers(1, 9000), max_size=3)),
        "orders": draw(
            st.just([list(range(layers))] * STEPS) | st.lists(order, min_size=STEPS, max_size=STEPS)
        ),
        "dtype": draw(st.sampled_from(["fp32", "bf16"])),
        "state_format": draw(st.sampled_from(["exact", "fp32"])),
        "accumulation": draw(st.integers(1, 3)),
        "clip": draw(st.sampled_from([0.0, 0.5])),
        "sub_group_size": draw(st.sampled_from([64, 100, 1000, 4096, 65536])),
        "budget": draw(st.floats(0, 1.05)),
        "slot_count": draw(st.none() | st.integers(1, 9)),
        "write_burst": draw(st.sampled_from([0, 0, 2, 3])),
        "verify": draw(st.booleans()),
    }


def make_ordered(cell: dict[str, Any]) -> OrderedTransformer:
    """Return the model of a cell, the same on every rank."""
    torch.manual_seed(cell["layers"])
    model = OrderedTransformer(layers=cell["layers"], extra=tuple(cell["extra"]))
    return model.to(torch.bfloat16 if cell["dtype"] == "bf16" else torch.float32)


def paging_config(cell: dict[str, Any], world_size: int, nvme_path: str) -> dict[str, Any]:
    """Return the configuration of a cell: its budget lies between the least and all."""
    config = resident_config(cell)
    for key, device in (
        ("offload_param", cell["parameters"]),
        ("offload_optimizer", cell["optimizer"]),
    ):
        if device != "none":
            config["zero_optimization"][key] = {"device": device, "nvme_path": nvme_path}
    config["tiers"] |= {name: cell[name] for name in ("slot_count", "write_burst", "verify")}
    request = zero.plan_memory(make_ordered(cell), config, world_size).memory.request
    least, everything = minimum_host_bytes(request), in_play_bytes(request)
    budget = max(least, int(least + cell["budget"] * (everything - least)))
    config["tiers"]["host_memory"] = max(budget, 1) * world_size
    return config


def resident_config(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a cell with everything on the device."""
    return make_config(
        dtype=cell["dtype"],
        accumulation=cell["accumulation"],
        clip=cell["clip"],
        host_memory="1GB",
        sub_group_size=cell["sub_group_size"],
        state_format=cell["state_format"],
    )


def run_chosen(cell: dict[str, Any], nvme_path: str) -> dict[str, Any]:
    """Train a cell on its tiers, beside the reference, and resident; report what differs."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    paged = _train(cell, paging_config(cell, world_size, nvme_path))
    resident = _train(cell, resident_config(cell))
    problems = [*paged["problems"], *resident["problems"]]
    if paged["digest"] != resident["digest"]:
        problems.append("the tiers give other bits")
    if paged["losses"] != resident["losses"]:
        problems.append(f"losses {paged['losses']} are not {resident['losses']}")
    return {
        "cell": cell,
        "digest": paged["digest"],
        "problems": problems,
        "swap_file_bytes": paged["swap_file_bytes"],
        "read_bytes": paged["read_bytes"],
    }


def _train(cell: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    model = make_ordered(cell)
    masters = {name: as_bits(each.float()) for name, each in model.named_parameters()}
    engine, _, _, _ = zero.initialize(model=model, config=config)
    reference = ReferenceAdamW(masters, bf16=list(masters) if cell["dtype"] == "bf16" else ())
    outcome: dict[str, Any] = {"losses": [], "ledger": [], "process_io": [], "problems": []}
    for step, order in enumerate(cell["orders"]):
        model.order = tuple(order)
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
        if norm != engine.get_global_grad_norm():
            outcome["problems"].append(f"step {step}: norm {norm}")
        ours = full_parameters(engine)
        outcome["problems"].extend(
            f"step {step}: {name} differs from the reference"
            for name in masters
            if not np.array_equal(ours[name].view(np.uint8), reference.param(name).view(np.uint8))
        )
        if sorted(order) == list(range(cell["layers"])):
            moved = outcome["ledger"][-1]
            for way in ("read", "written"):
                if moved[way] != moved[f"planned_{way}"]:
                    outcome["problems"].append(f"step {step}: {way} {moved}")
    outcome["digest"] = digest(full_parameters(engine))
    outcome["swap_file_bytes"] = engine.plan.memory.swap_file_bytes
    outcome["read_bytes"] = engine.ledger.snapshot().nvme_read_bytes
    engine.destroy()
    return outcome


def main() -> None:
    """Run every cell and write one JSON file a rank."""
    out, nvme_path, cells = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    zero.init_distributed()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    outcomes = [run_chosen(cell, nvme_path) for cell in cells]
    (out / f"rank{rank}.json").write_text(json.dumps(outcomes), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
