"""What is known of a model before it is built: its parameters, its blocks, and what they compute.

[Note: names] Names, shapes and order are those of `named_parameters()` of the classes in
transformers 5, so that flat buffers, shards and extents that follow from them are those of the
built model.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cached_property

from estimators.formats import ElementType


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter: shared ones appear once."""

    name: str
    shape: tuple[int, ...]
    block: str = ""
    """The repeated block that it belongs to; empty for the root unit."""
    is_embedding: bool = False
    """Whether rows of it are looked up."""
    element: ElementType | None = None
    """Type that it is built in; None where nothing is built yet."""
    is_trainable: bool = True
    use_muon: bool | None = None
    """What the parameter says of itself to Muon; None lets its shape and name decide."""

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


class NormKind(enum.Enum):
    """How a normalisation is computed, and so what it keeps for its backward."""

    RMS = "rms"
    """In fp32, by elementary operations, as transformers does; scaled in the model's type."""
    RMS_SCALED = "rms, scaled in fp32"
    """As Gemma does."""
    RMS_KEPT = "rms, beside its input"
    """As T5 does: it keeps its input and an fp32 copy."""
    LAYER = "layer"
    """torch's fused layer norm."""


class Activation(enum.Enum):
    """How an activation is computed, and so what it keeps for its backward, in widths."""

    FUSED = 2
    """Its input, and its output for what follows."""
    IN_PLACE = 1
    """Its output alone: relu."""
    COMPOSED = 5
    """Every step: tanh's gelu by elementary operations."""


class HeadKind(enum.Enum):
    """What comes after the last block."""

    CAUSAL = "causal"
    """Logits of a vocabulary for each token."""
    MASKED = "masked"
    """A dense layer, its activation and a norm, then logits for each token."""
    CLASSES = "classes"
    """Logits of a few classes for each sample."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention of one block."""

    heads: int
    key_value_heads: int
    head_dim: int
    causal: bool = True
    rotary: bool = False
    normed_heads: bool = False
    """Whether queries and keys pass a norm a head."""
    is_cross: bool = False
    """Whether keys and values come from an encoder."""
    is_packed: bool = False
    """Whether values are kept as a view of queries, keys and values together."""
    is_capped: bool = False
    """Whether scores pass a tanh: no fused kernel does that."""
    upcasts: bool = True
    """Whether the scores of eager attention become probabilities in fp32."""

    @property
    def query_width(self) -> int:
        """Elements of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Elements of all keys of a token, or of all values."""
        return self.key_value_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Mlp:
    """The position-wise half of a block, dense or of routed experts."""

    width: int
    gated: bool = False
    activation: Activation = Activation.FUSED
    experts: int = 0
    active_experts: int = 0
    shared_width: int = 0
    """Width of the expert that every token passes; 0 without one."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal blocks that run one after the other."""

    count: int
    attention: tuple[Attention, ...]
    mlp: Mlp
    norm: NormKind
    norm_count: int = 2
    norm_inputs: int = 2
    """How many different tensors the norms are given."""
    dropouts: int = 0
    """Dropouts on the residual stream."""
    block_numel: int = 0
    """Parameters of one block."""
    active_numel: int = 0
    """Those that one token passes: of routed experts only the active ones."""


@dataclass(frozen=True)
class ModelShape:
    """A model, as far as memory and time depend on it."""

    name: str
    family: str
    parameters: tuple[ParameterShape, ...]
    stacks: tuple[Stack, ...] = ()
    """Empty where only sizes are known; activations cannot be told then."""
    hidden: int = 0
    vocabulary: int = 0
    """Logits of a token, or classes of a sample."""
    head: HeadKind = HeadKind.NONE
    fixed_tokens: int = 0
    """Tokens of a sample where they do not depend on the sequence length: patches of an image."""
    input_numel: int = 0
    """Elements of an image that the first layer keeps."""
    caps_logits: bool = False
    """Whether logits pass a tanh."""
    upcasts_logits: bool = True
    """Whether the loss is computed in fp32."""

    @cached_property
    def numel(self) -> int:
        """All parameters."""
        return sum(each.numel for each in self.parameters)

    @cached_property
    def trainable_numel(self) -> int:
        """Parameters that are trained."""
        return sum(each.numel for each in self.parameters if each.is_trainable)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Names of the repeated blocks, in order of their first parameter."""
        return tuple(dict.fromkeys(each.block for each in self.parameters if each.block))

    @cached_property
    def active_numel(self) -> int:
        """Parameters that one token passes."""
        idle = sum(each.count * (each.block_numel - each.active_numel) for each in self.stacks)
        return self.numel - idle

    @cached_property
    def largest_layer_numel(self) -> int:
        """Most parameters that one module owns itself, as the field's estimates count them."""
        modules: dict[str, int] = {}
        for each in self.parameters:
            owner = each.name.rpartition(".")[0]
            modules[owner] = modules.get(owner, 0) + each.numel
        return max(modules.values(), default=0)

    def tokens(self, sequence: int) -> int:
        """Return the tokens that one sample of `sequence` makes."""
        return self.fixed_tokens or sequence
