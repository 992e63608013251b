"""Optimizer state of one parameter, under the names that the optimizer has for it.

What is kept of each element is a field of the shards. What an optimizer of whole tensors keeps is
with the owner of the parameter: reading it in full sends it to all ranks, setting it changes it
there. The `local` forms see it on the owner alone; on other ranks it has no elements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from estimators import UpdateRule
from offload import Field
from zero.errors import ShardedAccessError
from zero.generic import GenericOptimizer, is_number
from zero.source import ShardSource, StoreSource
from zero.update_rules import MOMENTS, FusedOptimizer
from zero.whole import WholeOptimizer

_MASTER = {"fp32_param": Field.MASTER}
"""A name that is always known."""

_TORCH_NAMES: Mapping[UpdateRule, Mapping[str, Field]] = {
    UpdateRule.SGD: {"momentum_buffer": Field.EXP_AVG},
    UpdateRule.ADAGRAD: {"sum": Field.EXP_AVG_SQ},
}
"""What torch calls the fields of optimizers that have a kernel, where its name is another."""


def find_state(source: ShardSource, key: str) -> Field | OwnedState:
    """Return where the state of a name is.

    Raises:
        KeyError: naming the states that there are.
    """
    if not isinstance(source, StoreSource):
        return _field(source, key, {**MOMENTS, **_MASTER})
    update = source.runtime.update
    if not isinstance(update, WholeOptimizer):
        known = {**source.runtime.states, **_MASTER}
        if isinstance(update, FusedOptimizer):
            known.update(_TORCH_NAMES.get(update.rule, {}))
        if isinstance(update, GenericOptimizer) and key in {n for g in update.beside for n in g}:
            raise KeyError(
                f"optimizer state {key!r} of {update.name} is one number for all parameters of a"
                f" group, not of {source.name} alone; of each parameter there are {sorted(known)}"
            )
        return _field(source, key, known)
    state = OwnedState(source, update, key)
    # What is not trained has no state, by whatever name.
    names = {*(state.names() if source.is_trained else update.names()), *_MASTER}
    return _MASTER.get(key, state) if key in names else _field(source, key, {}, names)


def find_kept_state(source: ShardSource, key: str) -> Field | OwnedState | None:
    """Return where the state of a name is, or None for a moment that the optimizer does not keep.

    Programs ask for `exp_avg` and `exp_avg_sq` whatever the optimizer is.

    Raises:
        KeyError: naming the states that there are, if it is neither.
    """
    try:
        return find_state(source, key)
    except KeyError:
        if key in MOMENTS:
            return None
        raise


def _field(
    source: ShardSource, key: str, fields: Mapping[str, Field], names: set[str] | None = None
) -> Field:
    if key not in fields:
        raise KeyError(
            f"optimizer state {key!r} is not kept of parameter {source.name}; there are"
            f" {sorted(names if names is not None else fields)}"
        )
    return fields[key]


@dataclass(frozen=True, slots=True)
class OwnedState:
    """One tensor, or number, that an optimizer of whole tensors keeps of a parameter."""

    source: StoreSource
    whole: WholeOptimizer
    name: str

    @property
    def _key(self) -> int:
        return id(self.source.segment.members[self.source.position].parameter)

    @property
    def _is_owner(self) -> bool:
        return self.whole.owns(self._key)

    def names(self) -> set[str]:
        """Return the names of all that is kept of the parameter."""
        kept = self.whole.kept(self._key)
        return {*(form[0] for form in kept.forms), *kept.numbers}

    def get_full(self) -> Tensor | None:
        """Return a private copy, or None if there is none yet; a collective."""
        self.source.communicator.join(f"reading {self.name} of {self.source.name}")
        if not self.source.is_trained:
            return None
        found = self._own()
        owner, form = self._form(found)
        if form is None:
            return None
        if found is None:
            found = torch.empty(form[1], dtype=getattr(torch, form[0]), device="cpu")
        self.source.communicator.broadcast(found, owner)
        return found.to(self.source.device)

    def get_local(self) -> Tensor | None:
        """Return a private copy, flat, or None if there is none yet; empty if another rank owns it.

        No collective.
        """
        if not self.source.is_trained:
            return None
        if not self._is_owner:
            types = {form[0]: form[1] for form in self.whole.kept(self._key).forms}
            return torch.empty(0, dtype=types.get(self.name, torch.float32), device="cpu")
        found = self._own()
        return None if found is None else found.reshape(-1).to(self.source.device)

    def set_full(self, value: Tensor) -> None:
        """Set it to values that all ranks have; a collective.

        Raises:
            ShardedAccessError: if there is none yet.
            ValueError: if the shape is another.
        """
        self._require_trained()
        self.source.communicator.join(f"setting {self.name} of {self.source.name}")
        _, form = self._form(self._own())
        self._check(None if form is None else tuple(form[1]), tuple(value.shape))
        self._put(value)

    def set_local(self, value: Tensor) -> None:
        """Set it on the owner; others give no elements.

        Raises:
            ShardedAccessError: if there is none yet.
            ValueError: if there are more elements, or fewer.
        """
        self._require_trained()
        if not self._is_owner:
            self._check((0,), (value.numel(),))
            return
        own = self._own()
        self._check(None if own is None else (own.numel(),), (value.numel(),))
        self._put(value)

    def _own(self) -> Tensor | None:
        """Return a copy of what this rank owns, None if that is nothing."""
        found = self.whole.state_of(self._key).get(self.name) if self._is_owner else None
        if isinstance(found, Tensor):
            return found.detach().clone().contiguous()
        if not is_number(found):
            return None
        dtype = torch.float32 if isinstance(found, float) else None
        return torch.tensor(found, dtype=dtype, device="cpu")

    def _form(self, own: Tensor | None) -> tuple[int, Any]:
        """Return the owner, and type and shape of what it has; a collective."""
        said = [str(own.dtype).removeprefix("torch."), list(own.shape)] if own is not None else None
        texts = self.source.communicator.gather_texts(json.dumps(said))
        owner = self.whole.owners[self._key]
        return owner, json.loads(texts[owner])

    def _require_trained(self) -> None:
        if not self.source.is_trained:
            raise ShardedAccessError(
                f"parameter {self.source.name} has no {self.name}: it is frozen, or none of the"
                " optimizer's"
            )

    def _check(self, wanted: tuple[int, ...] | None, given: tuple[int, ...]) -> None:
        if wanted is None:
            raise ShardedAccessError(
                f"parameter {self.source.name} has no {self.name} yet: {self.whole.name} makes its"
                " state in its first step; set it after that"
            )
        if wanted != given:
            raise ValueError(
                f"{self.name} of parameter {self.source.name} has shape {wanted}, the one given"
                f" has {given}"
            )

    def _put(self, value: Tensor) -> None:
        if not self._is_owner:
            return
        state = self.whole.state_of(self._key)
        old = state[self.name]
        if isinstance(old, Tensor):
            old.detach().copy_(value.detach().reshape(old.shape))
        else:
            state[self.name] = type(old)(value.item())
        self.whole.keep(self._key, state)
        self.whole.records.settle()
