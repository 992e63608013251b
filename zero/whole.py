"""Optimizers that need whole tensors: each parameter is updated by one rank, its owner.

[Note: whole optimizers] Adafactor's factors, LAMB's norms and Muon's orthogonal steps depend on a
whole tensor. So in a step each parameter's fp32 master and gradient are gathered, one parameter at
a time; the owner runs the optimizer's own step on them, on the host; the new master goes back to
the shards of all ranks. What the optimizer keeps of a parameter stays with its owner, as torch made
it, in host memory: it is of any shape, so it has no place in a record. Its bytes, found by a trial
for each shape, are part of the plan. A parameter keeps its owner for as long as the engine lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from estimators import GenericRule
from offload import Field
from offload.ledger import Activity
from zero.errors import ConfigError
from zero.generic import bare_copy, refuse_side_effects, run_step
from zero.parameter import reference_of
from zero.runtime import Runtime
from zero.source import ShardSource
from zero.units import ManagedParameter

_NAMES = frozenset({"adafactor", "lamb", "muon"})
_TRIAL_STEPS = 2


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer says, or is known, to see each parameter as a whole."""
    kind = type(optimizer)
    return bool(getattr(kind, "needs_whole_tensors", kind.__name__.lower() in _NAMES))


class WholeOptimizer:
    """An optimizer object that is run on whole parameters, and the state that this rank owns."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.name = type(optimizer).__name__
        self.rule = GenericRule(0)
        self.states: Mapping[str, Field] = {}
        self.defaults = dict(optimizer.defaults)
        self.kept: dict[int, dict[str, Any]] = {}
        """State by id of the parameter, of those that this rank owns."""
        self.owners: dict[int, int] = {}
        self._worker = bare_copy(optimizer)
        self._sizes: dict[tuple[int, torch.Size], int] = {}

    def assign(
        self,
        members: Sequence[ManagedParameter],
        groups: Sequence[Mapping[str, Any]],
        world_size: int,
    ) -> int:
        """Give every parameter an owner, and return the bytes that the fullest rank needs.

        Owners are balanced by elements. The bytes are those of the state, and of the master and
        the gradient of the largest parameter.

        Raises:
            ConfigError: if the optimizer cannot run on a parameter.
        """
        index_of = {id(each): i for i, group in enumerate(groups) for each in group["params"]}
        trained = [each for each in members if id(each.parameter) in index_of]
        loads, sizes = [0] * world_size, [0] * world_size
        # Those that have an owner come first.
        for each in sorted(
            trained, key=lambda m: (id(m.parameter) not in self.owners, -m.parameter.numel())
        ):
            key, numel = id(each.parameter), each.parameter.numel()
            owner = self.owners.setdefault(key, loads.index(min(loads)))
            loads[owner] += numel
            index = index_of[key]
            sizes[owner] += self._state_bytes(index, groups[index], each) if numel else 0
        largest = max((each.parameter.numel() for each in trained), default=0)
        return max(sizes) + 2 * 4 * largest

    def step(self, key: int, group: Mapping[str, Any], master: Tensor, gradient: Tensor) -> None:
        """Update a master that this rank owns, in place."""
        self.kept[key] = run_step(self._worker, group, (master, gradient), self.kept.get(key, {}))

    def _state_bytes(self, index: int, group: Mapping[str, Any], member: ManagedParameter) -> int:
        """Return what is kept of a parameter, found by running on another of its shape."""
        shape = member.parameter.shape
        if (index, shape) not in self._sizes:
            state: dict[str, Any] = {}
            master = torch.ones(shape)
            try:
                for _ in range(_TRIAL_STEPS):
                    before = dict(vars(self._worker))
                    state = run_step(self._worker, group, (master, torch.ones(shape)), state)
                    refuse_side_effects(self._worker, group, before)
            except Exception as error:
                raise ConfigError(
                    f"optimizer {self.name} cannot run on {member.name} of shape {tuple(shape)}:"
                    f" {type(error).__name__}: {error}"
                ) from error
            tensors = [each for each in state.values() if isinstance(each, Tensor)]
            self._sizes[index, shape] = sum(each.nbytes for each in tensors)
        return self._sizes[index, shape]


def describe_whole(update: object, names: Mapping[int, str]) -> list[list[Any]]:
    """Return name and state of what this rank owns."""
    kept = update.kept if isinstance(update, WholeOptimizer) else {}
    return [[names[key], state] for key, state in kept.items() if key in names]


def update_whole(
    runtime: Runtime,
    whole: WholeOptimizer,
    groups: Sequence[Mapping[str, Any]],
    grad_scale: float,
) -> None:
    """Update all trained parameters and drop the gradients; a collective.

    Whatever is raised midway fails the store: some parameters are a step ahead of others.
    """
    store = runtime.store
    store.require_intact()
    group_of = {id(each): group for group in groups for each in group["params"]}
    moved: list[str] = []
    try:
        for segment in runtime.segments:
            if not segment.spec.trainable:
                continue
            for member in segment.members:
                reference = reference_of(member.parameter)
                if reference is None or not member.parameter.numel():
                    continue
                key = id(member.parameter)
                _update_one(runtime, reference.source, whole, (key, group_of[key]), grad_scale)
                moved.append(member.name)
            segment.forget_values()
    except BaseException as error:
        store.device.settle()
        store.fail(
            f"an optimizer step failed midway ({type(error).__name__}); parameters already moved:"
            f" {', '.join(moved) or 'none'}"
        )
        raise
    store.drop_gradients()


def _update_one(
    runtime: Runtime,
    source: ShardSource,
    whole: WholeOptimizer,
    chosen: tuple[int, Mapping[str, Any]],
    grad_scale: float,
) -> None:
    key, group = chosen
    owner = whole.owners[key]
    master = source.read(Field.MASTER)
    gradient = source.read(Field.GRADIENT) if source.has(Field.GRADIENT) else None
    if owner == runtime.communicator.rank:
        wide = torch.zeros(source.shape) if gradient is None else gradient.cpu().float()
        wide.mul_(grad_scale)
        with runtime.store.ledger.timing(Activity.UPDATE):
            host = master.cpu()
            whole.step(key, group, host, wide)
            master.copy_(host)
    source.write(master, Field.MASTER, owner)
