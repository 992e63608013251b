"""Backwards nested deeper than autograd's own stack, beside plain torch, in a process of their own.

Beyond 60 levels autograd goes on in threads, with which nobody may fork.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from tests.support.configs import make_config

WIDTH = 16


class Nested(nn.Module):
    """Each layer's checkpoint is inside that of the one before."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(0, x.clone().requires_grad_())

    def after(self, at: int, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers from one on make of `x`, shape `[batch, WIDTH]`."""
        if at == len(self.h):
            return x
        found: torch.Tensor = checkpoint(
            self.after, at + 1, torch.tanh(self.h[at](x)), use_reentrant=True
        )
        return found


def main() -> None:
    """Train a window of two micro-batches; print their counts and the norms of both."""
    config = make_config(
        parameters=sys.argv[1], optimizer=sys.argv[1], accumulation=2, host_memory="4MB"
    )
    engine, _, _, _ = zero.initialize(model=Nested(70), config=config)
    plain = Nested(70)
    counts = []
    for number in (1, 2):
        x = torch.full((2, WIDTH), float(number))
        engine.backward(engine(x).square().mean())
        (plain(x).square().mean() / 2).backward()
        counts.append(engine.micro_steps)
        engine.step()
    wanted = torch.stack([each.grad.double().norm() for each in plain.parameters()]).norm()
    found = [[*counts, engine.global_steps], engine.get_global_grad_norm(), wanted.item()]
    engine.destroy()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
