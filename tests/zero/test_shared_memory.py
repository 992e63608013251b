"""Parameters that were moved to shared memory come back to where they are updated."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.observe import state_digest

pytestmark = pytest.mark.nvme

WIDTH = 32
Share = Callable[[nn.Module], Any]

SHARES: dict[str, Share] = {
    "all": lambda model: model.share_memory(),
    "one": lambda model: model.h[1].weight.share_memory_(),
    "sent": lambda model: ForkingPickler.dumps(dict(model.state_dict())),
}


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def trained(
    config: dict[str, Any], dtype: torch.dtype, share: Share | None, folder: Path
) -> list[Any]:
    """Train before and after the model is shared, and return losses and states."""
    engine, _, _, _ = zero.initialize(model=Net(dtype), config=config)
    found: list[Any] = []
    for number in range(4):
        if number == 2 and share is not None:
            share(engine.module)
            engine.save_checkpoint(folder, "shared")
            share(engine.module)
        loss = engine(torch.full((2, WIDTH), 1.0 + number, dtype=dtype))
        engine.backward(loss)
        engine.step()
        found += [loss.item(), state_digest(engine)]
    if share is not None:
        engine.load_checkpoint(folder, "shared")
        assert state_digest(engine) == found[3]
    engine.destroy()
    return found


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_model_trains_on(name: str, stage: int, dtype: torch.dtype, scratch: Path) -> None:
    optimizer = "none" if stage == 0 else "nvme"
    config = make_config(
        stage=stage, parameters="none", optimizer=optimizer, nvme_path=str(scratch),
        host_memory="32KB" if optimizer == "nvme" else "4MB", sub_group_size=512,
        dtype="bf16" if dtype is torch.bfloat16 else "fp32",
    )  # fmt: skip
    wanted = trained(config, dtype, None, scratch)
    with pytest.warns(RuntimeWarning, match="were moved to shared memory"):
        found = trained(config, dtype, SHARES[name], scratch)
    assert found == wanted
