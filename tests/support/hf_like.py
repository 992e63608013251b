"""A model that initialises itself the way model libraries do: late, by its parents, in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import nn

VOCABULARY = 23


class Layer(nn.Module):
    """Attention-free block whose parent initialises one of its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LateModel(nn.Module):
    """An embedding with padding, layers and a head, tied if asked."""

    def __init__(self, width: int = 16, layers: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=2)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def init_weights(module: nn.Module) -> None:
    """Initialise one module, in the manners that are found: `.data`, `nn.init`, indexing."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(mean=0.0, std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)
        if module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        with torch.no_grad():
            module.bias.fill_(0.0)
    elif isinstance(module, Layer):
        nn.init.trunc_normal_(module.down.weight, std=0.01)  # a parent reaches into its child


def make_tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))
