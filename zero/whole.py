"""Optimizers that need whole tensors: each parameter is updated by one rank, its owner.

[Note: whole optimizers] Adafactor's factors, LAMB's norms and Muon's orthogonal steps depend on a
whole tensor. So in a step each parameter's fp32 master and gradient are gathered, one parameter at
a time; the owner runs the optimizer's own step on them, on the host; the new master goes back to
the shards of all ranks. What the optimizer keeps of a parameter stays with its owner: tensors of
any shape in a record of their own, in memory or on NVMe [Note: whole records], other values here.
Their bytes, found by a trial for each shape, are part of the plan. A parameter keeps its owner for
as long as the engine lives.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from estimators import GenericRule, WholeTensors, align_up
from offload import Field
from offload.ledger import Activity
from offload.spool import Spool, SpooledArray
from offload.step import moved_text
from offload.whole_records import Form, WholeRecords
from zero.generic import bare_copy, run_step
from zero.parameter import reference_of
from zero.plain import NotPlainError, from_plain, to_plain
from zero.runtime import Runtime
from zero.source import ShardSource
from zero.units import ManagedParameter
from zero.whole_resize import Recut, recut_state
from zero.whole_trial import Kept, Trials

_NAMES = frozenset({"adafactor", "lamb", "muon"})
_SECTOR_BYTES = 4096


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer says, or is known, to see each parameter as a whole."""
    kind = type(optimizer)
    return bool(getattr(kind, "needs_whole_tensors", kind.__name__.lower() in _NAMES))


State = dict[str, Any]

Waiting = dict[int, tuple[dict[str, Any], list[tuple[Form, SpooledArray]]]]
"""By id of the parameter: the values, and the tensors, of a record that no store holds."""


class WholeOptimizer:
    """An optimizer object that is run on whole parameters, and the state that this rank owns."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.name = type(optimizer).__name__
        self.rule = GenericRule(0)
        self.states: Mapping[str, Field] = {}
        self.defaults = dict(optimizer.defaults)
        self.owners: dict[int, int] = {}
        self._worker = bare_copy(optimizer)
        self._trials = Trials(self._worker)
        self._kept: dict[int, Kept] = {}
        """What a trial found, by id of the parameter."""
        self._planned: dict[int, Kept] = {}
        """The same for the plan that was made last, which may not have come about."""
        self._names: dict[int, str] = {}
        """Names of the records that this rank owns, by id of the parameter, in order."""
        self._records: WholeRecords | None = None
        self._values: dict[int, dict[str, Any]] = {}
        """What is kept beside tensors, by id of the parameter."""

    @property
    def records(self) -> WholeRecords:
        """The records of the store that is in use."""
        if self._records is None:
            raise RuntimeError(f"{self.name} has no store yet")
        return self._records

    def assign(
        self,
        members: Sequence[ManagedParameter],
        groups: Sequence[Mapping[str, Any]],
        world_size: int,
        shapes: Mapping[int, torch.Size] | None = None,
    ) -> WholeTensors:
        """Give every parameter an owner, and return what the fullest rank needs.

        Owners are balanced by elements. `shapes` are those of parameters that are about to be
        resized, by id.

        Raises:
            ConfigError: if the optimizer cannot run on a parameter.
        """
        index_of = {id(each): i for i, group in enumerate(groups) for each in group["params"]}
        trained = [
            (
                each.name,
                id(each.parameter),
                (shapes or {}).get(id(each.parameter), each.parameter.shape),
            )
            for each in members
            if id(each.parameter) in index_of
        ]
        loads, sizes = [0] * world_size, [0] * world_size
        self._planned = {}
        # Those that have an owner come first.
        for name, key, shape in sorted(
            trained, key=lambda each: (each[1] not in self.owners, -each[2].numel())
        ):
            owner = self.owners.setdefault(key, loads.index(min(loads)))
            loads[owner] += shape.numel()
            if shape.numel():
                index = index_of[key]
                self._planned[key] = self._trials.kept(index, groups[index], name, shape)
                sizes[owner] += _record_bytes(self._planned[key])
        largest = max((shape.numel() for _, _, shape in trained), default=0)
        record = max(map(_record_bytes, self._planned.values()), default=0)
        return WholeTensors(2 * 4 * largest, record, max(sizes))

    def attach(self, records: WholeRecords, members: Sequence[ManagedParameter], rank: int) -> None:
        """Keep state in the records of a new store, which are empty, from now on."""
        self._records, self._names, self._values = records, {}, {}
        self._kept = self._planned
        names = {id(each.parameter): each.name for each in members}
        for key, owner in self.owners.items():
            if owner == rank and key in self._kept and key in names:
                self._names[key] = f"{names[key]} (whole)"
                records.admit(self._names[key], _record_bytes(self._kept[key]))

    def kept(self, key: int) -> Kept:
        """Return what is kept of a parameter, on whatever rank, once it has had a step."""
        return self._kept.get(key, Kept(1, (), ()))

    def names(self) -> set[str]:
        """Return the names of all state that there may be, of any parameter."""
        found = {form[0] for each in self._kept.values() for form in each.forms}
        return found.union(*(each.numbers for each in self._kept.values()))

    def owns(self, key: int) -> bool:
        """Tell whether this rank keeps the state of a parameter."""
        return key in self._names

    def start_reading(self, key: int) -> None:
        """Begin to read what this rank owns of a parameter."""
        if key in self._names:
            self.records.start_reading(self._names[key])

    def step(self, key: int, group: Mapping[str, Any], master: Tensor, gradient: Tensor) -> None:
        """Update a master that this rank owns, in place."""
        self.keep(key, run_step(self._worker, group, (master, gradient), self.state_of(key)))

    def state_of(self, key: int) -> State:
        """Return what is kept of a parameter, which the caller may change and then keeps."""
        if key not in self._names:
            return {}
        return {**self._values.get(key, {}), **self.records.take(self._names[key])}

    def keep(self, key: int, state: Mapping[str, Any]) -> None:
        """Keep the state of a parameter that this rank owns."""
        if key not in self._names:
            if state:
                raise RuntimeError(f"{self.name} kept nothing of this parameter when it was tried")
            return
        tensors = {name: each for name, each in state.items() if isinstance(each, Tensor)}
        self._values[key] = {name: each for name, each in state.items() if name not in tensors}
        self.records.put(self._names[key], tensors)

    def recall(self, key: int, values: dict[str, Any], forms: Sequence[Form]) -> None:
        """Take what a commit says of a record, whose bytes are there."""
        self._values[key] = values
        self.records.recall(self._names[key], tuple(forms))

    def forget(self) -> None:
        """Let no parameter have state."""
        self._values = {}
        for name in self._names.values():
            self.records.recall(name, ())

    def recut(
        self, key: int, state: State, name: str, shapes: tuple[torch.Size, torch.Size]
    ) -> State:
        """Return the state of a parameter for the new one of two shapes, as the last plan has it.

        Raises:
            ValueError: naming what cannot be cut.
        """
        if key not in self._planned:  # no elements are left
            return {}
        return recut_state(self._worker, state, Recut(name, *shapes, self._planned[key]))

    @property
    def owned_bytes(self) -> int:
        """Bytes of the records that this rank owns, full or not."""
        return sum(_record_bytes(self._kept[key]) for key in self._names)

    def owned(self) -> dict[int, tuple[dict[str, Any], tuple[Form, ...]]]:
        """Return the values, and the forms of tensors, of what has state, by id."""
        found = {}
        for key, name in self._names.items():
            values, forms = self._values.get(key, {}), self.records.forms(name)
            if values or forms:
                found[key] = (values, forms)
        return found


def _record_bytes(kept: Kept) -> int:
    return align_up(kept.size_bytes, _SECTOR_BYTES)


Reshaped = tuple[int, str, torch.Size, torch.Size]
"""Id and name of a parameter, its old shape and its new one."""


def leave_whole(update: object, spool: Spool, reshaped: Reshaped | None = None) -> Waiting:
    """Return copies of all state, to be adopted once there is another store.

    Raises:
        ValueError: if the state of the parameter that gets another shape cannot be cut.
    """
    waiting: Waiting = {}
    if not isinstance(update, WholeOptimizer):
        return waiting
    for key in update.owned():
        state = update.state_of(key)
        if reshaped is not None and reshaped[0] == key:
            state = update.recut(key, state, reshaped[1], reshaped[2:])
        values = {name: each for name, each in state.items() if not isinstance(each, Tensor)}
        arrays = [
            ((name, each.dtype, tuple(each.shape)), spool.put(each.detach().reshape(-1)))
            for name, each in state.items()
            if isinstance(each, Tensor)
        ]
        waiting[key] = (values, arrays)
    return waiting


def adopt_whole(update: object, waiting: Waiting) -> None:
    """Keep what another store had."""
    for key, (values, arrays) in waiting.items():
        if isinstance(update, WholeOptimizer) and update.owns(key):
            tensors = {form[0]: array.read().view(form[2]) for form, array in arrays}
            update.keep(key, {**values, **tensors})


def describe_whole(
    update: object, names: Mapping[int, str]
) -> tuple[list[list[Any]], dict[str, LateTensor]]:
    """Return name and state of what this rank owns as plain data, and its tensors, not read yet."""
    found: list[list[Any]] = []
    tensors: dict[str, LateTensor] = {}
    if not isinstance(update, WholeOptimizer):
        return found, tensors
    for key, (values, forms) in update.owned().items():
        if key not in names:
            continue
        inside: dict[str, Tensor] = {}
        plain = {name: to_plain(each, name, inside) for name, each in values.items()}
        if inside:
            raise NotPlainError(
                f"the state of {names[key]} holds tensors inside of a container; keep tensors by"
                " names of their own"
            )
        for form in forms:
            late = LateTensor(update, key, form)
            tensors[f"whole/{names[key]}/{form[0]}"] = late
            plain[form[0]] = {"$tensor": f"whole/{names[key]}/{form[0]}"}
        described = [[name, _dtype_name(dtype), list(shape)] for name, dtype, shape in forms]
        found.append([names[key], plain, described])
    return found, tensors


def recall_whole(
    update: object, described: Sequence[Sequence[Any]], keys: Mapping[str, int]
) -> None:
    """Take what a commit says of the records, whose bytes are where they were; `keys` by name."""
    if not isinstance(update, WholeOptimizer):
        return
    for name, plain, forms in described:
        inside = {form[0] for form in forms}
        values = {key: from_plain(each, {}) for key, each in plain.items() if key not in inside}
        found = [(key, getattr(torch, dtype), tuple(shape)) for key, dtype, shape in forms]
        update.recall(keys[name], values, found)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class LateTensor:
    """A tensor of a record, read when it is asked for."""

    update: WholeOptimizer
    key: int
    form: Form

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""
        return self.form[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.form[2]

    def read(self) -> Tensor:
        """Return it, until another record is read."""
        found: Tensor = self.update.state_of(self.key)[self.form[0]]
        return found


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
    order = [
        id(member.parameter)
        for segment in runtime.segments
        if segment.spec.trainable
        for member in segment.members
    ]
    following = dict(itertools.pairwise(key for key in order if whole.owns(key)))
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
                whole.start_reading(key)
                _update_one(runtime, reference.source, whole, (key, group_of[key]), grad_scale)
                if key in following:
                    whole.start_reading(following[key])
                moved.append(member.name)
            segment.forget_values()
        whole.records.settle()
    except BaseException as error:
        store.device.settle()
        store.fail(
            f"an optimizer step failed midway ({type(error).__name__}); parameters already moved:"
            f" {moved_text(moved, len(order))}"
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
        wide = (
            torch.zeros(source.shape, dtype=torch.float32, device="cpu")
            if gradient is None
            else gradient.cpu().float()
        )
        wide.mul_(grad_scale)
        with runtime.store.ledger.timing(Activity.UPDATE):
            host = master.cpu()
            whole.step(key, group, host, wide)
            master.copy_(host)
    source.write(master, Field.MASTER, owner)
