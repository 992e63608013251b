"""A byte-level decoder-only transformer in plain torch modules; it knows nothing of tierzero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that define a model."""

    hidden: int
    layers: int
    heads: int
    sequence: int
    tied_head: bool = False

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(
                f"--hidden must be a multiple of --heads, got {self.hidden} and {self.heads}; "
                f"the nearest is --hidden {max(1, round(self.hidden / self.heads)) * self.heads}"
            )


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, sequence, width = hidden.shape
        split = self.query_key_value(hidden).view(batch, sequence, 3, self.heads, -1)
        query, key, value = split.permute(
            2, 0, 3, 1, 4
        ).unbind()  # each (batch, heads, sequence, -)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return output


class Mlp(nn.Module):
    """The position-wise half of a block."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.expand = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.contract = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by itself."""
        output: Tensor = self.contract(F.gelu(self.expand(hidden)))
        return output


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.hidden)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        output: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return output


class LanguageModel(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.sequence = shape.sequence
        # A tied head sees the embedding's wide values; without the scale the first losses explode.
        self.logit_scale = shape.hidden**-0.5 if shape.tied_head else 1.0
        self.tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)
        if shape.tied_head:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss in nats if `targets` are given, else the logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden) * self.logit_scale)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def initialize_module(module: nn.Module) -> None:
    """Give the parameters that `module` directly owns their starting values."""
    match module:
        case nn.Embedding():
            # Wide, so that bytes differ from the first steps on: pre-norm blocks only add to it.
            nn.init.normal_(module.weight, std=0.3)
        case nn.Linear():
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        case nn.LayerNorm():
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        case _:
            pass


def build_model(shape: ModelShape, *, on_meta: bool) -> LanguageModel:
    """Return the model with its starting values, or on `meta` without any storage."""
    with torch.device("meta"):
        model = LanguageModel(shape)
    if on_meta:
        return model
    # Allocating and filling once; modules built on a real device would be filled twice.
    model.to_empty(device="cpu")
    if shape.tied_head:
        model.head.weight = model.tokens.weight
    model.apply(initialize_module)
    return model
