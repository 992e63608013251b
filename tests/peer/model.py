"""The tiny model and its data that DeepSpeed and tierzero both train; needs torch alone."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 12


class PeerModel(nn.Module):
    """Layers of odd sizes, a frozen one, a buffer, and two parameter groups' worth of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.odd = nn.Linear(WIDTH, 5)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.norm(self.frozen(x)) * self.scale.mean()
        return nn.functional.mse_loss(self.odd(x), target)


def make_peer_model(seed: int = 0) -> PeerModel:
    """Return the same model for the same seed."""
    torch.manual_seed(seed)
    return PeerModel()


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Return two groups: weights that decay, and those that do not."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]


def peer_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input and target of a step of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, WIDTH, generator=generator)
    return x, torch.randn(4, 5, generator=generator)


def peer_config(stage: int, *, offload: bool) -> dict[str, object]:
    """Return a configuration that both libraries read."""
    section: dict[str, object] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        section["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            section["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 20},
        },
        "zero_optimization": section,
    }
