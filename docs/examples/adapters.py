"""Train low-rank adapters on a frozen base whose weights page from NVMe: its pages stay clean."""

import sys
import tempfile

import torch
from torch import nn

import zero


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank correction."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def main() -> None:
    """Train a few steps, merge one adapter, and check that the merged model says the same."""
    path = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Adapted(nn.Linear(64, 64)), nn.Tanh()) for _ in range(6)))
    nvme = {"device": "nvme", "nvme_path": path}
    stage = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme, "sub_group_size": 4096}
    stage["stage3_param_persistence_threshold"] = 0  # so small a model would stay in memory
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": stage,
        "tiers": {"host_memory": "160KB"},
    }
    trained = [each for each in model.parameters() if each.requires_grad]
    engine, *_ = zero.initialize(model=model, model_parameters=trained, config=config)
    x = torch.randn(8, 64)
    for step in range(20):
        loss = (engine(x) - x.flip(-1)).square().mean()
        engine.backward(loss)
        engine.step()
        if step % 19 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    with torch.no_grad():
        before = engine(x)
        layer = model[0][0]
        layer.base.weight += layer.up.weight @ layer.down.weight
        layer.up.weight.zero_()
        print(f"merged, off by {(engine(x) - before).abs().max().item():.1e}")
    engine.destroy()


if __name__ == "__main__":
    main()
