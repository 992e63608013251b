"""Sizes of the model of the GPU benchmark: what rows, models and peers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its batch."""

    hidden: int
    layers: int
    vocabulary: int
    length: int
    batch: int
    fuses_norms: bool
    """Whether norms are torch's own, which keep their input alone; those of transformers do not."""

    @property
    def inner(self) -> int:
        """Width of the MLP, the same for peers."""
        return int(self.hidden * 2.75) // 128 * 128

    @property
    def config(self) -> dict[str, Any]:
        """The model as its configuration file would say it."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 128,
            "num_key_value_heads": self.hidden // 128,
            "vocab_size": self.vocabulary,
        }
