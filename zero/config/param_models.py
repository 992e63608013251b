"""Arguments of the optimizers and schedules that are made by name."""

from __future__ import annotations

from typing import Annotated

from zero.config.keys import Auto, Section, key, no_effect, refused
from zero.config.other_values import Numbers, Rates
from zero.config.values import Choice, Integer, Number, Switch

_RATE = Number()
_BETA = Number(maximum=1.0, below_maximum=True)
_SWITCH = Annotated[bool, Switch()]


class AdamParams(Section):
    """Arguments of AdamW, and of Adam, which is AdamW here as in the field."""

    lr: Annotated[float, _RATE] = key("learning rate", default=1e-3, auto=Auto.FRAMEWORK)
    betas: Annotated[tuple[float, ...], Numbers(entry=_BETA, length=2)] = key(
        "decay of the two moments", default=(0.9, 0.999), auto=Auto.FRAMEWORK
    )
    eps: Annotated[float, _RATE] = key("added to the root", default=1e-8, auto=Auto.FRAMEWORK)
    weight_decay: Annotated[float, _RATE] = key(
        "decay of the weights", default=0.0, auto=Auto.FRAMEWORK
    )
    bias_correction: _SWITCH = key("correct the moments for their start at zero", default=True)
    adam_w_mode: _SWITCH = key(
        "decay weights apart from the gradient (AdamW); false adds the decay to it", default=True
    )
    torch_adam: _SWITCH = no_effect(
        "use torch's implementation",
        default=False,
        why="there is one implementation, with equal results",
    )
    fused: _SWITCH = no_effect("one fused kernel", default=False, why="the kernel is always fused")
    amsgrad: _SWITCH = refused(
        "keep the largest second moment",
        default=False,
        why="there is no kernel for it",
        instead="write false, or give a torch.optim.AdamW object with it, which needs no kernel",
    )


class LionParams(Section):
    """Arguments of Lion."""

    lr: Annotated[float, _RATE] = key("learning rate", default=1e-4, auto=Auto.FRAMEWORK)
    betas: Annotated[tuple[float, ...], Numbers(entry=_BETA, length=2)] = key(
        "weights of the old average in the step, and in the average", default=(0.9, 0.99)
    )
    weight_decay: Annotated[float, _RATE] = key(
        "decay of the weights", default=0.0, auto=Auto.FRAMEWORK
    )


class AdagradParams(Section):
    """Arguments of Adagrad."""

    lr: Annotated[float, _RATE] = key("learning rate", default=1e-2, auto=Auto.FRAMEWORK)
    lr_decay: Annotated[float, _RATE] = key("decay of the learning rate", default=0.0)
    eps: Annotated[float, _RATE] = key("added to the root", default=1e-10)
    weight_decay: Annotated[float, _RATE] = key(
        "decay of the weights, added to the gradient", default=0.0, auto=Auto.FRAMEWORK
    )
    initial_accumulator_value: Annotated[float, _RATE] = key(
        "value that the sum of squares starts at", default=0.0
    )


class SgdParams(Section):
    """Arguments of SGD; it keeps a momentum buffer, with a momentum of 0 as well."""

    lr: Annotated[float, _RATE] = key("learning rate", default=1e-3, auto=Auto.FRAMEWORK)
    momentum: Annotated[float, _RATE] = key("weight of the old momentum", default=0.0)
    dampening: Annotated[float, _RATE] = key("what the momentum takes less of", default=0.0)
    nesterov: _SWITCH = key("step by the momentum that comes next", default=False)
    weight_decay: Annotated[float, _RATE] = key(
        "decay of the weights, added to the gradient", default=0.0, auto=Auto.FRAMEWORK
    )


class LambParams(Section):
    """Arguments of Lamb, with the bounds of the trust ratio that the field has."""

    lr: Annotated[float, _RATE] = key("learning rate", default=1e-3, auto=Auto.FRAMEWORK)
    betas: Annotated[tuple[float, ...], Numbers(entry=_BETA, length=2)] = key(
        "decay of the two moments", default=(0.9, 0.999), auto=Auto.FRAMEWORK
    )
    eps: Annotated[float, _RATE] = key("added to the root", default=1e-8, auto=Auto.FRAMEWORK)
    weight_decay: Annotated[float, _RATE] = key(
        "share of a parameter that is added to its step", default=0.0, auto=Auto.FRAMEWORK
    )
    bias_correction: _SWITCH = key("correct the rate for the moments' start at zero", default=True)
    max_coeff: Annotated[float, _RATE] = key("largest trust ratio", default=10.0)
    min_coeff: Annotated[float, _RATE] = key("least trust ratio", default=0.01)
    eps_inside_sqrt: _SWITCH = key("add eps before the root is taken", default=False)
    max_grad_norm: Annotated[float, _RATE] = refused(
        "largest norm of the gradient",
        default=0.0,
        why="gradients are clipped once, before the optimizer",
        instead='write "gradient_clipping" at the top level',
    )
    amsgrad: _SWITCH = refused(
        "keep the largest second moment",
        default=False,
        why="LAMB has no such form",
        instead="write false",
    )


OPTIMIZER_PARAMS: dict[str, type[Section]] = {
    "AdamW": AdamParams,
    "Adam": AdamParams,
    "Lion": LionParams,
    "Adagrad": AdagradParams,
    "SGD": SgdParams,
    "Lamb": LambParams,
}

_WARMUP_STEPS = Integer(minimum=1)
_WARMUP_TYPE = Choice(words=("log", "linear"))
_LAST = "step to continue after"


class WarmupLRParams(Section):
    """Arguments of WarmupLR."""

    warmup_min_lr: Annotated[object, Rates()] = key("first rate", default=0.0, auto=Auto.FRAMEWORK)
    warmup_max_lr: Annotated[object, Rates(nullable=True)] = key(
        "rate after the warm-up; null is that of the optimizer", default=None, auto=Auto.FRAMEWORK
    )
    warmup_num_steps: Annotated[int, _WARMUP_STEPS] = key(
        "steps of the warm-up", default=1000, auto=Auto.FRAMEWORK
    )
    warmup_type: Annotated[str, _WARMUP_TYPE] = key("shape of the warm-up", default="log")
    last_batch_iteration: Annotated[int, Integer(minimum=-1)] = key(_LAST, default=-1)


class WarmupDecayLRParams(WarmupLRParams):
    """Arguments of WarmupDecayLR."""

    warmup_max_lr: Annotated[object, Rates(nullable=True)] = key(
        "rate after the warm-up; null is that of the optimizer", default=1e-3, auto=Auto.FRAMEWORK
    )
    total_num_steps: Annotated[int, Integer(minimum=1)] = key(
        "step at which the rate is zero", default=..., auto=Auto.REQUIRED
    )


class WarmupCosineLRParams(Section):
    """Arguments of WarmupCosineLR."""

    total_num_steps: Annotated[int, Integer(minimum=1)] = key(
        "step at which the rate is least", default=..., auto=Auto.REQUIRED
    )
    warmup_min_ratio: Annotated[float, _RATE] = key("first share of the rate", default=0.0)
    warmup_num_steps: Annotated[int, _WARMUP_STEPS] = key(
        "steps of the warm-up", default=1000, auto=Auto.FRAMEWORK
    )
    cos_min_ratio: Annotated[float, _RATE] = key("last share of the rate", default=0.0001)
    warmup_type: Annotated[str, _WARMUP_TYPE] = key("shape of the warm-up", default="log")
    last_batch_iteration: Annotated[int, Integer(minimum=-1)] = key(_LAST, default=-1)


class OneCycleParams(Section):
    """Arguments of OneCycle."""

    cycle_min_lr: Annotated[object, Rates()] = key("rate at both ends of the cycle", default=...)
    cycle_max_lr: Annotated[object, Rates()] = key("rate in the middle", default=...)
    decay_lr_rate: Annotated[float, _RATE] = key("decay of the rate after the cycle", default=0.0)
    cycle_first_step_size: Annotated[int, Integer(minimum=1)] = key("steps up", default=2000)
    cycle_second_step_size: Annotated[int | None, Integer(nullable=True)] = key(
        "steps down; null is as many as up", default=None
    )
    cycle_first_stair_count: Annotated[int, Integer()] = key("stairs up; 0 is a ramp", default=0)
    cycle_second_stair_count: Annotated[int | None, Integer(nullable=True)] = key(
        "stairs down; null is as many as up", default=None
    )
    decay_step_size: Annotated[int, Integer()] = key("steps of one decay; 0 is none", default=0)
    cycle_momentum: _SWITCH = key("move the momentum against the rate", default=True)
    cycle_min_mom: Annotated[float, _BETA] = key("momentum in the middle", default=0.8)
    cycle_max_mom: Annotated[float, _BETA] = key("momentum at both ends", default=0.9)
    decay_mom_rate: Annotated[float, _RATE] = key(
        "growth of the momentum after the cycle", default=0.0
    )
    last_batch_iteration: Annotated[int, Integer(minimum=-1)] = key(_LAST, default=-1)


class LRRangeTestParams(Section):
    """Arguments of LRRangeTest."""

    lr_range_test_min_lr: Annotated[object, Rates()] = key("first rate", default=1e-3)
    lr_range_test_step_size: Annotated[int, Integer(minimum=1)] = key(
        "steps of one rise", default=2000
    )
    lr_range_test_step_rate: Annotated[float, _RATE] = key("share added by one rise", default=1.0)
    lr_range_test_staircase: _SWITCH = key("rise at once, not evenly", default=False)
    last_batch_iteration: Annotated[int, Integer(minimum=-1)] = key(_LAST, default=-1)


SCHEDULE_PARAMS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}


def params_section(owner: str, type_name: object) -> type[Section] | None:
    """Return the model of the arguments of an optimizer or scheduler, None if it is not ours."""
    if not isinstance(type_name, str):
        return None
    if owner == "scheduler":
        return SCHEDULE_PARAMS.get(type_name)
    by_name = {name.lower(): section for name, section in OPTIMIZER_PARAMS.items()}
    return by_name.get(type_name.lower())
