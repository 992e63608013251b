"""What loading asks of a checkpoint that others wrote, besides its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class PeerSource(Protocol):
    """A checkpoint of DeepSpeed or of `torch.distributed.checkpoint`, opened and checked."""

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of its parameters, by their names in the model."""

    @property
    def frozen_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of parameters that were frozen, if it tells."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of parameters, and the first ones."""

    @property
    def buffers(self) -> Mapping[str, Any]:
        """What the model has beside parameters."""

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        """The names of the parameters of each group."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The hyper-parameters of each group."""

    @property
    def model(self) -> Mapping[str, Any]:
        """Counters and the schedule."""

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """The loss scaler."""

    @property
    def client_state(self) -> dict[str, Any]:
        """What the user had saved with it."""

    def steps_of(self, name: str) -> int:
        """Return the updates that a parameter has had."""
