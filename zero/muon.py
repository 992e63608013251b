"""Muon by name: matrices by torch's Muon, all else by torch's AdamW, as the field does it.

Embeddings and the output layer are matrices that are looked up or compared row by row, so they go
to AdamW as well; `use_muon` of a parameter, true or false, decides before its shape and name do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zero.errors import ConfigError

DEFAULTS: Mapping[str, Any] = {
    "lr": 1e-3,
    "muon_lr": None,
    "adam_lr": None,
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "weight_decay": 0.0,
    "betas": (0.9, 0.95),
    "eps": 1e-10,
}
"""The hyper-parameters, and their values if they are not given."""

_MUON = ("momentum", "nesterov", "ns_steps")
_ADAMW = ("betas", "eps")
_OTHERS = ("embed", "lm_head")
"""What names of matrices say that are not Muon's."""


class Muon(torch.optim.Optimizer):
    """Updates each group by torch's Muon or AdamW, as its `use_muon` says."""

    needs_whole_tensors = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        if closure is not None:
            raise TypeError("Muon takes no closure")
        for group in self.param_groups:
            given = [each for each in group["params"] if each.grad is not None]
            if not given:
                continue
            options = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            own = _MUON if group["use_muon"] else _ADAMW
            options.update({name: group[name] for name in own})
            kind = torch.optim.Muon if group["use_muon"] else torch.optim.AdamW
            inner = kind(given, **options)
            inner.state.update({each: self.state[each] for each in given if self.state[each]})
            inner.step()  # type: ignore[no-untyped-call]
            self.state.update({each: inner.state[each] for each in given})


def make_muon(
    names: Mapping[int, str], given: Iterable[Any], parameters: Mapping[str, Any]
) -> Muon:
    """Return the optimizer of a configuration.

    Args:
        names: the names of parameters, by id.
        given: parameters, or groups of them with hyper-parameters of their own.
        parameters: `optimizer.params`.

    Raises:
        ConfigError: if a hyper-parameter is unknown, or torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"optimizer.type 'Muon' needs torch.optim.Muon, and torch {torch.__version__} has none;"
            " install torch 2.9 or newer"
        )
    unknown = set(parameters) - set(DEFAULTS)
    if unknown:
        raise ConfigError(
            f"optimizer.params {sorted(unknown)} cannot be used with Muon here; known are"
            f" {sorted(DEFAULTS)}"
        )
    for key in ("lr", "muon_lr", "adam_lr"):
        rate = parameters.get(key)
        if rate is not None and not (isinstance(rate, int | float) and rate >= 0):
            raise ConfigError(
                f"optimizer.params.{key}: must be a finite number of at least 0, got {rate!r}"
            )
    groups: list[dict[str, Any]] = []
    for each in given:
        group = each if isinstance(each, dict) else {"params": [each]}
        options = {**DEFAULTS, **parameters, **group}
        members = options.pop("params")
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        # As torch's optimizers do, it takes pairs of name and parameter.
        members = [one[1] if isinstance(one, tuple) else one for one in members]
        rates = {True: options.pop("muon_lr"), False: options.pop("adam_lr")}
        for use_muon, rate in rates.items():
            chosen = [p for p in members if _is_muons(p, names.get(id(p), "")) is use_muon]
            if chosen:
                lr = options["lr"] if rate is None else rate
                _add(groups, {**options, "lr": lr, "use_muon": use_muon}, chosen)
    if not groups:
        raise ConfigError(
            "no parameter of the model requires a gradient: unfreeze some, or leave out the"
            " optimizer"
        )
    return Muon(groups, {})


def _add(
    groups: list[dict[str, Any]], options: dict[str, Any], members: list[torch.Tensor]
) -> None:
    """Put parameters into the group that has these options, or into a new one."""
    for group in groups:
        if {name: value for name, value in group.items() if name != "params"} == options:
            group["params"] += members
            return
    groups.append({**options, "params": members})


def _is_muons(parameter: torch.Tensor, name: str) -> bool:
    is_hidden = parameter.dim() == 2 and not any(each in name.lower() for each in _OTHERS)
    return bool(getattr(parameter, "use_muon", is_hidden))
