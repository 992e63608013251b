"""Schedules of the learning rate: the field's own five, and torch's by name.

[Note: counting steps] `last_batch_iteration` is the number of calls of `step()` less one. The
constructor already sets the rate of the first optimizer step, so that no step ever runs with a rate
that the schedule did not choose; the call after optimizer step k sets the rate of step k + 1.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

PerGroup = float | Sequence[float]
"""A number, or a sequence with one for every param group."""

_LEAST_WARMUP_STEPS = 2


class Schedule(ABC):
    """Sets the learning rate of every param group, one step at a time."""

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        self.optimizer = _torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", _number(group["lr"]))
        self.base_lrs = [float(group["initial_lr"]) for group in self.optimizer.param_groups]
        self._last_lr: list[float] = []

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the rate of every param group at this step."""

    def get_last_lr(self) -> list[float]:
        """Return the rates that were set last."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or go to the step that is given."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to continue."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the step of a state, and set its rates at once."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self._apply()

    @property
    def last_epoch(self) -> int:
        """The step as torch's schedulers call it."""
        return self.last_batch_iteration

    def _apply(self) -> None:
        """Write the rates of this step into the param groups."""
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _per_group(self, value: PerGroup, name: str) -> list[float]:
        """Return one value for every param group."""
        count = len(self.optimizer.param_groups)
        if isinstance(value, Sequence):
            if len(value) != count:
                raise ValueError(
                    f"{name} has {len(value)} values for {count} param groups; give one number, or "
                    f"{count} of them"
                )
            return [float(entry) for entry in value]
        return [float(value)] * count


class WarmupLR(Schedule):
    """Rises from one rate to another, then stays there."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = warmup_num_steps, warmup_type
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = (
            self.base_lrs
            if warmup_max_lr is None
            else self._per_group(warmup_max_lr, "warmup_max_lr")
        )
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the rate of every param group at this step."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        share = self._share(self.last_batch_iteration)
        return [
            low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _share(self, step: int) -> float:
        return self._warmup.share(step)


class WarmupDecayLR(WarmupLR):
    """Rises as WarmupLR does, then falls to the first rate in a straight line."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        _check_total(total_num_steps, self._warmup)

    def _share(self, step: int) -> float:
        warmup_steps = self._warmup.steps
        if step < warmup_steps:
            return self._warmup.share(step)
        return max(
            0.0, (self.total_num_steps - step) / max(1.0, self.total_num_steps - warmup_steps)
        )


class WarmupCosineLR(Schedule):
    """Rises to the optimizer's rate, then falls along a cosine; both ends are shares of it."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = warmup_num_steps, warmup_type
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        _check_total(total_num_steps, self._warmup)
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the rate of every param group at this step."""
        ratio = self._ratio(self.last_batch_iteration)
        return [rate * ratio for rate in self.base_lrs]

    def _ratio(self, step: int) -> float:
        if step < 0:
            return 0.0
        warmup_steps = self._warmup.steps
        if step < warmup_steps:
            low = self.warmup_min_ratio
            return low + (1.0 - low) * self._warmup.share(step)
        progress = (step - warmup_steps + 1) / max(1, self.total_num_steps - warmup_steps)
        cosine = (1.0 + math.cos(math.pi * min(1.0, progress))) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class OneCycle(Schedule):
    """Rises and falls once, the momentum against it; then both may decay."""

    def __init__(  # noqa: PLR0913, PLR0917  the field's own signature
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,  # noqa: FBT001, FBT002  the field's own signature
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.cycle_first_step_size = cycle_first_step_size
        self.cycle_second_step_size = cycle_second_step_size
        self.cycle_first_stair_count = cycle_first_stair_count
        self.cycle_second_stair_count = cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self._cycle = _Cycle(
            cycle_first_step_size,
            cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size,
            cycle_first_stair_count,
            cycle_first_stair_count
            if cycle_second_stair_count is None
            else cycle_second_stair_count,
            decay_step_size,
        )
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_mom = cycle_min_mom
        self.max_mom = cycle_max_mom
        self._momentum_key = _momentum_key(self.optimizer) if cycle_momentum else None
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the rate of every param group at this step."""
        batch = self.last_batch_iteration + 1
        decays = self._cycle.decays(batch)
        if decays is not None:
            return [low / (1 + self.decay_lr_rate * decays) for low in self.min_lrs]
        height = self._cycle.height(batch)
        return [
            low + (high - low) * height
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def get_mom(self) -> float:
        """Return the momentum at this step."""
        batch = self.last_batch_iteration + 1
        decays = self._cycle.decays(batch)
        if decays is not None:
            return self.max_mom * (1 + self.decay_mom_rate * decays)
        return self.max_mom - (self.max_mom - self.min_mom) * self._cycle.height(batch)

    def _apply(self) -> None:
        super()._apply()
        if self._momentum_key is None:
            return
        momentum = self.get_mom()
        value = (momentum, 0.99) if self._momentum_key == "betas" else momentum
        for group in self.optimizer.param_groups:
            group[self._momentum_key] = value


class LRRangeTest(Schedule):
    """Rises for ever, to find the largest rate that still trains."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,  # noqa: FBT001, FBT002  the field's own signature
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if lr_range_test_step_size <= 0:
            raise ValueError(
                f"lr_range_test_step_size must be positive, got {lr_range_test_step_size}; write "
                "the steps of one rise"
            )
        self.min_lrs = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the rate of every param group at this step."""
        rises = float(self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            rises = math.floor(rises)
        return [low * (1 + self.step_rate * rises) for low in self.min_lrs]


class _Warmup:
    """The shape of a warm-up."""

    def __init__(self, steps: int, kind: str) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps <= 0:
            raise ValueError(f"warmup_num_steps must be a positive integer, got {steps!r}; write 1")
        if kind not in {"log", "linear"}:
            warnings.warn(
                f'warmup_type {kind!r} is neither "log" nor "linear"; "log" is used', stacklevel=3
            )
            kind = "log"
        self.steps = max(_LEAST_WARMUP_STEPS, steps)
        self._kind = kind

    def share(self, step: int) -> float:
        """Return how much of the rise is done at a step, from 0 to 1."""
        if step >= self.steps:
            return 1.0
        if self._kind == "linear":
            return step / self.steps
        return math.log(step + 1) / math.log(self.steps)


class _Cycle:
    """The shape of one cycle and of the decay after it."""

    def __init__(
        self, first: float, second: float, first_stairs: int, second_stairs: int, decay_steps: float
    ) -> None:
        if first <= 0:
            raise ValueError(f"cycle_first_step_size must be positive, got {first}; write 2000")
        if second < 0:
            raise ValueError(
                f"cycle_second_step_size must not be negative, got {second}; remove it to take "
                "as many steps down as up"
            )
        self._total = float(first + second)
        self._peak = first / self._total
        self._first_stairs = first_stairs
        self._second_stairs = second_stairs
        self._decay_steps = decay_steps

    def decays(self, batch: int) -> float | None:
        """Return the decays that are done, None while the cycle lasts."""
        if batch <= self._total:
            return None
        return (batch - self._total) / self._decay_steps if self._decay_steps else 0.0

    def height(self, batch: int) -> float:
        """Return where between the two ends the cycle stands, from 0 to 1."""
        passed = 1.0 + batch / self._total
        position = passed - math.floor(passed)
        if position <= self._peak:
            return _stairs(position / self._peak, self._first_stairs)
        return _stairs((position - 1.0) / (self._peak - 1.0), self._second_stairs)


def _stairs(height: float, count: int) -> float:
    return math.floor(height * count) / count if count > 0 else height


def _check_total(total_num_steps: int, warmup: _Warmup) -> None:
    if total_num_steps < warmup.steps:
        warnings.warn(
            f"total_num_steps {total_num_steps} is less than the {warmup.steps} steps of the "
            "warm-up; raise it or lower warmup_num_steps",
            stacklevel=3,
        )


def _number(value: float | torch.Tensor) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer, also out of a wrapper that holds it as `optimizer`."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return inner
    raise TypeError(
        f"a schedule needs a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the one "
        "that zero.initialize returned"
    )


def _momentum_key(optimizer: Optimizer) -> str | None:
    """Return the name under which param groups hold the momentum."""
    for name in ("betas", "momentum"):
        if all(name in group for group in optimizer.param_groups):
            return name
    warnings.warn(
        f"cycle_momentum has no effect: {type(optimizer).__name__} has no momentum; write "
        '"cycle_momentum": false',
        stacklevel=3,
    )
    return None


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.__name__: schedule
    for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def make_schedule(optimizer: Any, type_name: str, parameters: Mapping[str, Any]) -> Any:
    """Make a schedule by name: one of the five, or a class of torch.optim.lr_scheduler."""
    schedule: Any = SCHEDULES.get(type_name) or getattr(torch.optim.lr_scheduler, type_name, None)
    if schedule is None:
        raise ValueError(
            f"{type_name!r} is not a schedule; use one of {', '.join(SCHEDULES)} or a class of "
            "torch.optim.lr_scheduler"
        )
    return schedule(optimizer, **parameters)


def step_schedule(schedule: Any) -> None:
    """Advance a schedule after an update that no torch optimizer made itself."""
    optimizer = getattr(schedule, "optimizer", None)
    if optimizer is not None:
        optimizer._opt_called = True  # torch's schedules warn of an order that is right here
    schedule.step()
