"""Everything of a run that is not in its shards: captured once, restored for whoever resumes.

[Note: run state] Each rank has its own: random generators and buffers may differ by rank. A rank
that resumes takes that of the same rank; one that was not there before takes the first one's,
without its generators. What differs between the run that was and the one that is gets a line in
the report, with what was done: nothing is taken over, or left out, without a word.

The shards (parameters, gradients, optimizer state) are saved and loaded by others, before.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from zero.buffers import check_buffers, other_state, restore_buffers
from zero.carried import describe_carried
from zero.errors import ConfigError, RunStateError
from zero.plain import dump_plain, from_plain, to_plain
from zero.progress import progress, set_progress
from zero.whole import LateTensor, describe_whole

if TYPE_CHECKING:
    from zero.engine import ZeroEngine
    from zero.optimizer import ZeroOptimizer

FORMAT_VERSION = 1

_SCHEDULE_POSITION = frozenset(
    {
        "last_epoch",
        "last_batch_iteration",
        "base_lrs",
        "T_cur",
        "T_i",
        "num_bad_epochs",
        "best",
        "cooldown_counter",
    }
)
"""What moves as a schedule goes on; so does everything that begins with an underscore."""
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""What a schedule writes into param groups."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of one rank: plain JSON data, and tensors by the names that the data hold."""

    data: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    late: Mapping[str, LateTensor] = field(default_factory=dict)
    """Tensors that the data name as well, and that rest in records of whole tensors."""

    def to_json(self) -> str:
        """Return the data as JSON text, the same for the same state."""
        return dump_plain(self.data)

    @classmethod
    def from_json(cls, text: str | bytes, tensors: Mapping[str, torch.Tensor]) -> RunState:
        """Return the state that was written.

        Raises:
            RunStateError: if the text is no run state, or one of a newer version.
        """
        try:
            data = json.loads(text)
            version = data["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunStateError(f"this is no run state: {error!r}") from error
        if version != FORMAT_VERSION:
            raise RunStateError(
                f"the run state has format version {version!r}, and this version of tierzero reads"
                f" {FORMAT_VERSION}; resume with the version that wrote it"
            )
        return cls(data, dict(tensors))

    @property
    def global_steps(self) -> int:
        """Steps that the run had made."""
        return int(self.data["counters"]["global_steps"])

    @property
    def world_size(self) -> int:
        """Ranks that the run had."""
        return int(self.data["world_size"])

    def value(self, key: str) -> Any:
        """Return an entry as the value that it was captured from."""
        return from_plain(self.data[key], self.tensors)


@dataclass(frozen=True, slots=True)
class RestoreParts:
    """What of a run state is restored; buffers always are."""

    run: bool = True
    """Counters, generators and the position in the data."""
    optimizer: bool = True
    """Hyper-parameters, loss scaler and the updates that the optimizer has made."""
    scheduler: bool = True
    moments: bool = True
    """Whether saved moments are those of the optimizer that there is, so that they go on."""


def capture(engine: ZeroEngine) -> RunState:
    """Return the state of this rank; no collective.

    Raises:
        NotPlainError: naming what cannot be written without pickle.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "model_hash": model_hash(engine.module),
        "world_size": engine.world_size,
        "rank": engine.global_rank,
        **progress(engine),
        "batch": _batch(engine),
        "optimizer": _describe_optimizer(engine),
        "scheduler": _describe_scheduler(engine.lr_scheduler),
        "loss_scaler": {
            "type": type(engine.loss_scaler).__name__,
            "state": engine.loss_scaler.state_dict(),
        },
        "random": _generators(),
        "loader": engine.training_dataloader.state_dict() if engine.training_dataloader else None,
        "buffers": dict(other_state(engine.module)),
    }
    data = {key: to_plain(value, key, tensors) for key, value in plain.items()}
    late: Mapping[str, LateTensor] = {}
    if engine.optimizer is not None:
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        data["whole"], late = describe_whole(engine.optimizer.fused, names)
    return RunState(data, tensors, late)


def restore(
    engine: ZeroEngine,
    state: RunState,
    parts: RestoreParts | None = None,
    *,
    strict: bool = True,
) -> list[str]:
    """Give an engine the state of a run, and return a line for all that differs; no collective.

    Args:
        engine: the engine; its shards have their saved values already.
        state: this rank's state, or another's if the run had fewer ranks.
        parts: what to restore; by default everything.
        strict: refuse buffers that are missing or unexpected.

    Raises:
        RunStateError: if it belongs to another model; nothing was changed.
    """
    parts = parts or RestoreParts()
    buffers = state.value("buffers")
    check_buffers(engine.module, buffers, strict=strict)
    notes: list[str] = []
    restore_buffers(engine.module, buffers)
    if not parts.run:
        return notes
    _note_world(engine, state, notes)
    schedule_goes_on = _note_schedule(engine, state, parts, notes)
    if parts.optimizer:
        _restore_groups(engine, state, (schedule_goes_on, parts.moments), notes)
        _restore_scaler(engine, state, notes)
    else:
        notes.append(
            "optimizer: its state was not loaded, as asked: hyper-parameters, moments and loss"
            " scale are those of now"
        )
    if schedule_goes_on:
        _restore_scheduler(engine, state, notes)
    keeps_window = _note_batch(engine, state, notes) and parts.optimizer
    saved = {key: state.value(key) for key in progress(engine)}
    if not parts.optimizer:
        saved["counters"]["updates"] = engine._history.updates
    set_progress(engine, saved, keeps_window=keeps_window)
    _restore_loader(engine, state, notes)
    if state.data["rank"] == engine.global_rank:
        _restore_generators(state.value("random"))
    return notes


def window_survives(engine: ZeroEngine, state: RunState) -> bool:
    """Tell whether gradients of a half accumulated window can be gone on with."""
    return bool(state.data["batch"]["accumulation_steps"] == _batch(engine)["accumulation_steps"])


def model_hash(module: nn.Module) -> str:
    """Return a number that models share which have the same parameters under the same names."""
    found = [
        (name, list(tensor.shape))
        for name, tensor in module.named_parameters(remove_duplicate=False)
    ]
    return hashlib.blake2b(json.dumps(sorted(found)).encode(), digest_size=16).hexdigest()


def require_same_model(engine: ZeroEngine, state: RunState) -> None:
    """Refuse a state of another model.

    Raises:
        RunStateError: saying so.
    """
    if state.data["model_hash"] != model_hash(engine.module):
        raise RunStateError(
            "this state was saved from a model with other parameters (names or shapes differ);"
            " build the model as it was, or load its weights alone with zero.load_weights"
        )


def describe_groups(optimizer: ZeroOptimizer | None) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each parameter group, as private copies."""
    tensors: dict[str, torch.Tensor] = {}
    groups = optimizer.param_groups if optimizer is not None else []
    plain = [
        to_plain(_options(group), f"param_groups[{index}]", tensors)
        for index, group in enumerate(groups)
    ]
    return [from_plain(each, tensors) for each in plain]


def describe_configured(optimizer: ZeroOptimizer | None) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each group as they were before a schedule set any."""
    return [
        {
            key: group.get("initial_lr", value) if key == "lr" else value
            for key, value in group.items()
            if key not in _SCHEDULED or key == "lr"
        }
        for group in describe_groups(optimizer)
    ]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _batch(engine: ZeroEngine) -> dict[str, int]:
    return {
        "train_batch_size": engine.train_batch_size(),
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "accumulation_steps": engine.gradient_accumulation_steps(),
    }


def _describe_optimizer(engine: ZeroEngine) -> dict[str, Any] | None:
    optimizer = engine.optimizer
    if optimizer is None:
        return None
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    return {
        "type": optimizer.type_name,
        "groups": [
            {
                "names": [names.get(id(parameter), "") for parameter in group["params"]],
                "options": options,
            }
            for group, options in zip(
                optimizer.param_groups, describe_groups(optimizer), strict=True
            )
        ],
        "configured": engine.configured_groups,
        "carried": describe_carried(optimizer, engine._groups, engine._runtime, engine._history),
    }


def _describe_scheduler(scheduler: Any) -> dict[str, Any] | None:
    if scheduler is None:
        return None
    if not hasattr(scheduler, "state_dict"):
        raise ConfigError(
            f"the schedule is a {type(scheduler).__name__} without state_dict(), so it cannot be"
            " saved; give it state_dict and load_state_dict, as torch's schedulers have"
        )
    return {
        "type": type(scheduler).__name__,
        "settings": _schedule_settings(scheduler),
        "state": scheduler.state_dict(),
    }


def _schedule_settings(scheduler: Any) -> dict[str, Any]:
    """Return the numbers that a schedule was made with."""
    return {
        key: value
        for key, value in vars(scheduler).items()
        if key not in _SCHEDULE_POSITION and key[0] != "_" and _is_setting(value)
    }


def _is_setting(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_setting, value))
    return type(value) in (bool, int, float, str)


def _generators() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()  # what users' code draws from
    found = {
        "python": random.getstate(),
        "numpy": [numpy_state[0], numpy_state[1], *map(float, numpy_state[2:])],
        "torch": torch.get_rng_state(),
        "cuda": None,
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _restore_generators(found: Mapping[str, Any]) -> None:
    random.setstate(found["python"])
    name, keys, position, has_gauss, gauss = found["numpy"]
    np.random.set_state((name, keys, int(position), int(has_gauss), gauss))
    torch.set_rng_state(found["torch"])
    if found["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])


def _note_world(engine: ZeroEngine, state: RunState, notes: list[str]) -> None:
    if state.world_size != engine.world_size:
        notes.append(
            f"world size: saved {state.world_size}, now {engine.world_size}: state was shared out"
            " anew; ranks that were not there before keep their own random generators"
        )


def _note_batch(engine: ZeroEngine, state: RunState, notes: list[str]) -> bool:
    """Tell whether the accumulation window goes on, and note what changed of the batch."""
    survives = window_survives(engine, state)
    saved, now = state.data["batch"], _batch(engine)
    changed = [f"{key} {saved[key]} -> {now[key]}" for key in now if saved[key] != now[key]]
    if changed:
        note = f"batch: {', '.join(changed)}: the new sizes are used"
        if not survives and state.data["window"]["micro_batches"]:
            note += (
                f"; the {state.data['window']['micro_batches']} micro-batches accumulated so far"
                " were weighed for the old sizes, so they are dropped and the window begins anew"
            )
        notes.append(note)
    return survives


def _restore_groups(
    engine: ZeroEngine, state: RunState, goes_on: tuple[bool, bool], notes: list[str]
) -> None:
    """Restore hyper-parameters; `goes_on` tells of the schedule and of the moments."""
    schedule_goes_on, moments_go_on = goes_on
    optimizer, saved = engine.optimizer, state.value("optimizer")
    if optimizer is None or saved is None:
        return
    if saved["type"] != optimizer.type_name:
        what = (
            "states of the same name are taken over"
            if moments_go_on
            else "they keep other moments, so it begins anew, at step 1 with moments of zero"
        )
        notes.append(
            f"optimizer: saved {saved['type']}, now {optimizer.type_name}: {what}; the"
            " hyper-parameters are those configured now"
        )
        return
    if not _same_groups(engine, optimizer, saved["groups"]):
        notes.append(
            f"parameter groups: saved {len(saved['groups'])}, now {len(optimizer.param_groups)},"
            " with other parameters: the hyper-parameters are those configured now"
        )
        return
    kept = () if schedule_goes_on or engine.lr_scheduler is None else _SCHEDULED
    for index, (group, old) in enumerate(zip(optimizer.param_groups, saved["groups"], strict=True)):
        _note_options(index, (engine.configured_groups, saved["configured"]), kept, notes)
        _set_options(group, {k: v for k, v in old["options"].items() if k not in kept})


def _same_groups(
    engine: ZeroEngine, optimizer: ZeroOptimizer, saved: Sequence[Mapping[str, Any]]
) -> bool:
    """Tell whether what is trained now was in the same groups, as far as it was in any."""
    then = {name: index for index, group in enumerate(saved) for name in group["names"]}
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    return len(saved) == len(optimizer.param_groups) and all(
        then.get(names.get(id(parameter), ""), index) == index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    )


def _note_options(
    index: int,
    configured: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    skipped: Collection[str],
    notes: list[str],
) -> None:
    """Note the hyper-parameters that the configurations of both runs give differently."""
    if index >= min(map(len, configured)):
        return
    now, then = (each[index] for each in configured)
    changed = [
        f"{key} {then[key]} -> {now[key]}"
        for key in now
        if key in then and key not in skipped and not _same(now[key], then[key])
    ]
    if changed:
        notes.append(
            f"hyper-parameters of group {index}: configured {', '.join(changed)}: the saved values"
            " are used; set optimizer.param_groups after loading to use others"
        )


def _set_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _note_schedule(
    engine: ZeroEngine, state: RunState, parts: RestoreParts, notes: list[str]
) -> bool:
    """Tell whether the saved schedule and the one of now are the same kind, so that it goes on."""
    saved, scheduler = state.data["scheduler"], engine.lr_scheduler
    if saved is None and scheduler is None:
        return False
    now = type(scheduler).__name__ if scheduler is not None else "none"
    then = saved["type"] if saved is not None else "none"
    if scheduler is None:
        notes.append(f"schedule: saved {then}, now none: learning rates stay as they are")
        return False
    if now != then:
        notes.append(
            f"schedule: saved {then}, now {now}: the new one starts from its beginning, with its"
            " own learning rates"
        )
        return False
    if not parts.scheduler:
        notes.append(
            f"schedule: {now} was not loaded, as asked: it starts from its beginning, with its own"
            " learning rates"
        )
    return parts.scheduler


def _restore_scheduler(engine: ZeroEngine, state: RunState, notes: list[str]) -> None:
    saved = state.value("scheduler")
    before = _schedule_settings(engine.lr_scheduler)
    engine.lr_scheduler.load_state_dict(saved["state"])
    after = _schedule_settings(engine.lr_scheduler)
    then = saved["settings"]
    for key, value in before.items():
        if key not in then or _same(value, then[key]):
            continue
        used = "the saved" if _same(after.get(key), then[key]) else "the new"
        notes.append(
            f"schedule {saved['type']}: {key} {then[key]} -> {value}: {used} value is used, at the"
            " step where the schedule stood"
        )


def _restore_scaler(engine: ZeroEngine, state: RunState, notes: list[str]) -> None:
    saved = state.value("loss_scaler")
    now = type(engine.loss_scaler).__name__
    if saved["type"] == now and engine.loss_scaler.dynamic:
        engine.loss_scaler.load_state_dict(saved["state"])
    elif saved["type"] != now or saved["state"] != engine.loss_scaler.state_dict():
        notes.append(
            f"loss scale: saved {saved['type']} at {saved['state']['cur_scale']:g}, now {now} at"
            f" {engine.loss_scaler.cur_scale:g}: the new one is used"
        )


def _restore_loader(engine: ZeroEngine, state: RunState, notes: list[str]) -> None:
    saved, loader = state.value("loader"), engine.training_dataloader
    if saved is None or loader is None:
        if saved is not None:
            notes.append("data: a position was saved, but no training_data were given now")
        return
    if saved["samples"] != loader.state_dict()["samples"]:
        notes.append(
            f"data: saved with {saved['samples']} samples, now {loader.state_dict()['samples']}:"
            " the position is not used; the first pass begins anew"
        )
        return
    loader.load_state_dict(saved)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return float(one) == float(other)
    return bool(one == other)
