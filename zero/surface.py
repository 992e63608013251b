"""What the field's engines tell of themselves beside training: numbers that others already keep."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from zero.loss_scaler import DynamicLossScaler, StaticLossScaler
    from zero.runtime import Runtime
    from zero.settings import Settings


class FieldSurface:
    """Read-only answers of an engine under the field's names."""

    global_steps: int
    world_size: int
    loss_scaler: StaticLossScaler | DynamicLossScaler
    _runtime: Runtime
    _settings: Settings
    _step_applied: bool
    _global_samples: int

    @property
    def device(self) -> torch.device:
        """Where inputs belong and losses are."""
        return self._runtime.store.device.torch_device

    @property
    def local_rank(self) -> int:
        """This rank among those of its node."""
        communicator = self._runtime.communicator
        given = os.environ.get("LOCAL_RANK", "")
        if communicator.world_size > 1 and given.isdigit():
            return int(given)
        return communicator.rank % communicator.local_world_size

    @property
    def dp_world_size(self) -> int:
        """The ranks that share the data: all of them."""
        return self.world_size

    @property
    def global_samples(self) -> int:
        """The samples of all steps over all ranks, skipped steps included."""
        return self._global_samples

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self._settings.stage

    def was_step_applied(self) -> bool:
        """Tell whether the last `step()` updated: the window was complete and its norm finite."""
        return self._step_applied

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "an engine cannot be copied: its state lives in files and pinned memory; copy"
            " engine.module, which gives a plain model with the full values"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an engine cannot be pickled: its state lives in files and pinned memory; pickle"
            " engine.module, or save engine.module.state_dict()"
        )


def no_attribute(name: str, model: Any) -> str:
    """Return the message for what neither an engine nor its model has."""
    return (
        f"the engine has no attribute {name!r}, nor has the model ({type(model).__name__}) that it"
        " trains"
    )
