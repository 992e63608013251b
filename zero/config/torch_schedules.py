"""Schedules of torch by name: whether the class exists and takes the arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from zero.config.names import SCHEDULES
from zero.config.values import guess, shown


def torch_schedule_problems(type_name: str, params: Mapping[str, Any]) -> list[str]:
    """Return the errors about a schedule that is not one of the field's own."""
    import torch.optim.lr_scheduler as torch_schedules

    classes = {
        name: value
        for name, value in vars(torch_schedules).items()
        if isinstance(value, type)
        and issubclass(value, torch_schedules.LRScheduler)
        and not name.startswith("_")
        and value is not torch_schedules.LRScheduler
    }
    if type_name not in classes:
        known = (*SCHEDULES, *classes)
        return [
            f"scheduler.type: {shown(type_name)} is not a schedule; "
            f"{guess(type_name, known) or 'use one of ' + ', '.join(SCHEDULES)}"
        ]
    signature = inspect.signature(classes[type_name].__init__)
    accepted = [name for name in signature.parameters if name not in {"self", "optimizer"}]
    problems = [
        f"scheduler.params.{name}: unknown key with the value {shown(value)}; "
        f"{guess(name, accepted) or f'{type_name} takes ' + ', '.join(accepted)}"
        for name, value in params.items()
        if name not in accepted
    ]
    return problems + [
        f"scheduler.params.{name}: is missing; {type_name} needs it"
        for name in accepted
        if signature.parameters[name].default is inspect.Parameter.empty and name not in params
    ]
