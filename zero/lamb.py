"""LAMB: Adam's step on each parameter, as long as the parameter itself (You et al. 2020).

[Note: LAMB] Algorithm 2 of the paper, in the form that the ZeRO field trains with, so that its
configurations give its results. Two things differ from the paper. The trust ratio, the norm of the
parameter over the norm of its step, is itself held between `min_coeff` and `max_coeff`, where the
paper bounds the norm of the parameter. And the correction of the moments for their start at zero is
a factor of the rate, so it acts on the decay of the weights too, and the ratio is that of the step
before it. The ratio is 1 where either norm is 0.

Norms are taken over fixed blocks in fp64 and the root is correctly rounded, so results do not
depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from estimators import ElementType
from offload import array_at, load_kernels, native_available, tensor_span


class Lamb(torch.optim.Optimizer):
    """Adam's step, scaled for each parameter by a bounded trust ratio."""

    needs_whole_tensors = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **more: Any,
    ) -> None:
        """Take parameters or groups.

        Args:
            params: parameters, or groups of them with hyper-parameters of their own.
            lr: the rate.
            betas: decay of the two moments.
            eps: added to the root of the second moment.
            weight_decay: share of the parameter that is added to its step.
            more: `bias_correction` (True), `max_coeff` (10), `min_coeff` (0.01), the bounds of the
                trust ratio, and `eps_inside_sqrt` (False).

        Raises:
            TypeError: if there is no such hyper-parameter.
            ValueError: if a value cannot be used.
        """
        unknown = sorted(set(more) - set(_MORE))
        if unknown:
            raise TypeError(
                f"{unknown} cannot be used with Lamb; known are"
                f" {sorted(('lr', 'betas', 'eps', 'weight_decay', *_MORE))}"
            )
        options = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, **_MORE, **more})
        for index, group in enumerate(self.param_groups):
            _check(index, group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        if closure is not None:
            raise TypeError("Lamb takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)


_MORE = {
    "bias_correction": True,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "eps_inside_sqrt": False,
}


def _check(index: int, group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay", "min_coeff", "max_coeff"):
        if not (math.isfinite(group[name]) and group[name] >= 0):
            raise ValueError(
                f"param_groups[{index}][{name!r}] is {group[name]!r}; a finite number of at least 0"
                " is needed"
            )
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(
            f"param_groups[{index}]['betas'] is {group['betas']!r}; two numbers of at least 0 and"
            " below 1 are needed"
        )
    if group["min_coeff"] > group["max_coeff"]:
        raise ValueError(
            f"param_groups[{index}]: min_coeff {group['min_coeff']} is above max_coeff"
            f" {group['max_coeff']}; the trust ratio lies between them"
        )


def _update(
    parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    """Update one parameter; the plain operations in this order are what its bits are."""
    if not state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    beta1, beta2 = group["betas"]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.mul_(beta1).add_(gradient.mul(1 - beta1))
    second.mul_(beta2).add_(gradient.mul(1 - beta2).mul_(gradient))
    eps = group["eps"]
    divisor = _root(second.add(eps)) if group["eps_inside_sqrt"] else _root(second).add_(eps)
    move = torch.div(first, divisor, out=divisor)
    if group["weight_decay"]:
        move.add_(parameter.mul(group["weight_decay"]))
    rate = float(group["lr"])
    if group["bias_correction"]:
        step = state["step"]
        rate *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
    length, norm = _norm(parameter), _norm(move)
    if length and norm:
        rate *= min(max(length / norm, group["min_coeff"]), group["max_coeff"])
    parameter.sub_(move.mul_(rate))


def _root(values: Tensor) -> Tensor:
    """Return new values: the correctly rounded roots, which torch's on the processor are not."""
    if values.device.type != "cpu" or values.dtype not in (torch.float32, torch.float64):
        return values.sqrt()
    found = torch.empty_like(values)
    np.sqrt(values.numpy(), out=found.numpy())
    return found


def _norm(values: Tensor) -> float:
    """Return the norm in fp64; values that a trial does not have have none."""
    if values.is_meta:
        return 0.0
    if values.device.type != "cpu" or values.dtype is not torch.float32:
        return float(torch.linalg.vector_norm(values, dtype=torch.float64))
    flat = values.detach().contiguous().view(-1)
    kernels = load_kernels("native" if native_available() else "numpy", torch.get_num_threads())
    array = array_at(tensor_span(flat), ElementType.FP32, flat.numel())
    return math.sqrt(kernels.sum_squares(array, 0))
