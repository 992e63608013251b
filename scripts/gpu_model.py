"""The model of the GPU benchmark: Llama-shaped, 1.364 B parameters as configured by default."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from gpu_sizes import Sizes
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults are the benchmark's."""

    hidden: int = 2048
    layers: int = 24
    vocabulary: int = 32000
    length: int = 1024
    head_width: int = 128

    @property
    def inner(self) -> int:
        """Width of the MLP."""
        return int(self.hidden * 2.75) // 128 * 128


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.value = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the mixed values."""
        batch, length, hidden = x.shape
        heads = (batch, length, -1, self.head_width)
        q, k, v = (
            each(x).view(heads).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        output: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return output


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the input of the next block."""
        x = x + self.attention(self.attention_norm(x), turn)
        y = self.mlp_norm(x)
        output: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return output


class Llama(nn.Module):
    """A language model that returns its loss; embedding and head are separate, as in the peer's."""

    def __init__(self, shape: Shape, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.checkpoints = checkpoints
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    module.weight.normal_(std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it."""
        x = self.embedding(tokens)
        turn = turns(tokens.shape[1], self.shape.head_width, x)
        for block in self.blocks:
            x = (
                checkpoint(block, x, turn, use_reentrant=False)
                if self.checkpoints
                else block(x, turn)
            )
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def turns(length: int, width: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotary angles, shape `[length, width]`."""
    steps = torch.arange(0, width, 2, device=like.device).float() / width
    angles = torch.outer(torch.arange(length, device=like.device).float(), 10000.0**-steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn pairs of features by the angles of their positions."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * turn[0] + turned * turn[1]


@dataclass(frozen=True)
class Built:
    """A model on its device, and what computes its loss of a fixed batch."""

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]
    """Of the model, or of what wraps it."""


def build_llama(sizes: Sizes, device: torch.device, *, checkpoints: bool) -> Built:
    """Return the model above, built on its device."""
    shape = Shape(sizes.hidden, sizes.layers, sizes.vocabulary, sizes.length)
    torch.manual_seed(0)
    with device:
        torch.set_default_dtype(torch.bfloat16)
        model = Llama(shape, checkpoints=checkpoints)
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(1)
    batch = (sizes.batch, sizes.length)
    tokens = torch.randint(0, sizes.vocabulary, batch, generator=generator).to(device)
    return Built(model, lambda module: module(tokens))


def build_transformers(sizes: Sizes, device: torch.device, *, checkpoints: bool) -> Built:
    """Return the model, the initial weights and the tokens of the peers."""
    with device:
        model = make_transformers(sizes).to(torch.bfloat16)
    if checkpoints:
        model.gradient_checkpointing_enable()
    model.train()
    tokens = make_tokens(sizes, device)
    return Built(model, lambda module: module(input_ids=tokens, labels=tokens).loss)


def make_transformers(sizes: Sizes) -> Any:
    """Return LlamaForCausalLM of transformers, always with the same weights on one device."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 128,
        num_key_value_heads=sizes.hidden // 128,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.length,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def make_tokens(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """Return the tokens that peers train on, shape `[batch, length]`."""
    generator = torch.Generator(device).manual_seed(1)
    batch = (sizes.batch, sizes.length)
    return torch.randint(0, sizes.vocabulary, batch, device=device, generator=generator)
