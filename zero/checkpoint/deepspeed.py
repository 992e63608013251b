"""Load a checkpoint of DeepSpeed into an engine: ZeRO-1, 2, 3 or universal, from any world size.

Each rank reads what its own shards need, a parameter at a time. The moments, the count of updates,
hyper-parameters, schedule, loss scale, counters, buffers and the client state are taken over;
random generators and gradients are not in such a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from estimators import SubGroup
from offload import Field, has_field
from offload.groups import write_group
from zero.buffers import check_buffers, restore_buffers
from zero.checkpoint.deepspeed_files import EXP_AVG, EXP_AVG_SQ, WEIGHT, PeerCheckpoint
from zero.checkpoint.peer_source import PeerSource
from zero.errors import CheckpointError
from zero.optimizer import UpdateGroup, ZeroOptimizer, update_groups
from zero.parameter import reference_of
from zero.replicated import gather_values
from zero.unit import Segment
from zero.update_rules import FusedOptimizer

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

_FIELDS = {WEIGHT: Field.MASTER, EXP_AVG: Field.EXP_AVG, EXP_AVG_SQ: Field.EXP_AVG_SQ}
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "initial_lr")
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class PeerLoading:
    """One load, once all that can be known without reading tensors was checked."""

    def __init__(self, engine: ZeroEngine, path: Path, *, strict: bool, states: bool) -> None:
        """Open the files and match names and shapes.

        Raises:
            CheckpointError: if a file is damaged or the model is another one; nothing has changed.
        """
        self._engine = engine
        self._states = states
        if states:
            _require_moments(engine.optimizer, path)
        self._files = PeerCheckpoint(path)
        self.peer: PeerSource = self._files
        self._names = self._match(strict=strict)
        check_buffers(engine.module, self.peer.buffers, strict=strict)
        self._last: tuple[str, dict[str, torch.Tensor]] | None = None

    def run(self) -> tuple[dict[str, Any], list[str]]:
        """Load, and return the client state and a line for all that differs; a collective."""
        engine, notes = self._engine, []
        engine._restart_window()
        store = engine._runtime.store
        if self._states:
            self._adopt_steps()
        try:
            for segment in engine._runtime.segments:
                for group in store.plan.by_segment[segment.index]:
                    self._load_group(segment, group)
            if store.pager is not None:
                store.pager.drain()
            for segment in engine._runtime.segments:
                segment.forget_values()
                gather_values(segment, store.ledger)
            restore_buffers(engine.module, self.peer.buffers)
            self._restore_counters()
            if self._states:
                notes = self._restore_groups()
                self._restore_scheduler(notes)
                self._restore_scaler(notes)
        except BaseException:
            store.reclaim()
            store.suspended = f"loading {self.peer.path} into it failed midway; load it again"
            raise
        store.suspended = None
        return self.peer.client_state, notes

    # Shards

    def _load_group(self, segment: Segment, group: SubGroup) -> None:
        store = self._engine._runtime.store
        is_trained = has_field(store, segment.index, Field.MASTER)
        fields = {Field.PARAMETER}
        if is_trained:
            fields = set(_FIELDS.values()) if self._states else {Field.MASTER}
        wanted = [
            piece
            for piece in segment.pieces
            if segment.members[piece.index].name in self._names
            and piece.start < group.stop
            and piece.start + piece.numel > group.start
        ]
        if not wanted:
            return
        with write_group(store, group, fields, keeps=True) as writer:
            for piece in wanted:
                low, high = (
                    max(piece.start, group.start),
                    min(piece.start + piece.numel, group.stop),
                )
                first = piece.first + low - piece.start
                name = self._names[segment.members[piece.index].name]
                for field in fields:
                    values = self._values(name, field)[first : first + high - low]
                    writer.put(field, low - group.start, values)

    def _values(self, name: str, field: Field) -> torch.Tensor:
        """Return a whole field of a parameter, flat, fp32; those of the last one are kept."""
        section = next((key for key, each in _FIELDS.items() if each is field), WEIGHT)
        if self._last is None or self._last[0] != name:
            self._last = (name, {})
        kept = self._last[1]
        if section not in kept:
            kept[section] = self._read(name, section)
        return kept[section]

    def _read(self, name: str, section: str) -> torch.Tensor:
        """Read a section; moments that were not saved are zero."""
        if name in self.peer.frozen_shapes:
            if section == WEIGHT:
                return self._files.read_frozen(name).float()
            return torch.zeros(
                torch.Size(self.peer.frozen_shapes[name]).numel(), dtype=torch.float32, device="cpu"
            )
        if self._files.has(name, section):
            return self._files.read(name, section)
        if section == WEIGHT:
            raise CheckpointError(f"{self.peer.path} has no weights of {name}")
        return torch.zeros(
            torch.Size(self.peer.shapes[name]).numel(), dtype=torch.float32, device="cpu"
        )

    def _match(self, *, strict: bool) -> dict[str, str]:
        """Return the saved name of each parameter, by its first name here."""
        shapes = {**self.peer.shapes, **self.peer.frozen_shapes}
        aliases: dict[int, list[str]] = {}
        for name, parameter in self._engine.module.named_parameters(remove_duplicate=False):
            if reference_of(parameter) is not None:
                aliases.setdefault(id(parameter), []).append(name)
        found, problems = {}, []
        for segment in self._engine._runtime.segments:
            for member in segment.members:
                names = aliases[id(member.parameter)]
                names += [self.peer.aliases[name] for name in names if name in self.peer.aliases]
                saved = next((name for name in names if name in shapes), None)
                if saved is None:
                    problems += [f"{member.name} is not in it"] if strict else []
                elif shapes[saved] != tuple(member.parameter.shape):
                    shape = tuple(member.parameter.shape)
                    problems.append(f"{member.name} has shape {shape}, there {shapes[saved]}")
                else:
                    found[member.name] = saved
        unexpected = sorted(set(shapes) - set(found.values()) - set(self.peer.aliases))
        problems += [f"{name} is not in the model" for name in unexpected] if strict else []
        if problems:
            raise CheckpointError(
                f"{self.peer.path} does not fit the model, and nothing was loaded:"
                f" {'; '.join(problems[:8])}. Build the model as it was; load_module_strict=False"
                " loads what is there"
            )
        return found

    # What is not in shards

    def _adopt_steps(self) -> None:
        """Take over how many updates each parameter has had."""
        engine, history = self._engine, self._engine._history
        if engine.optimizer is None:
            return
        steps = {
            id(member.parameter): self.peer.steps_of(self._names[member.name])
            for segment in engine._runtime.segments
            if segment.spec.trainable
            for member in segment.members
            if self._names.get(member.name) in self.peer.shapes
        }
        updates = max(steps.values(), default=0)
        births = {key: updates - each for key, each in steps.items() if each != updates}
        history.births, history.updates, history.dormant = births, updates, {}
        groups = update_groups(engine.optimizer, births)
        if [_members(each) for each in groups] == [_members(each) for each in engine._groups]:
            engine._groups = groups
        else:
            engine._plan_anew(None)

    def _restore_counters(self) -> None:
        engine, model = self._engine, self.peer.model
        engine.global_steps = int(model["global_steps"])
        engine.skipped_steps = int(model["skipped_steps"])
        engine._global_samples = int(model["global_samples"])
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()

    def _restore_groups(self) -> list[str]:
        """Set the hyper-parameters of groups that have the same parameters."""
        optimizer = self._engine.optimizer
        if optimizer is None:
            return []
        names = {id(each): name for name, each in self._engine.module.named_parameters()}
        now = [
            {self._names.get(names[id(each)]) for each in group["params"] if each.requires_grad}
            for group in optimizer.param_groups
        ]
        then = [set(group) for group in self.peer.groups]
        if now != then or len(self.peer.param_groups) != len(then):
            return [
                f"parameter groups: saved {len(then)}, now {len(now)}, with other parameters: the"
                " hyper-parameters are those configured now"
            ]
        for group, saved in zip(optimizer.param_groups, self.peer.param_groups, strict=True):
            for key in _OPTIONS:
                if key in saved and (key in group or key == "initial_lr"):
                    group[key] = tuple(saved[key]) if key == "betas" else saved[key]
        return []

    def _restore_scheduler(self, notes: list[str]) -> None:
        saved, scheduler = self.peer.model.get("lr_scheduler"), self._engine.lr_scheduler
        if saved is None or scheduler is None:
            if (saved is None) != (scheduler is None):
                where = "saved and none is here" if scheduler is None else "here and none was saved"
                notes.append(f"schedule: one was {where}: it begins anew, or the rates stay")
            return
        try:
            scheduler.load_state_dict(saved)
        except (KeyError, TypeError, ValueError) as error:
            notes.append(f"schedule: the saved state is of another kind ({error!r}): not loaded")

    def _restore_scaler(self, notes: list[str]) -> None:
        saved = vars(self.peer.optimizer.get("loss_scaler") or object)
        scaler = self._engine.loss_scaler
        if bool(self.peer.optimizer.get("dynamic_loss_scale")) != scaler.dynamic:
            notes.append("loss scale: one is dynamic and the other is not: the one of now is kept")
            return
        if scaler.dynamic:
            scaler.load_state_dict({key: saved[key] for key in _SCALER_KEYS if key in saved})


def _require_moments(optimizer: ZeroOptimizer | None, path: Path) -> None:
    if optimizer is not None and not isinstance(optimizer.fused, FusedOptimizer):
        raise CheckpointError(
            f"{path} was written by DeepSpeed, and {optimizer.type_name}, which has no kernel,"
            " cannot go on from its moments; load the weights alone with"
            " load_optimizer_states=False"
        )


def _members(group: UpdateGroup) -> tuple[int, list[int]]:
    return group.index, [id(parameter) for parameter in group.parameters]
