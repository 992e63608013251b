"""Loss scales for fp16: gradients too small for its range are lifted into it by a factor.

[Note: hysteresis] A dynamic scale halves at an overflow only after `delayed_shift - 1` others; it
doubles after `scale_window` steps in a row without one. With `consecutive_hysteresis` the count of
overflows starts anew at every step without one, else only when the scale doubles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class LossScaleError(RuntimeError):
    """Gradients overflow at the smallest scale that is allowed."""


class StaticLossScaler:
    """A loss scale that never changes."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        if not 0 < scale < float("inf"):
            raise ValueError(f"loss_scale must be positive and finite, got {scale}; write 1")
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss."""
        return self.cur_scale

    def update_scale(self, overflow: bool, overflowed: Sequence[str] = ()) -> None:  # noqa: FBT001
        """Do nothing: whoever fixed the scale decides what an overflow means."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to continue."""
        return {"cur_scale": self.cur_scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the scale of a state."""
        self.cur_scale = state_dict["cur_scale"]


class DynamicLossScaler:
    """A loss scale that grows until gradients overflow."""

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,  # noqa: FBT001, FBT002  the field's own signature
        raise_error_at_min_scale: bool = True,  # noqa: FBT001, FBT002  the field's own signature
    ) -> None:
        if scale_window < 1 or delayed_shift < 1 or not min_scale > 0 or not scale_factor > 1:
            raise ValueError(
                "a dynamic loss scale needs scale_window >= 1, delayed_shift >= 1, min_scale > 0 "
                f"and scale_factor > 1, got {scale_window}, {delayed_shift}, {min_scale} and "
                f"{scale_factor}; leave them out for their defaults"
            )
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.cur_hysteresis = delayed_shift
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss."""
        return self.cur_scale

    def update_scale(self, overflow: bool, overflowed: Sequence[str] = ()) -> None:  # noqa: FBT001
        """Take note of a step, and change the scale for the next one.

        Args:
            overflow: Whether any gradient was infinite or NaN.
            overflowed: Names of the tensors that were, for the message.

        Raises:
            LossScaleError: The scale is at its minimum already and gradients still overflow.
        """
        if overflow:
            self._overflow(overflowed)
        else:
            self._clean_step()
        self.cur_iter += 1

    def _overflow(self, overflowed: Sequence[str]) -> None:
        if self.delayed_shift == 1 or self.cur_hysteresis == 1:
            if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
                raise LossScaleError(self._message(overflowed))
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        else:
            self.cur_hysteresis -= 1
        self.last_overflow_iter = self.cur_iter

    def _clean_step(self) -> None:
        if self.consecutive_hysteresis:
            self.cur_hysteresis = self.delayed_shift
        clean_steps_before = self.cur_iter - self.last_overflow_iter - 1
        if clean_steps_before > 0 and clean_steps_before % self.scale_window == 0:
            if not self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor

    def _message(self, overflowed: Sequence[str]) -> str:
        names = ", ".join(overflowed[:8]) + (", ..." if len(overflowed) > 8 else "")
        return (
            f"gradients overflow at step {self.cur_iter} with the loss scale at its minimum "
            f"{self.min_scale:g}"
            + (f", in {names}" if names else "")
            + "; parameters and optimizer state are untouched; train in bf16, lower the learning "
            "rate, or lower fp16.min_loss_scale"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to continue."""
        return {
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "cur_hysteresis": self.cur_hysteresis,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the scale and the counts of a state."""
        self.cur_scale = state_dict["cur_scale"]
        self.cur_iter = state_dict["cur_iter"]
        self.last_overflow_iter = state_dict["last_overflow_iter"]
        self.cur_hysteresis = state_dict["cur_hysteresis"]
