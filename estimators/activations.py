"""What a forward keeps for its backward, and what comes and goes on the way.

[Note: activations] Counted operation by operation, as transformers 5 computes them: a linear layer
keeps its input, a fused attention its inputs, its output and a sum a row, a norm what its kind
keeps. Tensors that two operations keep count once. Tests hold the sums against what autograd keeps
of every family. Dropout masks are bytes, as on a GPU. What a padding mask adds is not counted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from estimators.formats import ElementType
from estimators.models import Attention, HeadKind, Mlp, ModelShape, NormKind, Stack

_FP32 = 4
_INDEX = 8
_LOSS_GRADIENTS = 2
"""At the start of the backward there are, beside what log-softmax keeps, the gradient of its output
and that of its input."""


class AttentionKind(enum.Enum):
    """How attention runs."""

    FUSED = "fused"
    """In one kernel that keeps no scores: flash, or memory-efficient."""
    EAGER = "eager"
    """By matrix products, keeping the scores of every pair of tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward of one rank is given, and how it runs."""

    samples: int = 1
    sequence: int = 1024
    attention: AttentionKind = AttentionKind.FUSED
    checkpointing: bool = False
    """Whether each block keeps its input alone and runs again in the backward."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.sequence < 1:
            raise ValueError(
                f"a batch needs at least one sample of one token, got {self.samples} x"
                f" {self.sequence}"
            )


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of one rank's device in one forward and backward."""

    kept_bytes: int
    """Kept from forward to backward, all blocks, embeddings and head."""
    recomputed_bytes: int
    """What one block keeps while it runs again; 0 without checkpointing."""
    working_bytes: int
    """Gradients of activations, at most, while a block's backward runs."""
    loss_bytes: int
    """Logits and loss at the start of the backward, beyond what is kept."""
    head_bytes: int
    """Gradient of the logits, while the head's backward runs."""
    logits_bytes: int = 0
    """What is kept of the logits: freed before the blocks' backward."""
    block_bytes: int = 0
    """What the largest block keeps: freed when its backward is over."""
    tied_bytes: int = 0
    """Gradient of a table that is head and embedding: the head's part waits for the other."""


def activations(model: ModelShape, batch: Batch, element: ElementType) -> Activations | None:
    """Return what a forward and backward keep; None if only a model's sizes are known."""
    if not model.stacks:
        return None
    tokens = batch.samples * model.tokens(batch.sequence)
    size = element.size_bytes
    full = [tokens * _block(model, stack, batch, size) for stack in model.stacks]
    inputs = tokens * size * model.hidden
    counts = [stack.count for stack in model.stacks]
    if batch.checkpointing:
        kept, recomputed = sum(counts) * inputs, max(full)
    else:
        kept = sum(count * each for count, each in zip(counts, full, strict=True))
        recomputed = 0
    return Activations(
        kept_bytes=kept + tokens * _outside(model, size) + _shared(model, batch, size),
        recomputed_bytes=recomputed,
        working_bytes=tokens * max(_working(model, stack, batch, size) for stack in model.stacks),
        loss_bytes=_loss(model, tokens, size),
        head_bytes=tokens * model.vocabulary * size if _has_logits(model) else 0,
        logits_bytes=tokens * model.vocabulary * _logit(model, size) if _has_logits(model) else 0,
        block_bytes=0 if batch.checkpointing else max(full),
        tied_bytes=model.vocabulary * model.hidden * size if _is_tied(model) else 0,
    )


def _block(model: ModelShape, stack: Stack, batch: Batch, size: int) -> int:
    """Return the bytes a token that one block keeps."""
    hidden = model.hidden
    sequence = model.tokens(batch.sequence)
    total = _norms(stack, hidden, size) + stack.dropouts * hidden
    total += sum(_attention(each, stack.norm, batch, sequence, size) for each in stack.attention)
    return total + _mlp(stack.mlp, hidden, size)


def _norms(stack: Stack, hidden: int, size: int) -> int:
    """Return what a block's norms keep, and what the layers behind them keep of their outputs."""
    outputs = min(stack.norm_count, len(stack.attention) + 1) * size * hidden
    if stack.norm is NormKind.LAYER:
        sums = 2 * _FP32 * stack.norm_count
        return stack.norm_inputs * size * hidden + sums + outputs
    return stack.norm_count * norm_bytes(stack.norm, hidden, size) + outputs


def norm_bytes(kind: NormKind, width: int, size: int) -> int:
    """Return the bytes that one norm keeps of one row."""
    match kind:
        case NormKind.RMS:
            return _FP32 * width + _FP32 + size * width
        case NormKind.RMS_SCALED:
            return 2 * _FP32 * width + _FP32
        case NormKind.RMS_KEPT:
            beside = size * width if size < _FP32 else 0
            return _FP32 * width + _FP32 + size * width + beside
        case NormKind.LAYER:
            return size * width + 2 * _FP32


def _attention(attention: Attention, norm: NormKind, batch: Batch, sequence: int, size: int) -> int:
    query, shared = attention.query_width, attention.key_value_width
    total = 0
    if attention.normed_heads:
        rows = attention.heads + attention.key_value_heads
        total += rows * norm_bytes(norm, attention.head_dim, size)
    if batch.attention is AttentionKind.FUSED and not attention.is_capped:
        if attention.is_packed and attention.rotary:
            total += size * (query + shared)
        return total + size * (2 * query + 2 * shared) + _FP32 * attention.heads
    scores = attention.heads * sequence
    rounded = _FP32 if attention.upcasts and size < _FP32 else 0  # in fp32, beside their own type
    capped = size if attention.is_capped else 0
    return total + 4 * size * query + scores * (size + rounded + capped)


def _mlp(mlp: Mlp, hidden: int, size: int) -> int:
    widths = mlp.activation.value + (2 if mlp.gated else 0)
    if not mlp.experts:
        return size * widths * mlp.width
    routed = mlp.active_experts * (
        size * (widths * mlp.width + 2 * hidden) + 2 * _INDEX + 2 * _FP32
    )
    shared = size * (widths * mlp.shared_width + hidden) if mlp.shared_width else 0
    return routed + shared + _FP32 * mlp.experts + 2 * _INDEX


def _outside(model: ModelShape, size: int) -> int:
    """Return the bytes a token that embeddings, the last norm and the head keep."""
    hidden, norm = model.hidden, model.stacks[-1].norm
    indices = _INDEX
    last = norm_bytes(norm, hidden, size) + size * hidden
    if any(each.is_cross for stack in model.stacks for each in stack.attention):
        last *= 2  # the encoder ends like the decoder
    capped = size * model.vocabulary if model.caps_logits else 0
    match model.head:
        case HeadKind.CAUSAL:
            return indices + last + capped + _logit(model, size) * model.vocabulary + _INDEX
        case HeadKind.MASKED:
            embeddings = 2 * size * hidden + 2 * _FP32
            dense = 3 * size * hidden + 2 * _FP32
            return indices + embeddings + dense + _logit(model, size) * model.vocabulary + _INDEX
        case HeadKind.CLASSES | HeadKind.NONE:
            return indices + last


def _shared(model: ModelShape, batch: Batch, size: int) -> int:
    """Return what is kept beside the tokens: an image's pixels, and positions for all blocks."""
    first = model.stacks[0].attention[0]
    angles = 2 * batch.sequence * first.head_dim if first.rotary else 0
    return size * (batch.samples * model.input_numel + angles)


def _is_tied(model: ModelShape) -> bool:
    """Tell whether the table of the embedding gives the logits as well."""
    shape = (model.vocabulary, model.hidden)
    tables = [each.is_embedding for each in model.parameters if each.shape == shape]
    return _has_logits(model) and bool(tables) and all(tables)


def _has_logits(model: ModelShape) -> bool:
    return model.head in (HeadKind.CAUSAL, HeadKind.MASKED)


def _logit(model: ModelShape, size: int) -> int:
    """Return the bytes of a logit in the loss."""
    return _FP32 if model.upcasts_logits else size


def _loss(model: ModelShape, tokens: int, size: int) -> int:
    if not _has_logits(model):
        return 0
    return _LOSS_GRADIENTS * _logit(model, size) * tokens * model.vocabulary


def _working(model: ModelShape, stack: Stack, batch: Batch, size: int) -> int:
    """Return the bytes a token of gradients that are there at once in a block's backward."""
    mlp = stack.mlp
    routed = mlp.active_experts if mlp.experts else 1
    half = size * (routed * 3 * mlp.width + model.hidden)
    rows = [size * (2 * each.query_width + 2 * each.key_value_width) for each in stack.attention]
    if batch.attention is AttentionKind.EAGER:
        sequence = model.tokens(batch.sequence)
        rows = [
            row + 3 * _FP32 * each.heads * sequence
            for row, each in zip(rows, stack.attention, strict=True)
        ]
    norms = 3 * _FP32 * model.hidden
    return max(half, norms, *rows)
