"""Optimizers without a kernel, by name, and what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import optim


class ThreeStates(optim.Optimizer):
    """Keeps three tensors of each element, the third of them from its second step on."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.blend = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, fast=torch.zeros_like(p), slow=torch.full_like(p, 0.1))
                state["step"] += 1
                state["fast"].mul_(self.blend).add_(p.grad)
                state["slow"] = state["slow"] * 0.9 + p.grad.abs()  # another tensor each time
                if state["step"] >= 2:
                    state.setdefault("late", torch.ones_like(p)).add_(p.grad.square())
                p.sub_(group["lr"] * state["fast"] / (state["slow"] + state.get("late", 1.0)))


class TwoBack(optim.Optimizer):
    """Keeps the last two gradients in two buffers, which it exchanges."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(last=torch.zeros_like(p), before=torch.zeros_like(p))
                p.sub_(group["lr"] * (p.grad + 0.5 * state["last"] + 0.25 * state["before"]))
                state["last"], state["before"] = state["before"], state["last"]
                state["last"].copy_(p.grad)


class Wrapper(optim.Optimizer):
    """Leaves the step to another optimizer, which has parameters of its own."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        given = list(params)
        self.inner = optim.RMSprop(given, lr=lr)
        super().__init__(given, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, eps=1e-4, momentum=0.9, centered=True),
    "nadam": lambda p: optim.NAdam(p, lr=1e-3, eps=1e-4, weight_decay=0.01),
    "radam": lambda p: optim.RAdam(p, lr=1e-3, eps=1e-4),
    "adamax": lambda p: optim.Adamax(p, lr=1e-3, eps=1e-4),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1, eps=1e-4),
    "asgd": lambda p: optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: optim.Rprop(p, lr=1e-4),
    "amsgrad": lambda p: optim.AdamW(p, lr=1e-3, eps=1e-4, amsgrad=True),
    "maximize": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, maximize=True),
    "user": ThreeStates,
    "exchanges": TwoBack,
}
