"""Load a checkpoint of torch.distributed.checkpoint into an engine, from any number of ranks.

Each rank reads what its own shards need. Names are found by what they end with, whatever the
nested dictionary was called that was saved: `model.NAME` or `app.model.NAME` for weights,
`optim.state.NAME.exp_avg` for optimizer state, as `get_state_dict` of
`torch.distributed.checkpoint.state_dict` gives it, flattened or not.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from estimators import SubGroup
from offload import Field, has_field
from offload.groups import write_group
from zero.buffers import check_buffers, other_state
from zero.checkpoint.dcp_files import DcpFiles, names_ending
from zero.checkpoint.dcp_names import RUN_KEY, torch_names
from zero.checkpoint.deepspeed import PeerLoading
from zero.checkpoint.manifest import WEIGHT
from zero.errors import CheckpointError
from zero.optimizer import ZeroOptimizer
from zero.parameter import reference_of
from zero.plain import from_plain
from zero.unit import Segment
from zero.update_rules import FusedOptimizer

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

_PART_NUMEL = 1 << 20
"""Elements that are read and written at once."""
_STATE = "state."
_GROUPS = "param_groups"
_STEP = "step"


class DcpCheckpoint:
    """What a DCP checkpoint has of a model and of its optimizer, by the names of the model."""

    def __init__(
        self,
        path: Path,
        names: Sequence[Sequence[str]],
        others: Iterable[str],
        states: Mapping[str, str],
    ) -> None:
        """Open it.

        Args:
            path: the folder.
            names: the names of each parameter, more than one where it is tied.
            others: what the model's `state_dict()` has beside.
            states: what torch calls each state of the optimizer.

        Raises:
            CheckpointError: if it cannot be used; no data were read.
        """
        self.path = path
        self.files = DcpFiles(path)
        self._states = states
        self._families = {name: tuple(each) for each in names for name in each}
        flat = [name for each in names for name in each]
        self._model = self._prefix((*self.files.tensors,), flat, "")
        self._optimizer = self._prefix(
            (*self.files.tensors,), [f"{_STATE}{name}.{_STEP}" for name in flat], "optim."
        )
        self.aliases = {
            alias: first
            for first, *more in names
            for alias in more
            if self._key(WEIGHT, first) in self.files.tensors
            and self._key(WEIGHT, alias) in self.files.tensors
        }
        known = set(others)
        self.shapes = self._shapes(known)
        self.frozen_shapes: dict[str, tuple[int, ...]] = {}
        self.buffers = {
            name: self.files.value(f"{self._model}{name}")
            for name in known
            if f"{self._model}{name}" in {*self.files.tensors, *self.files.values}
        }
        self.param_groups = self._param_groups(flat)
        self.groups: list[dict[str, Any]] = [
            dict.fromkeys(group.pop("params", ())) for group in self.param_groups
        ]
        run = self._run()
        self.model: dict[str, Any] = {
            **run.get("counters", {}),
            "lr_scheduler": run.get("scheduler"),
        }
        self.optimizer: dict[str, Any] = {}
        if run.get("loss_scaler") is not None:
            self.optimizer["loss_scaler"] = SimpleNamespace(**run["loss_scaler"])
            self.optimizer["dynamic_loss_scale"] = bool(run.get("dynamic_loss_scale"))
        self.client_state: dict[str, Any] = {}

    def _shapes(self, others: set[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all that may be parameters, by their names in the model."""
        apart = (f"{self._optimizer}{_STATE}", f"{self._optimizer}{_GROUPS}")
        return {
            key.removeprefix(self._model): tensor.shape
            for key, tensor in self.files.tensors.items()
            if key.startswith(self._model)
            and key.removeprefix(self._model) not in others
            and not key.startswith(apart)
        }

    @property
    def has_run(self) -> bool:
        """Whether counters of the run are in it: what this package exports has them."""
        return RUN_KEY in self.files.values

    def steps_of(self, name: str) -> int:
        """Return the updates that a parameter has had."""
        key = self._state_key(name, _STEP)
        if key in self.files.tensors or key in self.files.values:
            return int(self.files.value(key))
        return 0

    def has(self, name: str, section: str) -> bool:
        """Tell whether a section of a parameter is there."""
        return self._key(section, name) in self.files.tensors

    def read(self, name: str, section: str, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` of a section of a parameter, flat, fp32."""
        return self.files.read(self._key(section, name), start, stop).float()

    def check(self, name: str, section: str, shape: tuple[int, ...]) -> str | None:
        """Return what is wrong with a section that is there, or None."""
        tensor = self.files.tensors.get(self._key(section, name))
        if tensor is None:
            return None
        if tensor.shape != shape:
            return f"{tensor.name} has shape {tensor.shape}, here it is {shape}"
        if not tensor.dtype.is_floating_point:
            return f"{tensor.name} is {tensor.dtype}"
        return None

    def _key(self, section: str, name: str) -> str:
        if section == WEIGHT:
            return f"{self._model}{name}"
        return self._state_key(name, self._states.get(section, section))

    def _state_key(self, name: str, what: str) -> str:
        """Return where state of a parameter is: under the one of its names that has any."""
        keys = [
            f"{self._optimizer}{_STATE}{each}.{what}" for each in self._families.get(name, (name,))
        ]
        return next(
            (key for key in keys if key in self.files.tensors or key in self.files.values), keys[0]
        )

    def _prefix(self, keys: Sequence[str], endings: Sequence[str], usual: str) -> str:
        """Return what comes before the most of the names."""
        votes: collections.Counter[str] = collections.Counter()
        for ending in endings[:64]:
            votes.update(names_ending(iter(keys), ending))
        return max(votes, key=lambda each: (votes[each], -len(each)), default=usual)

    def _param_groups(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each group, with the names of its parameters."""
        prefix = f"{self._optimizer}{_GROUPS}"
        if prefix in self.files.values:
            found = self.files.value(prefix)
            return [dict(group) for group in found]
        groups: dict[int, dict[str, Any]] = {}
        single: dict[str, dict[str, Any]] = {}
        known = set(names)
        for key in (*self.files.values, *self.files.tensors):
            if not key.startswith(f"{prefix}."):
                continue
            rest, _, option = key.removeprefix(f"{prefix}.").rpartition(".")
            if rest in known:
                single.setdefault(rest, {})[option] = self.files.value(key)
            elif rest.isdigit():
                groups.setdefault(int(rest), {})[option] = self.files.value(key)
        if groups:
            return [groups[index] for index in sorted(groups)]
        return _gathered(single)

    def _run(self) -> dict[str, Any]:
        if not self.has_run:
            return {}
        text = self.files.value(RUN_KEY)
        try:
            found = json.loads(text)
            return {key: from_plain(value, {}) for key, value in found.items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{self.path}: {RUN_KEY} cannot be used: {error!r}") from error


def _gathered(single: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of parameters that have the same hyper-parameters, in order."""
    groups: list[dict[str, Any]] = []
    for name, options in single.items():
        for group in groups:
            if {key: each for key, each in group.items() if key != "params"} == options:
                group["params"].append(name)
                break
        else:
            groups.append({**options, "params": [name]})
    return groups


class DcpLoading(PeerLoading):
    """One load, once all that can be known without reading weights was checked."""

    def __init__(self, engine: ZeroEngine, path: Path, *, strict: bool, states: bool) -> None:
        """Open the files and match names and shapes.

        Raises:
            CheckpointError: if a file is damaged or the model is another one; nothing has changed.
        """
        self._engine = engine
        self._states = states
        if states:
            _require_kernel(engine.optimizer, path)
        names = torch_names(engine.optimizer.type_name if engine.optimizer is not None else "")
        aliases: dict[int, list[str]] = {}
        for name, parameter in engine.module.named_parameters(remove_duplicate=False):
            if reference_of(parameter) is not None:
                aliases.setdefault(id(parameter), []).append(name)
        others = [name for name, _ in other_state(engine.module)]
        self._own = DcpCheckpoint(path, list(aliases.values()), others, names)
        self.peer = self._own
        self._names = self._match(strict=strict)
        check_buffers(engine.module, self._own.buffers, strict=strict)
        self._check_states(strict=strict)

    def run(self) -> tuple[dict[str, Any], list[str]]:
        """Load, and return the client state and a line for all that differs; a collective."""
        client, notes = super().run()
        if not self._own.has_run:
            notes.append("counters: it has none; steps are those of the optimizer's state")
        return client, notes

    def _check_states(self, *, strict: bool) -> None:
        """Refuse state that does not fit, or is there in part, before anything changes."""
        problems = []
        wanted = self._engine._runtime.states if self._states else {}
        for segment in self._engine._runtime.segments:
            for member in segment.members:
                name = self._names.get(member.name)
                if name is None:
                    continue
                shape = tuple(member.parameter.shape)
                problems.append(self._own.check(name, WEIGHT, shape))
                problems += [self._own.check(name, each, shape) for each in wanted]
                there = [each for each in wanted if self._own.has(name, each)]
                if segment.spec.trainable and 0 < len(there) < len(wanted) and strict:
                    lacks = sorted(set(wanted) - set(there))
                    problems.append(f"it lacks {', '.join(lacks)} of {name}")
        found = [each for each in problems if each]
        if found:
            raise CheckpointError(
                f"{self._own.path} does not fit the model, and nothing was loaded:"
                f" {'; '.join(found[:8])}"
            )

    def _load_group(self, segment: Segment, group: SubGroup) -> None:
        runtime = self._engine._runtime
        fields = {WEIGHT: Field.PARAMETER}
        if has_field(runtime.store, segment.index, Field.MASTER):
            fields = {WEIGHT: Field.MASTER}
            if self._states:
                fields |= {
                    name: field
                    for name, field in runtime.states.items()
                    if has_field(runtime.store, segment.index, field)
                }
        wanted = [
            piece
            for piece in segment.pieces
            if segment.members[piece.index].name in self._names
            and piece.start < group.stop
            and piece.start + piece.numel > group.start
        ]
        if not wanted:
            return
        with write_group(runtime.store, group, set(fields.values()), keeps=True) as writer:
            for piece in wanted:
                low = max(piece.start, group.start)
                high = min(piece.start + piece.numel, group.stop)
                name = self._names[segment.members[piece.index].name]
                for section, field in fields.items():
                    for start in range(low, high, _PART_NUMEL):
                        first = piece.first + start - piece.start
                        last = first + min(_PART_NUMEL, high - start)
                        values = self._part(name, section, first, last)
                        writer.put(field, start - group.start, values)

    def _part(self, name: str, section: str, start: int, stop: int) -> torch.Tensor:
        """Read elements; state that was not saved is zero, as before the first step."""
        if section != WEIGHT and not self._own.has(name, section):
            return torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        values = self._own.read(name, section, start, stop)
        if section == WEIGHT:
            for alias, first in self._own.aliases.items():
                if first == name and not torch.equal(
                    self._own.read(alias, section, start, stop), values
                ):
                    raise CheckpointError(
                        f"{self._own.path}: {alias} and {name} are one parameter here, and two"
                        " different ones there; untie them in the model"
                    )
        return values

    def _restore_counters(self) -> None:
        engine = self._engine
        if self._own.has_run:
            super()._restore_counters()
            return
        steps = engine._history.updates if self._states else 0
        engine.global_steps = steps
        engine.skipped_steps = 0
        engine._global_samples = steps * engine.train_batch_size()
        engine.micro_steps = steps * engine.gradient_accumulation_steps()

    def _restore_scaler(self, notes: list[str]) -> None:
        if "loss_scaler" in self._own.optimizer:
            super()._restore_scaler(notes)
        elif self._engine.loss_scaler.dynamic:
            notes.append("loss scale: it has none; that of now is kept")


def _require_kernel(optimizer: ZeroOptimizer | None, path: Path) -> None:
    if optimizer is not None and not isinstance(optimizer.fused, FusedOptimizer):
        raise CheckpointError(
            f"{path}: {optimizer.type_name}, which has no kernel, cannot go on from state of"
            " torch.distributed.checkpoint; load the weights alone with optimizer_states=False"
        )
