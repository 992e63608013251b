"""A model's parameters while they are written down, and the configuration that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from estimators.models.shapes import (
    Activation,
    Attention,
    HeadKind,
    Mlp,
    ModelShape,
    NormKind,
    ParameterShape,
    Stack,
)


class ModelError(ValueError):
    """A model cannot be told from what was given."""


class Fields:
    """A `config.json` with checked access; a key that is missing or wrong is named."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self._values = values
        self.name = name

    def has(self, key: str) -> bool:
        """Tell whether a key is there and not null."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a size of at least 0."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.name}: {key} is missing; the parameters follow from it")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{self.name}: {key} must be an integer of at least 0, got {value!r}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a size of at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise ModelError(f"{self.name}: {key} must be at least 1, got {value}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a switch."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.name}: {key} must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a word."""
        return str(self._values.get(key) or default)

    def activation(self, key: str, default: str) -> Activation:
        """Return how an activation is computed, by its name in transformers."""
        name = self.text(key, default)
        if name in ("gelu_new", "gelu_fast", "gelu_python_tanh"):
            return Activation.COMPOSED
        return Activation.IN_PLACE if name.startswith("relu") else Activation.FUSED

    def dropouts(self, key: str, count: int, default: float = 0.0) -> int:
        """Return `count` if dropout is on."""
        value = self._values.get(key)
        return count if (default if value is None else value) else 0

    def numbers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers; empty where the key is missing."""
        return tuple(int(each) for each in self._values.get(key) or ())

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object; empty where the key is missing."""
        return dict(self._values.get(key) or {})

    @property
    def architecture(self) -> str:
        """The class that the configuration names, or nothing."""
        named = self._values.get("architectures") or [""]
        return str(named[0])

    def attention(self, *, rotary: bool = True, normed_heads: bool = False) -> Attention:
        """Return the attention that the usual keys describe."""
        heads = self.size("num_attention_heads")
        hidden = self.size("hidden_size")
        if not self.has("head_dim") and hidden % heads:
            raise ModelError(
                f"{self.name}: hidden_size {hidden} is not a multiple of num_attention_heads"
                f" {heads}; write head_dim"
            )
        return Attention(
            heads,
            self.size("num_key_value_heads", heads),
            self.size("head_dim", hidden // heads),
            rotary=rotary,
            normed_heads=normed_heads,
        )


class Draft:
    """Collects parameters in the order in which a built model lists them."""

    def __init__(self, fields: Fields, family: str) -> None:
        self.fields = fields
        self._family = family
        self._parameters: list[ParameterShape] = []
        self._stacks: list[Stack] = []
        self._block = ""

    def add(self, name: str, *shape: int) -> None:
        """Add one parameter."""
        self._parameters.append(ParameterShape(name, shape, self._block))

    def embedding(self, name: str, count: int, width: int) -> None:
        """Add the table of an embedding."""
        made = ParameterShape(f"{name}.weight", (count, width), self._block, is_embedding=True)
        self._parameters.append(made)

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = False) -> None:
        """Add the weight of a linear layer and its bias."""
        self.add(f"{name}.weight", outputs, inputs)
        if bias:
            self.add(f"{name}.bias", outputs)

    def norm(self, name: str, width: int, *, bias: bool = False) -> None:
        """Add the weight of a norm and its bias."""
        self.add(f"{name}.weight", width)
        if bias:
            self.add(f"{name}.bias", width)

    def begin_block(self, name: str, count: int) -> None:
        """Say that what follows belongs to a block; one that is alone is no repeated block."""
        self._block = name if count > 1 else ""

    def end_block(self) -> None:
        """Say that what follows belongs to the root."""
        self._block = ""

    @property
    def position(self) -> int:
        """How many parameters there are so far."""
        return len(self._parameters)

    def numel_since(self, position: int) -> int:
        """Return the elements of the parameters that were added since."""
        return sum(each.numel for each in self._parameters[position:])

    def stack(
        self,
        block_numel: int,
        attention: tuple[Attention, ...],
        mlp: Mlp,
        norm: NormKind,
        *,
        norms: tuple[int, int] = (2, 2),
        dropouts: int = 0,
    ) -> None:
        """Say what a block of `block_numel` parameters computes; equal neighbours are one stack.

        Args:
            block_numel: its parameters.
            attention: its attention, and the one to an encoder.
            mlp: its other half.
            norm: the kind of its norms.
            norms: how many norms it has, and how many different tensors they are given.
            dropouts: how many dropouts it has on the residual stream.
        """
        active = block_numel
        if mlp.experts:
            one = 3 * self.fields.size("hidden_size") * mlp.width
            active -= (mlp.experts - mlp.active_experts) * one
        made = Stack(1, attention, mlp, norm, *norms, dropouts, block_numel, active)
        if self._stacks and replace(self._stacks[-1], count=1) == made:
            made = replace(made, count=1 + self._stacks.pop().count)
        self._stacks.append(made)

    def finish(self, *, hidden: int, vocabulary: int, head: HeadKind) -> ModelShape:
        """Return the model."""
        return ModelShape(
            self.fields.name,
            self._family,
            tuple(self._parameters),
            tuple(self._stacks),
            hidden,
            vocabulary,
            head,
        )
