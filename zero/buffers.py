"""What a model has beside its parameters: persistent buffers, and extra state of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zero.errors import RunStateError
from zero.parameter import reference_of


def other_state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what `state_dict()` has beside sharded parameters.

    Those are buffers, extra state of modules, and parameters that no engine shards, such as
    frozen ones of integers.
    """
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or reference_of(value) is None:
            yield name, value


def check_buffers(module: nn.Module, saved: Mapping[str, Any], *, strict: bool) -> None:
    """Refuse saved buffers that do not fit a model.

    Raises:
        RunStateError: naming those that are missing, unexpected or of another shape.
    """
    now = dict(other_state(module))
    problems = []
    missing, unexpected = sorted(set(now) - set(saved)), sorted(set(saved) - set(now))
    if strict and missing:
        problems.append(f"the saved state lacks {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"the model lacks {', '.join(unexpected)}")
    for name in sorted(set(now) & set(saved)):
        one, other = now[name], saved[name]
        if isinstance(one, torch.Tensor) and (
            not isinstance(other, torch.Tensor) or one.shape != other.shape
        ):
            shape = tuple(getattr(other, "shape", ()))
            problems.append(f"{name} has shape {tuple(one.shape)}, the saved one {shape}")
    if problems:
        raise RunStateError(
            "the buffers of the model do not fit the saved state: " + "; ".join(problems)
        )


def restore_buffers(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Set what a model has beside parameters."""
    for name, value in other_state(module):
        if name not in saved:
            continue
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(saved[name])
        else:
            owner = module.get_submodule(name.rpartition(".")[0])
            owner.set_extra_state(saved[name])
