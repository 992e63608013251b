"""A small transformer with awkward parameter sizes, and what the tests ask of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import nn

VOCABULARY = 31


class Block(nn.Module):
    """Pre-norm attention and MLP, with a few parameters of odd shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.gain = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.empty(0))
        self.mix = nn.Parameter(torch.full((1, 3, 1), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.gain * self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x + self.mix.mean() * x + self.nothing.sum()


class TinyTransformer(nn.Module):
    """Tied embedding and head; `extra` adds parameters of the sizes that once broke pagers."""

    def __init__(self, width: int = 16, layers: int = 2, extra: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.extra = nn.ParameterList(nn.Parameter(torch.randn(size) * 0.02) for size in extra)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        for parameter in self.extra:
            x = x + parameter.square().sum() * 1e-3
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_model(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    extra: tuple[int, ...] = (),
) -> TinyTransformer:
    """Return the same model for the same arguments."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = TinyTransformer(layers=layers, extra=extra)
    torch.set_rng_state(generator_state)
    return model.to(dtype)


def make_batch(
    step: int, rank: int = 0, batch: int = 2, length: int = 12
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets that depend on step and rank only."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (batch, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
