"""The arithmetic of each optimizer that the kernels have, and its scalars for one step.

[Note: update rules] Each operator is one IEEE fp32 operation, in the written order; `grad` is
widened to fp32, `p` is the master. Every rule starts with the unscaled and clipped gradient:

    g = grad * grad_scale

    AdamW    p = p * decay_factor
             m = exp_avg * beta1 + g * one_minus_beta1
             v = exp_avg_sq * beta2 + (g * g) * one_minus_beta2
             p = p - step_size * (m / (sqrt(v) / bias_correction2_sqrt + eps))

    Adam     g = g + p * l2, then as AdamW without the decay

    Lion     c = exp_avg * beta1 + g * one_minus_beta1
             m = exp_avg * beta2 + g * one_minus_beta2
             p = p * decay_factor - step_size * sign(c)      sign of 0 or NaN: itself

    Adagrad  g = g + p * l2
             v = exp_avg_sq + g * g
             p = p - step_size * (g / (sqrt(v + initial) + eps))

    SGD      g = g + p * l2
             m = exp_avg * beta1 + g * one_minus_beta1       beta1: momentum
             p = p - step_size * m                           nesterov: g + m * beta1 for m

SGD's `one_minus_beta1` is 1 in the first step and 1 - dampening afterwards, as in torch. Adagrad's
initial value of the sum is added when the sum is read, so that state never written is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from estimators import UpdateRule


def round_to_fp32(value: float) -> float:
    """Return the fp32 value nearest to `value`, refusing a finite one beyond the fp32 range."""
    with np.errstate(all="ignore"):
        rounded = float(np.float32(value))
    if math.isinf(rounded) and not math.isinf(value):
        raise ValueError(f"{value} is beyond the fp32 range; use a magnitude below 3.4e38")
    return rounded


_NUMBERS = {rule: number for number, rule in enumerate(UpdateRule)}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateScalars:
    """The scalars of one step, each a float that holds an fp32 value; a rule reads those it has."""

    beta1: float = 0.0
    one_minus_beta1: float = 0.0
    beta2: float = 0.0
    one_minus_beta2: float = 0.0
    decay_factor: float = 1.0
    step_size: float = 0.0
    bias_correction2_sqrt: float = 1.0
    eps: float = 0.0
    grad_scale: float = 1.0
    l2: float = 0.0
    initial: float = 0.0
    nesterov: bool = False

    rule: ClassVar[UpdateRule]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isnan(value) and round_to_fp32(value) != value:
                raise ValueError(
                    f"{field.name} must hold an fp32 value, got {value!r}; "
                    f"the nearest is {round_to_fp32(value)!r} (use from_hyperparameters)"
                )

    @property
    def rule_number(self) -> int:
        """The rule as the compiled kernels know it."""
        return _NUMBERS[self.rule]


def _check_step(step: int) -> None:
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}; pass the number of this step")


def _check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    for name, beta in (("betas[0]", betas[0]), ("betas[1]", betas[1])):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name} must be at least 0 and below 1, got {beta}")
    return betas


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWScalars(UpdateScalars):
    """The scalars of one AdamW step."""

    rule: ClassVar[UpdateRule] = UpdateRule.ADAMW

    @classmethod
    def from_hyperparameters(
        cls,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
        bias_correction: bool = True,
    ) -> AdamWScalars:
        """Compute the scalars of step `step` (the first is 1) in fp64 and round each once."""
        beta1, beta2 = _check_betas(betas)
        _check_step(step)
        correction1 = 1.0 - beta1**step if bias_correction else 1.0
        correction2 = 1.0 - beta2**step if bias_correction else 1.0
        return cls(
            beta1=round_to_fp32(beta1),
            one_minus_beta1=round_to_fp32(1.0 - beta1),
            beta2=round_to_fp32(beta2),
            one_minus_beta2=round_to_fp32(1.0 - beta2),
            decay_factor=round_to_fp32(1.0 - lr * weight_decay),
            step_size=round_to_fp32(lr / correction1),
            bias_correction2_sqrt=round_to_fp32(math.sqrt(correction2)),
            eps=round_to_fp32(eps),
            grad_scale=round_to_fp32(grad_scale),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamScalars(UpdateScalars):
    """The scalars of one step of Adam, whose weight decay is part of the gradient."""

    rule: ClassVar[UpdateRule] = UpdateRule.ADAM

    @classmethod
    def from_hyperparameters(
        cls,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
        bias_correction: bool = True,
    ) -> AdamScalars:
        """Compute the scalars of step `step` (the first is 1) in fp64 and round each once."""
        decoupled = AdamWScalars.from_hyperparameters(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=0.0,
            step=step,
            grad_scale=grad_scale,
            bias_correction=bias_correction,
        )
        values = {field.name: getattr(decoupled, field.name) for field in fields(decoupled)}
        return cls(**{**values, "l2": round_to_fp32(weight_decay)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LionScalars(UpdateScalars):
    """The scalars of one step of Lion."""

    rule: ClassVar[UpdateRule] = UpdateRule.LION

    @classmethod
    def from_hyperparameters(
        cls,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        step: int,
        grad_scale: float,
    ) -> LionScalars:
        """Compute the scalars of a step in fp64 and round each once."""
        beta1, beta2 = _check_betas(betas)
        _check_step(step)
        return cls(
            beta1=round_to_fp32(beta1),
            one_minus_beta1=round_to_fp32(1.0 - beta1),
            beta2=round_to_fp32(beta2),
            one_minus_beta2=round_to_fp32(1.0 - beta2),
            decay_factor=round_to_fp32(1.0 - lr * weight_decay),
            step_size=round_to_fp32(lr),
            grad_scale=round_to_fp32(grad_scale),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradScalars(UpdateScalars):
    """The scalars of one step of Adagrad."""

    rule: ClassVar[UpdateRule] = UpdateRule.ADAGRAD

    @classmethod
    def from_hyperparameters(
        cls,
        *,
        lr: float,
        lr_decay: float,
        eps: float,
        weight_decay: float,
        initial_accumulator_value: float,
        step: int,
        grad_scale: float,
    ) -> AdagradScalars:
        """Compute the scalars of step `step` (the first is 1) in fp64 and round each once."""
        _check_step(step)
        return cls(
            step_size=round_to_fp32(lr / (1.0 + (step - 1) * lr_decay)),
            eps=round_to_fp32(eps),
            l2=round_to_fp32(weight_decay),
            initial=round_to_fp32(initial_accumulator_value),
            grad_scale=round_to_fp32(grad_scale),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdScalars(UpdateScalars):
    """The scalars of one step of SGD with momentum."""

    rule: ClassVar[UpdateRule] = UpdateRule.SGD

    @classmethod
    def from_hyperparameters(
        cls,
        *,
        lr: float,
        momentum: float,
        dampening: float,
        nesterov: bool,
        weight_decay: float,
        step: int,
        grad_scale: float,
    ) -> SgdScalars:
        """Compute the scalars of step `step` (the first is 1) in fp64 and round each once."""
        _check_step(step)
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(
                f"nesterov needs a momentum and no dampening, got momentum {momentum} and"
                f" dampening {dampening}"
            )
        damped = 1.0 - dampening if step > 1 and momentum != 0.0 else 1.0
        return cls(
            beta1=round_to_fp32(momentum),
            one_minus_beta1=round_to_fp32(damped),
            step_size=round_to_fp32(lr),
            l2=round_to_fp32(weight_decay),
            grad_scale=round_to_fp32(grad_scale),
            nesterov=nesterov,
        )
