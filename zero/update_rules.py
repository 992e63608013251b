"""The optimizers that have a kernel: their names, hyper-parameters, and the scalars of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from estimators import UpdateRule
from offload import (
    AdagradScalars,
    AdamScalars,
    AdamWScalars,
    LionScalars,
    SgdScalars,
    UpdateScalars,
)

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FusedOptimizer:
    """An optimizer whose update is one kernel."""

    rule: UpdateRule
    defaults: Mapping[str, Any]
    make: Callable[..., UpdateScalars]
    switches: frozenset[str] = frozenset()
    """Hyper-parameters that are true or false."""

    @property
    def name(self) -> str:
        """What users call it."""
        return next(name for name in NAMES if _BY_NAME[name.lower()] is self.rule)

    def scalars(
        self, index: int, group: Group, step: int, grad_scale: float, _birth: int = 0
    ) -> UpdateScalars:
        """Return the scalars of a group's step, from the values that the group has now.

        Raises:
            ValueError: naming the group and the hyper-parameter that cannot be used.
        """
        values: dict[str, Any] = {}
        for key, default in self.defaults.items():
            value = group.get(key, default)
            if key in self.switches:
                values[key] = bool(value)
            elif key == "betas":
                values[key] = tuple(_number(index, key, each) for each in value)
            else:
                values[key] = _number(index, key, value)
        return self.make(step=step, grad_scale=grad_scale, **values)


def _number(index: int, key: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found) or found < 0:
        raise ValueError(
            f"param_groups[{index}][{key!r}] is {value!r}; a finite number of at least 0 is needed"
        )
    return found


_ADAM_DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
}

FUSED: dict[UpdateRule, FusedOptimizer] = {
    UpdateRule.ADAMW: FusedOptimizer(
        UpdateRule.ADAMW,
        {**_ADAM_DEFAULTS, "weight_decay": 0.01},
        AdamWScalars.from_hyperparameters,
        frozenset({"bias_correction"}),
    ),
    UpdateRule.ADAM: FusedOptimizer(
        UpdateRule.ADAM,
        _ADAM_DEFAULTS,
        AdamScalars.from_hyperparameters,
        frozenset({"bias_correction"}),
    ),
    UpdateRule.LION: FusedOptimizer(
        UpdateRule.LION,
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
        LionScalars.from_hyperparameters,
    ),
    UpdateRule.ADAGRAD: FusedOptimizer(
        UpdateRule.ADAGRAD,
        {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "eps": 1e-10,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
        },
        AdagradScalars.from_hyperparameters,
    ),
    UpdateRule.SGD: FusedOptimizer(
        UpdateRule.SGD,
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
        SgdScalars.from_hyperparameters,
        frozenset({"nesterov"}),
    ),
}

_BY_NAME = {
    "adamw": UpdateRule.ADAMW,
    "adam": UpdateRule.ADAM,
    "lion": UpdateRule.LION,
    "adagrad": UpdateRule.ADAGRAD,
    "sgd": UpdateRule.SGD,
}

_BEYOND_KERNELS = ("amsgrad", "maximize", "differentiable")

NAMES = ("AdamW", "Adam", "Lion", "Adagrad", "SGD")
"""What users call them, for messages."""


def fused_by_name(name: str) -> FusedOptimizer | None:
    """Return the optimizer of a configuration's name, or None if it has no kernel."""
    rule = _BY_NAME.get(name.lower())
    return FUSED[rule] if rule is not None else None


def fused_of(optimizer: torch.optim.Optimizer) -> FusedOptimizer | None:
    """Return the kernel that does what an optimizer object does, or None if there is none.

    Torch has no Lion: a class of that name with Lion's hyper-parameters is taken for it.
    """
    kind = type(optimizer)
    if any(group.get(option) for group in optimizer.param_groups for option in _BEYOND_KERNELS):
        return None
    if kind is torch.optim.AdamW:
        return FUSED[UpdateRule.ADAMW]
    if kind is torch.optim.Adam:
        decoupled = all(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
        return FUSED[UpdateRule.ADAMW if decoupled else UpdateRule.ADAM]
    if kind is torch.optim.Adagrad:
        return FUSED[UpdateRule.ADAGRAD]
    if kind is torch.optim.SGD:
        return FUSED[UpdateRule.SGD]
    lion = FUSED[UpdateRule.LION]
    is_lion = kind.__name__ in ("Lion", "DeepSpeedCPULion", "FusedLion")
    return lion if is_lion and set(lion.defaults) <= set(optimizer.defaults) else None
