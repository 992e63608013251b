"""How many updates each parameter of a resumed run has had, where they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero.carried import adopt_carried, arrange_carried, join_carried, saved_carried
from zero.durable.protocol import DurableError
from zero.optimizer import UpdateGroup, update_groups
from zero.run_state import RunState

if TYPE_CHECKING:
    from zero.engine import ZeroEngine


def adopt_births(engine: ZeroEngine, state: RunState, changes: list[str]) -> None:
    """Take over how many updates each parameter has had, where they differ.

    Raises:
        DurableError: if the plan does not tell those parameters apart.
    """
    if engine.optimizer is None:
        return
    names = {name: id(parameter) for name, parameter in engine.module.named_parameters()}
    births = {names[name]: birth for name, birth in state.value("births").items()}
    groups = update_groups(engine.optimizer, births)
    if [_members(each) for each in groups] != [_members(each) for each in engine._groups]:
        raise DurableError(
            "parameters of one group have had different numbers of updates, and the plan does not"
            " tell them apart: load a checkpoint of the run instead"
        )
    engine._history.births, engine._groups = births, groups
    known = saved_carried(
        engine._runtime, join_carried([state.data["optimizer"].get("carried", [])]), str
    )
    updates = engine._history.updates
    adopt_carried(engine.optimizer, arrange_carried(engine.optimizer, groups, updates, known))
    waiting = state.value("waiting")
    if waiting:
        changes.append(
            f"optimizer state of frozen parameters ({', '.join(sorted(waiting)[:8])}) was waiting"
            " for them to be trained again; commits do not keep it, checkpoints do"
        )


def _members(group: UpdateGroup) -> tuple[int, list[int]]:
    return group.index, [id(parameter) for parameter in group.parameters]
