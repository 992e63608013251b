"""Build the runtime of an engine: allocate what the plan says and move the model there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from aio_ops import Engine
from estimators import MemoryPlan, SegmentSpec
from offload import Ledger, Store, StoreParts, load_kernels
from zero import machine
from zero.comm import Communicator
from zero.gradients import GradientReducer
from zero.materialize import InitFunction, seal_units
from zero.planning import Blueprint
from zero.runtime import Runtime
from zero.schedule import PrefetchLimits, UnitScheduler
from zero.settings import Settings
from zero.unit import Segment, Unit


def build_runtime(
    blueprint: Blueprint,
    io: Engine,
    communicator: Communicator,
    init_fn: InitFunction | None,
    ledger: Ledger | None = None,
) -> Runtime:
    """Allocate what the plan says and move the model's values there."""
    model = describe_model(blueprint.plan.memory.request.segments)
    communicator.agree(model, "zero.initialize with a model of its own")
    kernels = load_kernels(thread_count=machine.thread_count(communicator.local_world_size))
    plan = blueprint.plan
    settings = blueprint.settings
    tiers = settings.tiers
    parts = StoreParts(
        io,
        plan.nvme[0].path if plan.nvme else None,
        kernels,
        ledger or Ledger(),
        stripes=plan.nvme,
        burst=tiers.write_burst,
        verify=tiers.verify,
        measures_schedule=tiers.measures_schedule,
        pins_slots=settings.parameter_offload.pin_memory or settings.optimizer_offload.pin_memory,
    )
    store = _make_store(plan.memory, parts, communicator)
    try:
        units = []
        segments: list[Segment] = []
        for index, unit in enumerate(blueprint.units):
            own = []
            for spec, members in unit.segments:
                own.append(Segment(len(segments), spec, members, communicator))
                segments.append(own[-1])
            units.append(Unit(index, unit.name, unit.module, own))
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
                PrefetchLimits(settings.prefetch_numel, settings.live_numel),
            ),
        )
        seal_units(runtime, init_fn)
    except BaseException:
        store.close()
        raise
    runtime.scheduler.install()
    return runtime


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


def describe_model(segments: Sequence[SegmentSpec]) -> int:
    """Return a number that ranks with the same model share."""
    return int.from_bytes(hashlib.blake2b(repr(segments).encode(), digest_size=7).digest())


def make_loader(
    data: Dataset[Any],
    collate_fn: Callable[[list[Any]], Any] | None,
    settings: Settings,
    communicator: Communicator,
) -> DataLoader[Any]:
    """Return a loader of micro-batches; several ranks read disjoint parts."""
    sampler: DistributedSampler[Any] | None = None
    if communicator.world_size > 1:
        sampler = DistributedSampler(
            data, num_replicas=communicator.world_size, rank=communicator.rank
        )
    return DataLoader(
        data,
        batch_size=settings.batch.micro_batch_size,
        sampler=sampler,
        shuffle=sampler is None,
        collate_fn=collate_fn,
        drop_last=settings.drop_last_batch,
    )
