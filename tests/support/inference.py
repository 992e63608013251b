"""Generate with an engine that has no optimizer, on every tier and several ranks.

`run_all` runs here; `python inference.py OUT NVME_PATH` does under torchrun.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero
from offload import Ledger
from tests.support.configs import make_config
from tests.support.tiny import TinyTransformer, make_model

TOKENS = 6
BUDGETS = {"none": "1GB", "cpu": "1GB", "nvme": "36KB"}


class Generator(nn.Module):
    """Gives the logits of a tiny transformer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model: TinyTransformer = make_model(seed=3, layers=layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embedding(tokens) + self.model.position[:, : tokens.shape[1]]
        for block in self.model.blocks:
            x = block(x)
        return self.model.head(self.model.norm(x))


def generate(call: Any, count: int) -> list[int]:
    """Continue a prompt by chance, always the same for the same logits."""
    tokens = torch.tensor([[1, 2, 3]])
    chance = torch.Generator().manual_seed(4)
    for _ in range(count):
        shares = call(tokens)[:, -1].float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(shares, 1, generator=chance)], dim=1)
    return tokens[0].tolist()


def inference_config(device: str, nvme_path: str, dtype: str, budget: str) -> dict[str, Any]:
    """Return a configuration without an optimizer."""
    config = make_config(
        parameters=device, nvme_path=nvme_path, dtype=dtype, host_memory=budget,
        sub_group_size=1024,
    )  # fmt: skip
    del config["optimizer"]
    return config


def run_cell(device: str, dtype: str, nvme_path: str) -> dict[str, Any]:
    """Generate under no_grad, under inference_mode and with gradients, beside the plain model."""
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    plain = Generator(8).to(torch_dtype)
    config = inference_config(device, nvme_path, dtype, BUDGETS[device])
    engine, optimizer, _, _ = zero.initialize(model=Generator(8), config=config)
    wanted, found, reads = [], [], []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            wanted.append(generate(plain, TOKENS))
            before = engine.ledger.snapshot()
            found.append(generate(engine, TOKENS))
            reads.append(engine.ledger.snapshot().minus(before).nvme_read_bytes)
    report = engine.memory_report()
    free = free_running(engine)
    engine.destroy()
    return {
        "device": device,
        "has_optimizer": optimizer is not None,
        "wanted": wanted,
        "found": found,
        "read_bytes": reads,
        "written_bytes": engine.ledger.snapshot().nvme_write_bytes,
        "lines": [line["what"] for line in report["lines"]],
        "planned": {line["what"]: line["planned_bytes"] for line in report["lines"]},
        "numel": sum(each.numel() for each in plain.parameters()),
        "free": free,
        "free_wanted": generate(plain, 3 + engine.global_rank),
    }


def free_running(engine: zero.ZeroEngine) -> list[int]:
    """Generate another number of tokens on each rank, with all parameters gathered once."""
    ledger: Ledger = engine.ledger
    before = ledger.snapshot()
    with torch.no_grad(), zero.GatheredParameters(list(engine.module.parameters())):
        gathered = ledger.snapshot().nvme_read_bytes
        tokens = generate(engine, 3 + engine.global_rank)
        moved = ledger.snapshot().nvme_read_bytes - gathered
    if moved or (engine.plan.memory.swap_file_bytes and gathered == before.nvme_read_bytes):
        raise AssertionError(f"{moved} bytes were read while everything was gathered")
    return tokens


def run_all(nvme_path: str) -> list[dict[str, Any]]:
    """Run every tier in both types."""
    return [
        run_cell(device, dtype, nvme_path) for device in BUDGETS for dtype in ("fp32", "bf16")
    ]  # fmt: skip


def main() -> None:
    """Run everything and write one JSON file a rank."""
    out, nvme_path = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    zero.init_distributed()
    rank = torch.distributed.get_rank()
    (out / f"rank{rank}.json").write_text(json.dumps(run_all(nvme_path)), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
