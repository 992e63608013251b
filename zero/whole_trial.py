"""What an optimizer keeps of a whole tensor, found by running it on another of that shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.whole_records import Form, record_bytes
from zero.errors import ConfigError
from zero.generic import is_number, refuse_idle, refuse_side_effects, run_step

_TRIAL_STEPS = 2


@dataclass(frozen=True, slots=True)
class Kept:
    """What an optimizer keeps of a tensor."""

    size_bytes: int
    """Most bytes of its record in the first steps, at least 1."""
    forms: tuple[Form, ...]
    """The tensors that the first steps leave."""
    numbers: tuple[str, ...]
    """Names of numbers beside them."""


class Trials:
    """What an optimizer object keeps, by parameter group and shape."""

    def __init__(self, worker: torch.optim.Optimizer) -> None:
        self._worker = worker
        self._found: dict[tuple[int, torch.Size], Kept] = {}

    def kept(self, index: int, group: Mapping[str, Any], name: str, shape: torch.Size) -> Kept:
        """Return what is kept of a parameter of a group, whose name is for messages.

        The tensor that is tried has no memory, unless the optimizer looks at its values.

        Raises:
            ConfigError: if the optimizer cannot run on it.
        """
        if (index, shape) not in self._found:
            try:
                found = self._try_on(group, torch.ones(shape, dtype=torch.float32, device="meta"))
            except Exception:  # noqa: BLE001  what is wrong shows with values as well
                found = self._try_with_values(group, name, shape)
            self._found[index, shape] = found
        return self._found[index, shape]

    def _try_with_values(self, group: Mapping[str, Any], name: str, shape: torch.Size) -> Kept:
        try:
            return self._try_on(group, torch.ones(shape, dtype=torch.float32, device="cpu"))
        except Exception as error:
            raise ConfigError(
                f"optimizer {type(self._worker).__name__} cannot run on {name} of shape"
                f" {tuple(shape)}: {type(error).__name__}: {error}"
            ) from error

    def _try_on(self, group: Mapping[str, Any], master: Tensor) -> Kept:
        state: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        largest = 1
        for _ in range(_TRIAL_STEPS):
            before = dict(vars(self._worker))
            state = run_step(self._worker, group, (master, torch.ones_like(master)), state)
            refuse_side_effects(self._worker, group, before)
            tensors = {name: each for name, each in state.items() if isinstance(each, Tensor)}
            largest = max(largest, record_bytes(tensors))
        # Through `.data` it moves unnoticed, and on the meta device unseen: there values tell.
        moved = master._version > 0 or (not master.is_meta and bool((master != 1).any()))
        refuse_idle(group, state, moved=moved)
        forms = tuple((name, each.dtype, tuple(each.shape)) for name, each in tensors.items())
        beside = (name for name in state if name not in tensors and is_number(state[name]))
        return Kept(largest, forms, tuple(beside))
