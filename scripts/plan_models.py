"""Plain torch models with the names, shapes and operations of transformers: they need torch alone.

`build(config)` takes the same dictionary as `estimators.models.model_of_config`, so that what was
planned from a configuration can be held against what its training takes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Config = dict[str, Any]


class RmsNorm(nn.Module):
    """Root mean square norm in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states scaled to unit mean square."""
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden.dtype)


def rotate(hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of elements by the angles of their position."""
    first, second = hidden.chunk(2, dim=-1)
    return hidden * angles[0] + torch.cat((-second, first), dim=-1) * angles[1]


class Attention(nn.Module):
    """Causal attention with shared keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.shared = config.get("num_key_value_heads", self.heads)
        self.width = config.get("head_dim", hidden // self.heads)
        bias = config.get("attention_bias", False)
        self.q_proj = nn.Linear(hidden, self.heads * self.width, bias=bias)
        self.k_proj = nn.Linear(hidden, self.shared * self.width, bias=bias)
        self.v_proj = nn.Linear(hidden, self.shared * self.width, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.width, hidden, bias=bias)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Mix each position with those before it."""
        batch, sequence, _ = hidden.shape
        shape = (batch, sequence, -1, self.width)
        query = rotate(self.q_proj(hidden).view(shape).transpose(1, 2), angles)
        key = rotate(self.k_proj(hidden).view(shape).transpose(1, 2), angles)
        value = self.v_proj(hidden).view(shape).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.shared
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return output


class GatedMlp(nn.Module):
    """The gated position-wise half of a block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, width = config["hidden_size"], config["intermediate_size"]
        bias = config.get("mlp_bias", False)
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by itself."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class ExpertWeights(nn.Module):
    """The weights of all routed experts of a block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        count, hidden = config["num_local_experts"], config["hidden_size"]
        width = config["intermediate_size"]
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Send each token through its experts and add up what they say."""
        output = torch.zeros_like(hidden)
        for expert in range(self.gate_up_proj.shape[0]):
            tokens, place = torch.where(chosen == expert)
            gate, up = F.linear(hidden[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            made = F.linear(F.silu(gate) * up, self.down_proj[expert])
            made = made * weights[tokens, place, None]
            output = output.index_add(0, tokens, made.to(hidden.dtype))
        return output


class Experts(nn.Module):
    """Routed experts in place of an MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.active = config["num_experts_per_tok"]
        self.gate = nn.Linear(config["hidden_size"], config["num_local_experts"], bias=False)
        self.experts = ExpertWeights(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position by the experts it is routed to."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        shares = F.softmax(self.gate(flat), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, self.active, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(hidden.dtype)
        output: Tensor = self.experts(flat, chosen, weights).view_as(hidden)
        return output


class DecoderBlock(nn.Module):
    """Attention, then an MLP or experts, each after a norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Experts(config) if config["model_type"] == "mixtral" else GatedMlp(config)
        self.input_layernorm = RmsNorm(config["hidden_size"])
        self.post_attention_layernorm = RmsNorm(config["hidden_size"])

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class DecoderBody(nn.Module):
    """Embeddings, blocks and the last norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        count = config["num_hidden_layers"]
        blocks = [DecoderBlock(config) for _ in range(count)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RmsNorm(config["hidden_size"])
        self.head_width = blocks[0].self_attn.width
        self.checkpoints = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states."""
        hidden = self.embed_tokens(tokens)
        angles = self._angles(tokens.shape[1], hidden)
        for layer in self.layers:
            if self.checkpoints:
                hidden = checkpoint(layer, hidden, angles, use_reentrant=False)
            else:
                hidden = layer(hidden, angles)
        output: Tensor = self.norm(hidden)
        return output

    def _angles(self, sequence: int, like: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.head_width, 2, device=like.device) / self.head_width
        turns = torch.outer(torch.arange(sequence, device=like.device), 10000.0**-steps)
        both = torch.cat((turns, turns), dim=-1)
        return both.cos().to(like.dtype), both.sin().to(like.dtype)


class Decoder(nn.Module):
    """A causal language model: Llama, or with routed experts Mixtral."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = DecoderBody(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        if config.get("tie_word_embeddings", False):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting the targets."""
        logits = self.lm_head(self.model(tokens)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class EncoderSelf(nn.Module):
    """Queries, keys and values of an encoder."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.heads = config["num_attention_heads"]

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix each position with all others."""
        batch, sequence, width = hidden.shape
        parts = [
            layer(hidden).view(batch, sequence, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*parts)
        return mixed.transpose(1, 2).reshape(batch, sequence, width)


class EncoderOutput(nn.Module):
    """A linear layer whose output joins the residual stream, and a norm after it."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, made: Tensor, hidden: Tensor) -> Tensor:
        """Return the next hidden states."""
        output: Tensor = self.LayerNorm(self.dense(made) + hidden)
        return output


class EncoderBlock(nn.Module):
    """A block of BERT: its norms come after what they normalise."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, width = config["hidden_size"], config["intermediate_size"]
        self.attention = nn.ModuleDict({"self": EncoderSelf(config)})
        self.attention["output"] = EncoderOutput(hidden, hidden)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, width)})
        self.output = EncoderOutput(width, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attention, then the MLP."""
        hidden = self.attention["output"](self.attention["self"](hidden), hidden)
        output: Tensor = self.output(F.gelu(self.intermediate["dense"](hidden)), hidden)
        return output


class EncoderEmbeddings(nn.Module):
    """Tokens, positions and kinds of sentences."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.word_embeddings = nn.Embedding(config["vocab_size"], hidden)
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], hidden)
        self.token_type_embeddings = nn.Embedding(2, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the first hidden states."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        made = self.word_embeddings(tokens) + self.token_type_embeddings(torch.zeros_like(tokens))
        output: Tensor = self.LayerNorm(made + self.position_embeddings(positions))
        return output


class EncoderBody(nn.Module):
    """Embeddings and blocks."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embeddings = EncoderEmbeddings(config)
        blocks = [EncoderBlock(config) for _ in range(config["num_hidden_layers"])]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(blocks)})
        self.checkpoints = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states."""
        hidden = self.embeddings(tokens)
        for layer in self.encoder["layer"].children():
            if self.checkpoints:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        output: Tensor = hidden
        return output


class EncoderHead(nn.Module):
    """The head of masked language modelling, tied to the embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.bias = nn.Parameter(torch.zeros(config["vocab_size"]))
        self.transform = nn.ModuleDict({"dense": nn.Linear(hidden, hidden)})
        self.transform["LayerNorm"] = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.transform["LayerNorm"](F.gelu(self.transform["dense"](hidden)))
        return F.linear(hidden, table, self.bias)


class Encoder(nn.Module):
    """BERT for masked language modelling."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bert = EncoderBody(config)
        self.cls = nn.ModuleDict({"predictions": EncoderHead(config)})

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of predicting the targets."""
        hidden = self.bert(tokens)
        table = self.bert.embeddings.word_embeddings.weight
        logits = self.cls["predictions"](hidden, table)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(config: Config, *, checkpointing: bool = False) -> nn.Module:
    """Return the model that a configuration of Llama, Mixtral or BERT describes."""
    model = Encoder(config) if config["model_type"] == "bert" else Decoder(config)
    for module in model.modules():
        if isinstance(module, DecoderBody | EncoderBody):
            module.checkpoints = checkpointing
    return model


_DRAWN = 1_000_003
"""Values that are drawn of a large matrix and repeated: a prime, so that no two rows are alike."""


def initialise(module: nn.Module) -> None:
    """Give one module of a model on meta its values."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() > 1:
            drawn = torch.randn(min(parameter.numel(), _DRAWN)) * 0.02
            with torch.no_grad():
                for piece in torch.split(parameter.view(-1), _DRAWN):
                    piece.copy_(drawn[: piece.numel()])
        else:
            nn.init.constant_(parameter, 0.0 if "bias" in name else 1.0)


def batch(config: Config, samples: int, sequence: int, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets that depend on the step only."""
    generator = torch.Generator().manual_seed(step)
    shape = (samples, sequence + 1)
    tokens = torch.randint(0, config["vocab_size"], shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
