"""The batch triple: any two, or one, of three sizes give the others."""

from __future__ import annotations

from typing import NamedTuple

from zero.errors import ConfigError

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


class BatchTriple(NamedTuple):
    """The three batch sizes, resolved."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int


def resolve_batch(
    train_batch_size: int | None = None,
    train_micro_batch_size_per_gpu: int | None = None,
    gradient_accumulation_steps: int | None = None,
    world_size: int = 1,
) -> BatchTriple:
    """Return the three batch sizes for a world size, or raise ConfigError with two ways out."""
    given = {
        TOTAL: train_batch_size,
        MICRO: train_micro_batch_size_per_gpu,
        STEPS: gradient_accumulation_steps,
    }
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1, got {world_size}; start with torchrun")
    if train_batch_size is None and train_micro_batch_size_per_gpu is None:
        raise ConfigError(
            f"{TOTAL} and {MICRO} are both missing ({_sources(given, world_size)}); "
            f'write "{MICRO}": 1, or write {TOTAL}'
        )
    for name, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}; write 1 or remove the key")
    total, micro, steps = _derive(
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps, world_size
    )
    if min(total, micro, steps) < 1 or total != micro * steps * world_size:
        raise _mismatch(given, (total, micro, steps), world_size)
    return BatchTriple(total, micro, steps)


def _derive(
    total: int | None, micro: int | None, steps: int | None, world_size: int
) -> tuple[int, int, int]:
    """Fill in what is missing, rounding down; the caller checks the product."""
    if total is None:
        micro = micro or 1
        steps = steps or 1
        return micro * steps * world_size, micro, steps
    if micro is None:
        steps = steps or 1
        micro = total // world_size // steps
    elif steps is None:
        steps = total // micro // world_size
    return total, micro, steps


def _sources(given: dict[str, int | None], world_size: int) -> str:
    parts = [
        f"{name} = {'missing' if value is None else f'{value} (written)'}"
        for name, value in given.items()
    ]
    return ", ".join([*parts, f"world size = {world_size} (the number of ranks)"])


def _mismatch(
    given: dict[str, int | None], resolved: tuple[int, int, int], world_size: int
) -> ConfigError:
    """Say which numbers do not multiply, where each is from, and two ways to mend it."""
    parts = [
        f"{name} = {value} ({'derived' if given[name] is None else 'written'})"
        for name, value in zip(given, resolved, strict=True)
    ]
    total, micro, steps = resolved
    if not micro or not steps:
        least = max(1, micro) * max(1, steps) * world_size
        others = {name: value for name, value in given.items() if name != TOTAL}
        return ConfigError(
            f"{TOTAL} is {total}, but {_sources(others, world_size)} need at least {least}; set"
            f" {TOTAL} to {least} or more, or remove it: it is then derived"
        )
    right = micro * steps * world_size
    other = max(1, round(total / (micro * world_size)))
    if micro * other * world_size == total:
        second = f"set {STEPS} to {other}"
    elif given[MICRO] is None:
        second = f"remove {TOTAL} and write {MICRO}"
    else:
        second = f"remove {TOTAL}, which is then derived"
    return ConfigError(
        f"{TOTAL} must equal {MICRO} x {STEPS} x world size, but {', '.join(parts)} and world size "
        f"= {world_size} (the number of ranks); set {TOTAL} to {right}, or {second}"
    )
