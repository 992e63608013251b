"""Checks at a step that the model is still the one that the engine trains.

Anything that would go untrained without a word is refused by name instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from zero.parameter import raw_gradient
from zero.runtime import Runtime
from zero.unit import Segment


def managed_parameters(runtime: Runtime) -> dict[str, nn.Parameter]:
    """Return the parameters that an engine shards, by name."""
    return {
        member.name: member.parameter for segment in runtime.segments for member in segment.members
    }


def check_model(model: nn.Module, managed: Mapping[int, str], segments: Sequence[Segment]) -> None:
    """Refuse parameters that were replaced, added, unfrozen, or given gradients from outside.

    Args:
        model: the model that the engine trains.
        managed: names of the managed parameters by the id of the object.
        segments: the segments that hold them.

    Raises:
        RuntimeError: naming the parameter and what to do.
    """
    present = set()
    for name, parameter in model.named_parameters():
        present.add(id(parameter))
        if id(parameter) not in managed and parameter.requires_grad:
            raise RuntimeError(
                f"parameter {name} was added or replaced after zero.initialize and would not be"
                " trained; change the model before, and copy new values into the old parameter"
                " inside `with zero.GatheredParameters([parameter], modifier_rank=0):`"
            )
    gone = [name for key, name in managed.items() if key not in present]
    if gone:
        raise RuntimeError(
            f"parameter {gone[0]} left the model after zero.initialize; change the model before"
        )
    for segment in segments:
        for member in segment.members:
            if member.parameter.requires_grad and not member.is_trainable_at_start:
                raise RuntimeError(
                    f"parameter {member.name} was frozen when the engine was made and requires a"
                    " gradient now; it has no optimizer state: make it trainable before"
                    " zero.initialize, and freeze it afterwards"
                )
            if raw_gradient(member.parameter) is not None:
                raise RuntimeError(
                    f"parameter {member.name} has a .grad that did not come from a backward of"
                    " this engine and would be ignored; gradients live in the engine's shards:"
                    " clip with gradient_clipping in the configuration"
                )
