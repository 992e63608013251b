"""Change what an engine trains: take everything off its tiers, plan again, and put it back.

[Note: replan] Freezing or unfreezing parameters, adding parameter groups and resizing change the
segments, and with them offsets, sub-groups and extents. So at a step boundary every parameter goes
back into a nursery, with its fp32 master, and its moments beside it; a new plan is made as
`zero.initialize` makes one, and everything returns. Parameters keep their objects. The new plan is
made before anything moves: one that does not fit is refused with its numbers. Everything is copied
before any parameter leaves its tier, so what fails until then (a resize's `init`, a full disk, an
interruption) changes nothing; what fails later fails the engine for good. Moments of parameters
that are frozen wait, so that unfreezing them goes on where they stopped, with their own step count.
"""

from __future__ import annotations

import logging
import mmap
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from aio_ops import Engine
from offload import Spool
from zero import machine
from zero.build import build_runtime
from zero.carried import Data, adopt_carried, arrange_carried, gather_carried
from zero.errors import PlanError
from zero.fragments import iterate_states
from zero.generic import GenericOptimizer
from zero.materialize import outside_inference_mode
from zero.nursery import Nursery, NurserySource, SpooledShard
from zero.optimizer import UpdateGroup, ZeroOptimizer
from zero.parameter import REFERENCE_ATTRIBUTE, ParameterReference, reference_of
from zero.planning import (
    Blueprint,
    Changes,
    describe_segments,
    make_blueprint,
    open_io_engine,
    open_spool_engine,
)
from zero.runtime import Runtime
from zero.settings import NvmeSettings, Settings
from zero.whole import Waiting, WholeOptimizer, adopt_whole, leave_whole

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Moments:
    """Optimizer state of one parameter that is not in any store at the moment."""

    states: Mapping[str, SpooledShard]
    """By the names of `Runtime.states`."""
    steps: int
    """Updates that the parameter has had."""
    carried: Data | None = None
    """What an optimizer without a kernel carries for it, see [Note: carried]."""

    def read(self, shape: torch.Size) -> dict[str, torch.Tensor]:
        """Return the states in the shape of their parameter; a collective."""
        return {name: each.read_full().view(shape) for name, each in self.states.items()}


@dataclass(slots=True, eq=False)
class History:
    """What an engine remembers of parameters beyond their segments."""

    births: dict[int, int] = field(default_factory=dict)
    """By id of the parameter: updates of the engine before its first one."""
    dormant: dict[int, Moments] = field(default_factory=dict)
    """By id: state of parameters that are frozen at the moment."""
    updates: int = 0
    """Updates that the engine has made."""

    def steps_of(self, parameter: nn.Parameter) -> int:
        """Return the updates that a trained parameter has had."""
        return self.updates - self.births.get(id(parameter), 0)

    def births_now(self, old: Runtime, optimizer: ZeroOptimizer) -> dict[int, int]:
        """Return the births of what the optimizer trains from now on."""
        trained = {
            id(member.parameter)
            for segment in old.segments
            if segment.spec.trainable
            for member in segment.members
        }
        found = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                key = id(parameter)
                if key in trained:
                    found[key] = self.births.get(key, 0)
                else:
                    waiting = self.dormant.get(key)
                    found[key] = self.updates - (waiting.steps if waiting is not None else 0)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Rebuilt:
    """The new runtime, plan and groups of an engine."""

    runtime: Runtime
    blueprint: Blueprint


@dataclass(frozen=True, slots=True)
class Resize:
    """A parameter that gets another shape."""

    parameter: nn.Parameter
    shape: torch.Size
    init: Callable[[torch.Tensor], object] | None
    """Fills a new tensor, before the old values are put where both shapes have elements."""
    values: torch.Tensor | None = None
    """All new values; the old ones then do not count."""

    def of(self, old: torch.Tensor, *, is_value: bool) -> torch.Tensor:
        """Return the new form of old values, or of old moments, whose new elements are zero."""
        if is_value and self.values is not None:
            return self.values.to(old.device, old.dtype, copy=True).contiguous()
        new = torch.zeros(self.shape, dtype=old.dtype, device=old.device)
        if is_value and self.init is not None:
            with torch.no_grad():
                self.init(new)
        common = tuple(slice(0, min(pair)) for pair in zip(old.shape, self.shape, strict=True))
        new[common] = old[common]
        return new


@outside_inference_mode()
def rebuild(
    model: nn.Module,
    old: Runtime,
    settings: Settings,
    optimizer: ZeroOptimizer,
    history: History,
    groups: Sequence[UpdateGroup],
    resize: Resize | None = None,
) -> Rebuilt:
    """Move everything that `old` holds into a new runtime; a collective.

    `groups` are those that the optimizer has updated so far.

    Raises:
        PlanError: if the new plan, or what waits meanwhile, does not fit; nothing has changed.

    Whatever else is raised while the copies are made has changed nothing either; after that, the
    old store is failed and refuses all further work.
    """
    if isinstance(optimizer.fused, GenericOptimizer):
        optimizer.fused.admit(optimizer.param_groups)
    io = open_io_engine(settings)
    try:
        births = history.births_now(old, optimizer)
        shapes = {id(resize.parameter): resize.shape} if resize is not None else {}
        communicator = old.communicator
        communicator.join("planning the engine anew")
        blueprint, spool = _plan(
            model, old, settings, optimizer, io, Changes(births, shapes, old), resize
        )
        nursery = Nursery(communicator, spool, None, made_group=False)
        known = gather_carried(optimizer, groups, old, history)
        arranged = arrange_carried(optimizer, blueprint.groups, history.updates, known)
        sources, moved = _copy(model, nursery, history, known, resize)
        waiting = _leave_whole(optimizer, old, spool, resize)
        communicator.join("leaving the old plan")
    except BaseException:
        io.close()
        raise
    try:
        _take_off(sources)
        old.retire()
        old.store.ledger.peaks.clear()  # they are compared with what is planned
        runtime = build_runtime(blueprint, io, communicator, None, old.store.ledger)
        history.births = births
        _put_back(runtime, history, moved)
        adopt_carried(optimizer, arranged)
        adopt_whole(optimizer.fused, waiting)
    except BaseException as error:
        io.close()
        old.store.fail(
            "planning the engine anew failed while parameters were moved"
            f" ({type(error).__name__}: {error})"
        )
        raise
    _log.info("planned anew: %s", describe_segments(blueprint.plan.memory.request.segments))
    return Rebuilt(runtime, blueprint)


def _leave_whole(
    optimizer: ZeroOptimizer, old: Runtime, spool: Spool, resize: Resize | None
) -> Waiting:
    """Copy what this rank owns of whole tensors, on all ranks or on none."""
    waiting: Waiting = {}
    failure: Exception | None = None
    reshaped = None
    if resize is not None and (reference := reference_of(resize.parameter)) is not None:
        source = reference.source
        reshaped = (id(resize.parameter), source.name, source.shape, resize.shape)
    try:
        waiting = leave_whole(optimizer.fused, spool, reshaped)
    except Exception as error:  # noqa: BLE001  raised by all ranks at once
        failure = error
    if isinstance(optimizer.fused, WholeOptimizer):
        old.communicator.raise_together(failure, "copying what an optimizer of whole tensors keeps")
    return waiting


def _plan(
    model: nn.Module,
    old: Runtime,
    settings: Settings,
    optimizer: ZeroOptimizer,
    io: Engine,
    changes: Changes,
    resize: Resize | None,
) -> tuple[Blueprint, Spool]:
    """Plan, and make room for what waits meanwhile, on all ranks or on none."""
    found: tuple[Blueprint, Spool] | None = None
    failure: Exception | None = None
    communicator = old.communicator
    worlds = communicator.world_size, communicator.local_world_size
    try:
        blueprint = make_blueprint(model, settings, optimizer, io, *worlds, changes)
        found = blueprint, _make_spool(old, settings, resize)
    except Exception as error:  # noqa: BLE001  raised below, by all ranks at once
        failure = error
    communicator.raise_together(failure, "planning the engine anew")
    if found is None:
        raise RuntimeError("no plan was made, and nothing says why")
    return found


def _make_spool(old: Runtime, settings: Settings, resize: Resize | None) -> Spool:
    """Return a place for masters and moments while nothing else holds them."""
    # A parameter, and its states, each on whole pages.
    kept = 1 + len(old.states)
    rounding = kept * mmap.PAGESIZE * sum(len(segment.members) for segment in old.segments)
    needed = sum(
        segment.layout.shard_numel
        * (4 * kept if segment.spec.trainable else segment.spec.element.size_bytes)
        for segment in old.segments
    )
    if resize is not None:
        needed += 4 * kept * -(-resize.shape.numel() // old.communicator.world_size)
    if isinstance(old.update, WholeOptimizer):
        needed += old.update.owned_bytes
    nvme: NvmeSettings | None = None
    if old.store.plan.swap_file_bytes and settings.tiers.nvme:
        nvme = max(settings.tiers.nvme, key=lambda each: shutil.disk_usage(each.path).free)
        room, place = shutil.disk_usage(nvme.path).free, str(nvme.path)
        needed += rounding
    else:
        room, place = machine.available_host_bytes(), "host memory"
    if needed > room:
        raise PlanError(
            f"planning anew keeps {needed} bytes aside for a moment, and {place} has {room};"
            " freeze, unfreeze and resize before zero.initialize, or make room"
        )
    path = nvme.path if nvme is not None else None
    return Spool(lambda: open_spool_engine(nvme), path, max(needed, 1))


def _copy(
    model: nn.Module,
    nursery: Nursery,
    history: History,
    known: Mapping[int, Data],
    resize: Resize | None,
) -> tuple[list[NurserySource], dict[int, Moments]]:
    """Copy all parameters into a nursery, and return their sources there, and moments by id."""
    sources: list[NurserySource] = []
    moved: dict[int, Moments] = {}
    failure: Exception | None = None
    for state in iterate_states(model):
        parameter = state.parameter
        values = state.fp32_param if state.fp32_param is not None else state.value
        moments, steps = dict(state.states), history.steps_of(parameter)
        if resize is not None and parameter is resize.parameter:
            waiting = history.dormant.get(id(parameter))
            if waiting is not None:
                moments, steps = waiting.read(values.shape), waiting.steps
            try:
                values = resize.of(values, is_value=True)
            except Exception as error:  # noqa: BLE001  raised by all ranks at once
                failure = failure or error
                values = torch.zeros(resize.shape, dtype=values.dtype, device=values.device)
            nursery.communicator.broadcast(values, 0)
            moments = {key: resize.of(each, is_value=False) for key, each in moments.items()}
        try:
            if moments or (id(parameter) in known and id(parameter) not in history.dormant):
                spooled = {key: SpooledShard(nursery, e.reshape(-1)) for key, e in moments.items()}
                moved[id(parameter)] = Moments(spooled, steps, known.get(id(parameter)))
            sources.append(
                NurserySource(nursery, state.name, parameter, values.reshape(-1), values.shape)
            )
        except Exception as error:  # noqa: BLE001  raised by all ranks at once
            failure = failure or error
    nursery.communicator.raise_together(failure, "copying the state for a new plan")
    return sources, moved


def _take_off(sources: Sequence[NurserySource]) -> None:
    """Make the copies what counts."""
    for source in sources:
        parameter = source.parameter
        setattr(parameter, REFERENCE_ATTRIBUTE, ParameterReference(source))
        parameter.__class__ = nn.Parameter
        source.hide()


def _put_back(runtime: Runtime, history: History, moved: dict[int, Moments]) -> None:
    """Give moments back to what is trained; those of frozen parameters wait."""
    waiting = {**history.dormant, **moved}
    history.dormant = {}
    for segment in runtime.segments:
        for member in segment.members:
            moments = waiting.get(id(member.parameter))
            reference = reference_of(member.parameter)
            if moments is None or reference is None:
                continue
            if not segment.spec.trainable:
                history.dormant[id(member.parameter)] = moments
            elif moments.steps:
                for name, values in moments.read(member.parameter.shape).items():
                    if name in runtime.states:
                        reference.source.store_full(values, runtime.states[name])


def keep_moments(
    runtime: Runtime,
    settings: Settings,
    steps: int,
    moments: Mapping[str, torch.Tensor],
    carried: Data | None = None,
) -> Moments:
    """Return moments that wait, from whole flat tensors that all ranks have alike."""
    spool = _make_spool(runtime, settings, None)
    nursery = Nursery(runtime.communicator, spool, None, made_group=False)
    states = {name: SpooledShard(nursery, each) for name, each in moments.items()}
    return Moments(states, steps, carried)


def has_changed(runtime: Runtime, optimizer: ZeroOptimizer) -> bool:
    """Tell whether parameters were frozen, unfrozen or grouped since the plan was made."""
    if optimizer.has_new_groups:
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            member.parameter.requires_grad != member.is_trainable_at_start
            for segment in runtime.segments
            for member in segment.members
        )


def group_unfrozen(runtime: Runtime, optimizer: ZeroOptimizer) -> None:
    """Put parameters that were unfrozen and are in no group into the only group.

    Raises:
        RuntimeError: if there are several groups to choose from.
    """
    grouped = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for segment in runtime.segments:
        for member in segment.members:
            parameter = member.parameter
            if not parameter.requires_grad or member.is_trainable_at_start:
                continue
            if id(parameter) in grouped:
                continue
            if len(optimizer.param_groups) > 1:
                raise RuntimeError(
                    f"parameter {member.name} was unfrozen and is in none of the"
                    f" {len(optimizer.param_groups)} parameter groups; add it to one with"
                    " optimizer.add_param_group"
                )
            optimizer.param_groups[0]["params"].append(parameter)
