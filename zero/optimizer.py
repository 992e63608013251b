"""The optimizer that users hold: a `torch.optim.Optimizer` whose state lives on the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch

from offload import AdamWScalars
from zero.errors import ConfigError
from zero.settings import NamedFactory

ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "bias_correction": True,
}

_REFUSED_OPTIONS = ("amsgrad", "maximize", "differentiable")


class ZeroOptimizer(torch.optim.Optimizer):
    """AdamW over sharded parameters; `param_groups` are read at each step."""

    def __init__(self, groups: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(groups, {**ADAMW_DEFAULTS, **defaults})
        self._run_step: Callable[[], None] | None = None
        self._drop_gradients: Callable[[], None] | None = None

    def attach(self, run_step: Callable[[], None], drop_gradients: Callable[[], None]) -> None:
        """Connect the optimizer with the engine that moves its state."""
        self._run_step = run_step
        self._drop_gradients = drop_gradients

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do what `engine.step()` does; a closure is evaluated first and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._run_step is None:
            raise RuntimeError("this optimizer belongs to no engine any more (destroyed?)")
        self._run_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  torch's own
        """Drop the gradients accumulated so far, as in torch."""
        super().zero_grad(set_to_none=set_to_none)
        if self._drop_gradients is not None:
            self._drop_gradients()

    def scalars(self, step: int, grad_scale: float) -> list[AdamWScalars]:
        """Return the scalars of step `step` (the first is 1), one per parameter group.

        Raises:
            ValueError: if a hyper-parameter of a group cannot be used.
        """
        return [
            AdamWScalars.from_hyperparameters(
                lr=float(group["lr"]),
                betas=(float(group["betas"][0]), float(group["betas"][1])),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                step=step,
                grad_scale=grad_scale,
                bias_correction=bool(group.get("bias_correction", True)),
            )
            for group in self.param_groups
        ]


def make_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    model_parameters: Iterable[Any] | None,
    named: NamedFactory | None,
) -> ZeroOptimizer | None:
    """Return the optimizer to run: from the caller's object, else from the configuration.

    Returns:
        None if neither names one: the engine then only runs forward.

    Raises:
        ConfigError: if the optimizer is one that this version cannot run.
    """
    if optimizer is not None:
        return _adopt(optimizer)
    if named is None:
        return None
    name = named.type_name.lower()
    parameters = dict(named.parameters)
    if name not in ("adam", "adamw") or not parameters.pop("adam_w_mode", True):
        raise ConfigError(
            f"optimizer.type {named.type_name!r} with {dict(named.parameters)} is not available in"
            " this version; use AdamW"
        )
    unknown = (
        set(parameters)
        - set(ADAMW_DEFAULTS)
        - {"torch_adam", "fused", "foreach", *_REFUSED_OPTIONS}
    )
    if unknown or any(parameters.get(option) for option in _REFUSED_OPTIONS):
        raise ConfigError(
            f"optimizer.params {sorted(unknown) or list(_REFUSED_OPTIONS)} cannot be used with"
            f" AdamW here; known are {sorted(ADAMW_DEFAULTS)}"
        )
    defaults = {key: value for key, value in parameters.items() if key in ADAMW_DEFAULTS}
    groups = list(model_parameters) if model_parameters is not None else list(_trainable(model))
    if not groups:
        raise ConfigError("the model has no trainable parameter; train without an optimizer")
    return ZeroOptimizer(groups, defaults)


def group_parameters(optimizer: ZeroOptimizer | None) -> Sequence[Sequence[torch.nn.Parameter]]:
    """Return the parameters of each parameter group."""
    return [group["params"] for group in optimizer.param_groups] if optimizer is not None else []


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _adopt(optimizer: torch.optim.Optimizer) -> ZeroOptimizer:
    """Take over a torch AdamW: the same group dictionaries, so schedulers bound to it work."""
    if isinstance(optimizer, ZeroOptimizer):
        raise ConfigError("this optimizer already belongs to an engine; pass a fresh torch AdamW")
    is_adam = type(optimizer) is torch.optim.Adam
    if type(optimizer) is not torch.optim.AdamW and not is_adam:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} is not available in this version; pass"
            " torch.optim.AdamW, or name AdamW in the configuration"
        )
    for group in optimizer.param_groups:
        refused = [option for option in _REFUSED_OPTIONS if group.get(option)]
        if refused:
            raise ConfigError(f"optimizer option {refused[0]} is not available in this version")
        if is_adam and group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise ConfigError(
                "torch.optim.Adam with weight_decay is L2 regularisation, which is not available in"
                " this version; use torch.optim.AdamW or weight_decay=0"
            )
    if optimizer.state:
        raise ConfigError(
            "the optimizer already has state from earlier steps; pass it before its first step"
        )
    adopted = ZeroOptimizer(
        [{**group} for group in optimizer.param_groups],
        {key: optimizer.defaults[key] for key in ADAMW_DEFAULTS if key in optimizer.defaults},
    )
    adopted.param_groups = optimizer.param_groups
    return adopted
