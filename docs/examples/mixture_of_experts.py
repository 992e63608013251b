"""Train a mixture of experts: no marking of modules, ranks may route as they like.

python docs/examples/mixture_of_experts.py
torchrun --standalone --nproc-per-node=2 docs/examples/mixture_of_experts.py
"""

import sys
import tempfile

import torch
from torch import nn

import zero


class Mixture(nn.Module):
    """Each token goes to the expert that the router likes best."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        y = x.clone()
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).reshape(-1)
            if len(rows):
                y = y.index_add(0, rows, weight[rows, None] * expert(x[rows]).tanh())
        return y


def main() -> None:
    """Train on data of one's own on each rank."""
    path = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    zero.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(*(Mixture(32, 8) for _ in range(4)))
    nvme = {"device": "nvme", "nvme_path": path}
    stage = {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme, "sub_group_size": 4096}
    stage["stage3_param_persistence_threshold"] = 0  # so small a model would stay in memory
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": stage,
        "tiers": {"host_memory": "500KB"},
    }
    engine, *_ = zero.initialize(model=model, config=config)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(engine.global_rank))
    for step in range(20):
        loss = engine.backward((engine(x) - x.roll(1, -1)).square().mean())
        engine.step()
        if step % 19 == 0:
            print(f"rank {engine.global_rank}, step {step}: loss {loss.item():.4f}")
    engine.destroy()


if __name__ == "__main__":
    main()
