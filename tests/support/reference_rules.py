"""The bit reference of the optimizers beside AdamW, on whole, unsharded parameters.

Like `tests/support/reference.py` it imports nothing of the product: every operator is one IEEE fp32
operation on arrays, in the written order, and every scalar is rounded to fp32 once.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tests.support.reference import (
    Floats,
    Fp32,
    Gradients,
    Pieces,
    ReferenceAdamW,
    as_fp32,
    clip_coefficient,
    global_norm,
    with_one_nan,
)

f = np.float32
State = tuple[Fp32, Fp32, Fp32]  # master, exp_avg, exp_avg_sq


def adam(p: Fp32, m: Fp32, v: Fp32, g: Fp32, step: int, h: dict[str, Any]) -> State:
    beta1, beta2 = h["betas"]
    g = g + p * f(h["weight_decay"])
    m = m * f(beta1) + g * f(1.0 - beta1)
    v = v * f(beta2) + (g * g) * f(1.0 - beta2)
    denominator = np.sqrt(v) / f(math.sqrt(1.0 - beta2**step)) + f(h["eps"])
    return p - f(h["lr"] / (1.0 - beta1**step)) * (m / denominator), m, v


def lion(p: Fp32, m: Fp32, v: Fp32, g: Fp32, step: int, h: dict[str, Any]) -> State:
    beta1, beta2 = h["betas"]
    c = m * f(beta1) + g * f(1.0 - beta1)
    sign = np.where(c > 0, f(1), np.where(c < 0, f(-1), c))
    m = m * f(beta2) + g * f(1.0 - beta2)
    p = p * f(1.0 - h["lr"] * h["weight_decay"])
    return p - f(h["lr"]) * sign, m, v


def adagrad(p: Fp32, m: Fp32, v: Fp32, g: Fp32, step: int, h: dict[str, Any]) -> State:
    g = g + p * f(h["weight_decay"])
    v = v + g * g
    rate = f(h["lr"] / (1.0 + (step - 1) * h["lr_decay"]))
    denominator = np.sqrt(v + f(h["initial_accumulator_value"])) + f(h["eps"])
    return p - rate * (g / denominator), m, v


def sgd(p: Fp32, m: Fp32, v: Fp32, g: Fp32, step: int, h: dict[str, Any]) -> State:
    g = g + p * f(h["weight_decay"])
    undamped = step == 1 or h["momentum"] == 0
    m = m * f(h["momentum"]) + g * f(1.0 if undamped else 1.0 - h["dampening"])
    change = g + m * f(h["momentum"]) if h["nesterov"] else m
    return p - f(h["lr"]) * change, m, v


RULES = {"adam": adam, "lion": lion, "adagrad": adagrad, "sgd": sgd}

HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "lion": {"lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "adagrad": {
        "lr": 1e-2,
        "lr_decay": 0.1,
        "eps": 1e-10,
        "weight_decay": 0.01,
        "initial_accumulator_value": 0.1,
    },
    "sgd": {
        "lr": 1e-2,
        "momentum": 0.9,
        "dampening": 0.0,
        "nesterov": True,
        "weight_decay": 0.01,
    },
}


class ReferenceRule(ReferenceAdamW):
    """An optimizer by name on whole parameters; masters and parameters as those of AdamW."""

    def __init__(
        self,
        rule: str,
        masters: Mapping[str, Fp32],
        bf16: Collection[str] = (),
        fp16: Collection[str] = (),
    ) -> None:
        super().__init__(masters, bf16, fp16)
        self.rule = RULES[rule]

    def step(
        self,
        gradients: Gradients,
        *,
        clip: float = 0.0,
        pieces: Pieces | None = None,
        **hyperparameters: Any,
    ) -> float:
        """Update every parameter once and return the norm of the gradients before clipping."""
        in_order: dict[str, Floats] = {name: gradients[name] for name in self.masters}
        norm = global_norm(in_order, pieces)
        self.step_count += 1
        for name, gradient in in_order.items():
            with np.errstate(all="ignore"):
                g = as_fp32(gradient) * f(clip_coefficient(norm, clip))
                state = (self.masters[name], self.exp_avg[name], self.exp_avg_sq[name])
                p, m, v = self.rule(*state, g, self.step_count, hyperparameters)
            self.masters[name] = with_one_nan(p)
            self.exp_avg[name] = with_one_nan(m)
            self.exp_avg_sq[name] = with_one_nan(v)
        return norm
