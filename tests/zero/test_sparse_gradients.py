"""`nn.Embedding(sparse=True)` trains as a dense one would, wherever its gradient goes.

Where nothing moves autograd adds the gradients of a window, sparse ones in an order of their own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.observe import full_parameters

pytestmark = pytest.mark.nvme

WIDTH, WORDS = 32, 100


class Net(nn.Module):
    """An embedding before blocks."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.words(x)
        for layer in self.h:
            y = torch.tanh(layer(y))
        return y.square().mean()


@pytest.mark.parametrize(
    ("stage", "tier"), [(3, "none"), (3, "cpu"), (3, "nvme"), (2, "cpu"), (1, "nvme")]
)
def test_a_sparse_embedding_trains(stage: int, tier: str, scratch: Path) -> None:
    found = []
    for sparse in (False, True):
        config = make_config(
            stage=stage, parameters=tier if stage == 3 else "none", optimizer=tier,
            nvme_path=str(scratch), host_memory="64KB" if tier == "nvme" else "4MB",
            accumulation=2, sub_group_size=1024,
        )  # fmt: skip
        engine, _, _, _ = zero.initialize(model=Net(sparse=sparse), config=config)
        for number in range(6):
            tokens = torch.tensor([[1 + number, 5, 5, 7], [2, 9 - number, 1, 3]])
            engine.backward(engine(tokens))
            engine.step()
        assert (engine.ledger.snapshot().nvme_write_bytes > 0) == (tier == "nvme")
        assert engine.global_steps == 3
        found.append(full_parameters(engine))
        engine.destroy()
    for name, dense in found[0].items():
        if tier == "none":
            assert np.allclose(dense, found[1][name], rtol=0, atol=1e-7), name
        else:
            assert (dense == found[1][name]).all(), name
