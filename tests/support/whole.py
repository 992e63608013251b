"""Optimizers of whole tensors, budgets that page what they keep, and engines with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model
from zero.lamb import Lamb

CLIP = 0.5
STEPS = 4
LAMB = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.01}


class Declared(optim.Optimizer):
    """Subtracts the mean of each row of the gradient, and says that it sees the whole."""

    needs_whole_tensors = True

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                state = self.state[p]
                means = p.grad.flatten(1).mean(1) if p.dim() > 1 else p.grad.mean(0, keepdim=True)
                state["rows"] = state.get("rows", 0.0) + means
                shape = [-1] + [1] * (p.dim() - 1)
                p.sub_(group["lr"] * (p.grad + state["rows"].view(shape)))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return two matrices and freeze all else: Muon takes no others, and of 3 ranks 2 own one."""
    chosen = [model.blocks[1].attention.weight, model.blocks[1].up.weight]
    for each in model.parameters():
        each.requires_grad_(any(each is one for one in chosen))
    return chosen


def filled(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.numel()]


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adafactor": lambda m: optim.Adafactor(filled(m), lr=1e-2, weight_decay=0.01, eps=(1e-4, 1e-3)),
    "lamb": lambda m: Lamb(filled(m), **LAMB),
    "declared": lambda m: Declared(filled(m)),
    "muon": lambda m: optim.Muon(matrices(m), lr=1e-3),
}


def config(tier: str, folder: Path, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"parameters": tier, "optimizer": tier, "clip": CLIP, **more}
    if tier == "nvme":
        options |= {"nvme_path": str(folder), "sub_group_size": 1024}
    found = make_config(**options)
    del found["optimizer"]
    return found


BUDGETS = {
    "adafactor": ("32KB", "60KB", "90KB"),
    "lamb": ("76KB", "90KB", "114KB"),
    "declared": ("30KB", "60KB", "90KB"),
    "muon": ("44KB", "62KB", "82KB"),
}
"""For one rank, for two and for three: the whole tensors fit, the rest does not."""


def start(name: str, tier: str, folder: Path, ranks: int = 1, **more: Any) -> zero.ZeroEngine:
    if tier == "nvme":
        more = {"host_memory": BUDGETS[name][ranks - 1], **more}
    model = make_model()
    given = OPTIMIZERS[name](model)
    return zero.initialize(model=model, optimizer=given, config=config(tier, folder, **more))[0]


def train(engine: zero.ZeroEngine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*make_batch(step)))
        engine.step()


def far_from(engine: zero.ZeroEngine, wanted: list[torch.Tensor]) -> float:
    with zero.GatheredParameters(list(engine.module.parameters())):
        pairs = list(zip(engine.module.parameters(), wanted, strict=True))
        return max(float((a.detach() - b).abs().max()) for a, b in pairs if a.numel())
