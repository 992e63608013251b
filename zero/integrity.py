"""Checks at a step that the model is still the one that the engine trains.

Anything that would go untrained without a word is refused by name instead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn

from zero.parameter import raw_gradient, reference_of
from zero.runtime import Runtime
from zero.source import StoreSource
from zero.units import ManagedParameter


def managed_parameters(runtime: Runtime) -> dict[str, nn.Parameter]:
    """Return the parameters that an engine shards, by name."""
    return {
        member.name: member.parameter for segment in runtime.segments for member in segment.members
    }


@dataclass(frozen=True, slots=True)
class Slot:
    """One place of a model that holds a managed parameter."""

    module: nn.Module
    key: str
    parameter: nn.Parameter

    @property
    def found(self) -> nn.Parameter | None:
        """What is in the place now."""
        return self.module._parameters.get(self.key)


def find_slots(model: nn.Module, runtime: Runtime) -> list[Slot]:
    """Return every place of a model that holds a managed parameter; tied ones have several."""
    managed = {id(parameter) for parameter in managed_parameters(runtime).values()}
    return [
        Slot(module, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in managed
    ]


def adopt_replaced(slots: Sequence[Slot]) -> None:
    """Take over the values of plain parameters that were put where managed ones belong.

    `load_state_dict(assign=True)` and `module.weight = nn.Parameter(...)` do that. The managed
    object goes back to its places, so optimizers and hooks go on; a collective if it happens.
    What `torch.func.functional_call` puts there is for one call, and is left to it.

    Raises:
        RuntimeError: if shape or type differ, or a tied parameter was replaced in one place only.
    """
    replaced: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.found is not slot.parameter and isinstance(slot.found, nn.Parameter):
            replaced.setdefault(id(slot.parameter), []).append(slot)
    if replaced and _is_functional_call():
        return
    for places in replaced.values():
        parameter = places[0].parameter
        reference = reference_of(parameter)
        new = [slot.found for slot in places if slot.found is not None]
        if reference is None or any(reference_of(each) is not None for each in new):
            continue  # another managed parameter: `check_model` says what left the model
        name, first = reference.name, new[0]
        if len(places) < sum(slot.parameter is parameter for slot in slots) or any(
            not torch.equal(first, other) for other in new[1:]
        ):
            raise RuntimeError(
                f"parameter {name} is tied, and was replaced in some of its places, or by different"
                " values; untie parameters before zero.initialize"
            )
        if any(each.shape != parameter.shape or each.dtype != parameter.dtype for each in new):
            raise RuntimeError(
                f"parameter {name} ({parameter.dtype}, shape {tuple(parameter.shape)}) was replaced"
                f" by one of {first.dtype}, shape {tuple(first.shape)}; use"
                " zero.resize_parameter to change a shape"
            )
        reference.source.communicator.join(f"replacing parameter {name}")
        reference.source.write(first.detach().clone())
        for slot in places:
            slot.module._parameters[slot.key] = parameter


def _is_functional_call() -> bool:
    """Tell whether this is inside of `torch.func.functional_call`."""
    frame: FrameType | None = sys._getframe(1)
    code = torch.nn.utils.stateless._functional_call.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def check_model(model: nn.Module, managed: Mapping[int, str], runtime: Runtime) -> None:
    """Refuse parameters that were replaced, added, unfrozen, or given gradients from outside.

    Args:
        model: the model that the engine trains.
        managed: names of the managed parameters by the id of the object.
        runtime: the units that hold them.

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
    for segment in runtime.segments:
        for member in segment.members:
            _require_source(member, runtime)
            if member.parameter.requires_grad and not member.is_trainable_at_start:
                raise RuntimeError(
                    f"parameter {member.name} was unfrozen while gradients were accumulated, and"
                    " has none of this window; freeze and unfreeze between steps, before a forward"
                )
            if raw_gradient(member.parameter) is not None and not runtime.is_shown(segment.index):
                raise RuntimeError(
                    f"parameter {member.name} has a .grad that did not come from a backward of"
                    " this engine and would be ignored; gradients live in the engine's shards:"
                    " clip with gradient_clipping in the configuration"
                )


def refuse_set_gradients(runtime: Runtime) -> None:
    """Refuse gradients at parameters that rest in place where the engine has them elsewhere.

    Raises:
        RuntimeError: naming the parameter and what to call.
    """
    for segment in runtime.segments:
        if not (segment.is_in_place and segment.spec.trainable) or runtime.is_shown(segment.index):
            continue
        for member in segment.members:
            if raw_gradient(member.parameter) is not None:
                raise RuntimeError(
                    f"parameter {member.name} has a .grad that did not come from the engine, and no"
                    " step would use it; set it to None, and set gradients with"
                    " zero.safe_set_full_grad(parameter, value) after the backward"
                )


def refuse_loss(loss: object, *, has_gradient: bool) -> None:
    """Refuse what no backward can begin at, while the accumulation window is still whole.

    Raises:
        TypeError: if it is no tensor.
        RuntimeError: if it leads to no parameter, or has several elements and no gradient is given.
    """
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"engine.backward takes the loss, a tensor of one element, got {type(loss).__name__}"
            f" {loss!r:.40}; pass what the forward returned, not its item()"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss does not require a gradient, so it leads to no parameter: it was made under"
            " no_grad, detached, or from something else than what the model returned"
        )
    if loss.numel() != 1 and not has_gradient:
        raise RuntimeError(
            f"the loss has shape {tuple(loss.shape)}, and a backward begins at one element; take"
            " its mean or sum, or pass gradient="
        )


def refuse_gradients_without_backward(runtime: Runtime) -> None:
    """Refuse a step for gradients that no backward has brought, as it would do nothing.

    Raises:
        RuntimeError: naming the parameter and what to call.
    """
    for segment in runtime.segments:
        if not runtime.is_shown(segment.index):
            continue
        for member in segment.members:
            if raw_gradient(member.parameter) is not None:
                raise RuntimeError(
                    f"parameter {member.name} has a .grad, but no backward of this accumulation"
                    " window has ended, so engine.step() would not use it; run one backward, and"
                    " set gradients after it"
                )


def _require_source(member: ManagedParameter, runtime: Runtime) -> None:
    """Refuse a parameter to train whose values rest anywhere but in the store of this engine."""
    reference = reference_of(member.parameter)
    source = reference.source if reference is not None else None
    if not member.parameter.requires_grad or (
        isinstance(source, StoreSource) and source.owner() is runtime
    ):
        return
    raise RuntimeError(
        f"the values of parameter {member.name} are not in the store of this engine (another engine"
        " may have taken the model over), so it would not be trained; use one engine a model, and"
        " make a new one with zero.initialize"
    )
