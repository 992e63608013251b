"""Several losses of one model: two backwards of one graph, and a loss on the weights."""

import sys
import tempfile

import torch
from torch import nn

import zero


def main() -> None:
    """Train with three losses a step."""
    path = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
    model = nn.Sequential(*blocks, nn.Linear(32, 2))
    on_nvme = {"device": "nvme", "nvme_path": path}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_nvme,
            "offload_optimizer": on_nvme,
            "sub_group_size": 1024,
            "stage3_param_persistence_threshold": 0,  # so small a model would stay in memory
        },
        "tiers": {"host_memory": "64KB"},
    }
    engine, *_ = zero.initialize(model=model, config=config)
    x = torch.randn(8, 32)
    for step in range(20):
        y = engine(x)
        fit = (y[:, 0] - 1).square().mean()
        engine.backward(fit, retain_graph=True)
        engine.backward(0.1 * y[:, 1].square().mean() + 1e-3 * model[0][0].weight.square().sum())
        engine.step()
        if step % 19 == 0:
            norms = engine.get_global_grad_norm(), engine.get_clipped_grad_norm()
            print(f"step {step}: loss {fit.item():.4f}, norm %.3f, clipped %.3f" % norms)
    engine.destroy()


if __name__ == "__main__":
    main()
