"""What an optimizer without a kernel carries from step to step beside its tensors, by parameter.

[Note: carried] A step count, a product of factors: one value for all elements that one parameter
group began with at one step. A rank knows it only of groups that it has elements of, so wherever
shards are cut anew it is put together from all ranks. On its way it is plain data beside the names
of its parameters, since groups may change as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zero.errors import CheckpointError
from zero.generic import GenericOptimizer
from zero.optimizer import UpdateGroup, ZeroOptimizer
from zero.plain import NotPlainError, from_plain, to_plain
from zero.update_rules import FusedOptimizer

if TYPE_CHECKING:
    from zero.replan import History
    from zero.runtime import Runtime

Data = Mapping[str, Any]
"""Of one parameter: "steps" that it has had, and "values" by name, encoded."""

Key = tuple[int, int]
"""Index and birth of an update group."""


def describe_carried(
    optimizer: ZeroOptimizer | None,
    groups: Sequence[UpdateGroup],
    runtime: Runtime,
    history: History,
) -> list[dict[str, Any]]:
    """Return what this rank knows, with the names of the parameters; no collective.

    Raises:
        NotPlainError: naming what cannot be written without pickle.
    """
    if optimizer is None or not isinstance(optimizer.fused, GenericOptimizer):
        return []
    names: dict[int, str] = {}
    frozen: dict[int, str] = {}
    for segment in runtime.segments:
        for member in segment.members:
            chosen = names if segment.spec.trainable else frozen
            chosen[id(member.parameter)] = member.name
    found = []
    for group in groups:
        steps, values = optimizer.fused.carried.get((group.index, group.birth), (0, {}))
        own = [names[id(each)] for each in group.parameters if id(each) in names]
        if steps and own:
            found.append({"names": own, "steps": steps, "values": _encode(values)})
    for key, moments in history.dormant.items():
        if moments.carried is not None and key in frozen:
            found.append({"names": [frozen[key]], **moments.carried})
    return found


def gather_carried(
    optimizer: ZeroOptimizer,
    groups: Sequence[UpdateGroup],
    runtime: Runtime,
    history: History,
) -> dict[int, Data]:
    """Return what all ranks know, by id of the parameter; a collective."""
    own = describe_carried(optimizer, groups, runtime, history)
    if not isinstance(optimizer.fused, GenericOptimizer):
        return {}
    texts = runtime.communicator.gather_texts(json.dumps(own))
    by_name = join_carried(json.loads(text) for text in texts)
    return saved_carried(runtime, by_name, str)


def join_carried(parts: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, Data]:
    """Return what some ranks said, by name of the parameter."""
    return {
        name: {"steps": int(entry["steps"]), "values": entry["values"]}
        for part in parts
        for entry in part
        for name in entry["names"]
    }


def arrange_carried(
    optimizer: ZeroOptimizer,
    groups: Sequence[UpdateGroup],
    updates: int,
    known: Mapping[int, Data],
) -> dict[Key, Data]:
    """Return what each update group goes on with; nothing has changed yet.

    Raises:
        CheckpointError: if parameters of one group carry different values.
    """
    found: dict[Key, Data] = {}
    if not isinstance(optimizer.fused, GenericOptimizer):
        return found
    for group in groups:
        for parameter in group.parameters:
            data = known.get(id(parameter))
            if data is None or data["steps"] != updates - group.birth:
                continue
            if found.setdefault((group.index, group.birth), data) != data:
                raise CheckpointError(
                    f"param_groups[{group.index}] now has parameters that were in different groups,"
                    f" and {optimizer.fused.name} carries different values from step to step for"
                    " them; keep them in groups of their own"
                )
    return found


def adopt_carried(optimizer: ZeroOptimizer, arranged: Mapping[Key, Data]) -> None:
    """Let an optimizer go on with what was arranged, and with nothing else."""
    if isinstance(optimizer.fused, GenericOptimizer):
        optimizer.fused.carried = {
            key: (data["steps"], _decode(data["values"])) for key, data in arranged.items()
        }


def saved_carried(
    runtime: Runtime, saved: Mapping[str, Data], name_of: Callable[[str], str | None]
) -> dict[int, Data]:
    """Return what was saved, by id of the parameter; `name_of` gives the saved names."""
    return {
        id(member.parameter): saved[name]
        for segment in runtime.segments
        for member in segment.members
        if (name := name_of(member.name)) is not None and name in saved
    }


def other_optimizer(optimizer: ZeroOptimizer | None, state: Mapping[str, Any] | None) -> str | None:
    """Return why an optimizer without a kernel cannot go on from a saved state, or None."""
    if optimizer is None or isinstance(optimizer.fused, FusedOptimizer) or state is None:
        return None
    if state["type"] == optimizer.type_name:
        return None
    return (
        f"was saved with {state['type']}, and {optimizer.type_name}, which has no kernel, cannot go"
        " on from its state"
    )


def moments_go_on(optimizer: ZeroOptimizer | None, saved: Iterable[str]) -> bool:
    """Tell whether the moments that were saved are those that the optimizer keeps.

    A momentum that was saved by itself is no exp_avg whose exp_avg_sq is missing: AdamW would take
    it for one of many steps, and divide it by the root of nothing.
    """
    if optimizer is None or not isinstance(optimizer.fused, FusedOptimizer):
        return True
    return set(saved) == set(optimizer.fused.states)


def _encode(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON data; tensors have one element or none, so they go along."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            plain = to_plain(value.tolist(), name, {})
            found[name] = {
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "tensor": plain,
            }
            continue
        tensors: dict[str, torch.Tensor] = {}
        found[name] = {"value": to_plain(value, name, tensors)}
        if tensors:
            raise NotPlainError(
                f"the optimizer's state {name!r} holds tensors inside of a container; keep tensors"
                " by names of their own"
            )
    return found


def _decode(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (
            torch.tensor(
                from_plain(data["tensor"], {}), dtype=getattr(torch, data["dtype"]), device="cpu"
            ).reshape(data["shape"])
            if "tensor" in data
            else from_plain(data["value"], {})
        )
        for name, data in values.items()
    }
