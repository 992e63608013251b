"""What torch.distributed.checkpoint calls what is saved."""

from __future__ import annotations

from collections.abc import Mapping

MODEL, OPTIMIZER = "model", "optim"
"""Keys of the nested dictionary that is exported, as in torch's own examples."""
RUN, RUN_VALUE = "tierzero", "run"
RUN_KEY = f"{RUN}.{RUN_VALUE}"
"""Counters, schedule and loss scale, as JSON text."""

_OTHERS: Mapping[str, Mapping[str, str]] = {
    "sgd": {"exp_avg": "momentum_buffer"},
    "adagrad": {"exp_avg_sq": "sum"},
}


def torch_names(optimizer: str) -> Mapping[str, str]:
    """Return what torch's optimizer of a name calls states that have another name here."""
    return _OTHERS.get(optimizer.lower(), {})
