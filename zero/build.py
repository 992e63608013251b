"""Build the runtime of an engine: allocate what the plan says and move the model there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from aio_ops import Engine
from estimators import MemoryPlan, SegmentSpec
from offload import KeptFile, Kernels, Ledger, Store, StoreParts, load_kernels
from zero import machine
from zero.coming import let_come
from zero.comm import Communicator
from zero.devices import join_devices, move_buffers
from zero.durable import DurableRun
from zero.gradients import GradientReducer
from zero.materialize import InitFunction, seal_units
from zero.planning import Blueprint
from zero.reuse import PrefetchLimits
from zero.runtime import Runtime
from zero.schedule import UnitScheduler
from zero.starting import StartProgress
from zero.unit import Segment, Unit
from zero.update_rules import MOMENTS
from zero.whole import WholeOptimizer


def build_runtime(
    blueprint: Blueprint,
    io: Engine,
    communicator: Communicator,
    init_fn: InitFunction | None,
    ledger: Ledger | None = None,
    durable: DurableRun | None = None,
) -> Runtime:
    """Allocate what the plan says and move the model's values there, or those of a durable run."""
    model = describe_model(blueprint.plan.memory.request.segments)
    communicator.agree(model, "zero.initialize with a model of its own")
    join_devices(blueprint.device, communicator)
    kernels = load_kernels(thread_count=machine.thread_count(communicator.local_world_size))
    kept = durable.open_file(io, blueprint.plan) if durable is not None else None
    parts = _store_parts(blueprint, io, kernels, communicator, ledger, kept)
    memory = blueprint.plan.memory
    numels = [sum(each.numels) for each in memory.request.segments]
    progress = StartProgress(len(blueprint.units), sum(numels))
    store = _make_store(memory, parts, communicator)
    progress.tiers_made(memory.host_bytes + memory.swap_file_bytes)
    settings = blueprint.settings
    limits = PrefetchLimits(*memory.ahead_limits, settings.reuse_numel)
    try:
        units, segments = _make_units(blueprint, communicator)
        let_come(units, store, communicator)
        update = blueprint.optimizer.fused if blueprint.optimizer is not None else None
        if isinstance(update, WholeOptimizer):
            members = [member for segment in segments for member in segment.members]
            update.attach(store.whole_records, members, communicator.rank)
        reducer = (
            GradientReducer(segments, store, kernels, communicator)
            if blueprint.optimizer is not None
            else None
        )
        runtime = Runtime(
            units,
            segments,
            store,
            kernels,
            communicator,
            reducer,
            UnitScheduler(
                units,
                store,
                reducer,
                limits,
                communicator,
            ),
            update.states if update is not None else MOMENTS,
            update,
        )
        if durable is not None:
            store.is_restored = durable.resume(store)
        seal_units(runtime, init_fn, progress)
        move_buffers(blueprint.units[0].module, blueprint.device.torch_device)
    except BaseException:
        store.close()
        raise
    runtime.scheduler.install()
    return runtime


def _make_units(
    blueprint: Blueprint, communicator: Communicator
) -> tuple[list[Unit], list[Segment]]:
    units = []
    segments: list[Segment] = []
    for index, unit in enumerate(blueprint.units):
        own = []
        for spec, members in unit.segments:
            own.append(Segment(len(segments), spec, members, communicator))
            segments.append(own[-1])
        units.append(Unit(index, unit.name, unit.module, own, unit.router))
    return units, segments


def _make_store(plan: MemoryPlan, parts: StoreParts, communicator: Communicator) -> Store:
    """Make the tiers, on all ranks or on none."""
    store: Store | None = None
    failure: Exception | None = None
    try:
        store = Store(plan, parts)
    except Exception as error:  # noqa: BLE001  raised below, by all ranks at once
        failure = error
    try:
        communicator.raise_together(failure, "making the tiers of the plan")
    except BaseException:
        if store is not None:
            store.close()
        raise
    if store is None:
        raise RuntimeError("no tiers were made, and nothing says why")
    return store


def _store_parts(
    blueprint: Blueprint,
    io: Engine,
    kernels: Kernels,
    communicator: Communicator,
    ledger: Ledger | None,
    kept: KeptFile | None,
) -> StoreParts:
    """Return what a store works with; `kept` is the swap file of a durable run."""
    plan, settings = blueprint.plan, blueprint.settings
    tiers = settings.tiers
    return StoreParts(
        io,
        plan.nvme[0].path if plan.nvme else None,
        kernels,
        ledger or Ledger(),
        device=blueprint.device,
        stripes=plan.nvme,
        position=communicator.rank,
        burst=tiers.write_burst,
        verify=tiers.verify,
        measures_schedule=tiers.measures_schedule,
        pins_slots=settings.parameter_offload.pin_memory or settings.optimizer_offload.pin_memory,
        kept=kept,
    )


def describe_model(segments: Sequence[SegmentSpec]) -> int:
    """Return a number that ranks with the same model share."""
    return int.from_bytes(hashlib.blake2b(repr(segments).encode(), digest_size=7).digest())
