"""The plan of a model and a configuration, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from aio_ops import Engine, open_engine
from estimators import (
    Budget,
    DriveRates,
    ElementType,
    GenericRule,
    MemoryPlan,
    PlacementRequest,
    SegmentSpec,
    Tier,
    UpdateRule,
    WholeTensors,
    device_is_sooner,
    fit_sharing,
    may_share,
    plan_placement,
)
from estimators.summary import spares_nvme
from estimators.words import NVME_IS_SPARED
from offload import (
    Device,
    HostDevice,
    SwapDirectory,
    load_kernels,
    measure_update,
    native_available,
    process_bytes,
)
from zero.budgets import drive_rates, node_budget, start_bytes, warn_if_beyond_machine
from zero.comm import Communicator
from zero.config import ZeroConfig, load_config
from zero.config.autos import hidden_size_of
from zero.config.swap_directory import require_writable
from zero.devices import open_device
from zero.errors import ConfigError, PlanError
from zero.machine import thread_count
from zero.optimizer import UpdateGroup, ZeroOptimizer, make_optimizer, update_groups
from zero.settings import NvmeSettings, Settings
from zero.state_formats import choose_formats
from zero.swap_paths import check_paths, describe_paths
from zero.units import Grouping, UnitBlueprint, form_units
from zero.whole import WholeOptimizer

NVME_ALIGNMENT_BYTES = 4096
"""Alignment of extents; a file system that asks for more is refused when the file is made."""

ConfigSource = str | Path | Mapping[str, Any] | ZeroConfig


@dataclass(frozen=True)
class Plan:
    """What one rank will allocate and where, and with which engine."""

    memory: MemoryPlan
    nvme: tuple[SwapDirectory, ...]
    """Where the swap file goes; it is striped over several."""
    engine_name: str
    engine_reason: str
    kernels_name: str
    host_budget_source: str
    device: str
    """Where the model computes, in torch's words."""
    rss_at_start_bytes: int
    """What the process held in memory when the plan was made."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "rows": [
                {"tier": row.tier.value, "what": row.what, "bytes": row.size_bytes}
                for row in self.memory.rows()
            ],
            "slots": {
                "count": self.memory.slots.count,
                "bytes": self.memory.slots.size_bytes,
            },
            "sub_groups": len(self.memory.sub_groups),
            "swap_file_bytes": self.memory.swap_file_bytes,
            "host_bytes": self.memory.host_bytes,
            "host_budget_bytes": self.memory.host_budget_bytes,
            "device": self.device,
            "device_bytes": self.memory.device_bytes,
            "nvme_path": str(self.nvme[0].path) if self.nvme else None,
            "nvme_paths": [str(each.path) for each in self.nvme],
            "engine": self.engine_name,
            "engine_reason": self.engine_reason,
            "kernels": self.kernels_name,
            "host_budget_source": self.host_budget_source,
            "world_size": self.memory.request.world_size,
            "state_format": self.memory.request.state_format.value,
            "drive": _describe_rates(self.memory.request.rates),
        }

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self.to_dict(), indent=1)


@dataclass(frozen=True)
class Blueprint:
    """Everything decided before anything is allocated."""

    settings: Settings
    plan: Plan
    units: Sequence[UnitBlueprint]
    optimizer: ZeroOptimizer | None
    device: Device = field(default_factory=HostDevice)
    """Where the model computes."""
    groups: Sequence[UpdateGroup] = ()
    """What each `SegmentSpec.param_group` stands for."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """What the plan of a durable run was made from, so that it can be made again."""

    host_bytes: int | None = None
    """One rank's host budget; counts where the configuration leaves it to the machine."""
    rates: DriveRates | None = None
    held_bytes: int | None = None
    """Bytes of the swap file that is there already; None without one."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from the model as it stands, when an engine is planned anew."""

    births: Mapping[int, int] = field(default_factory=dict)
    """By id of the parameter: updates of the engine before its first one."""
    shapes: Mapping[int, torch.Size] = field(default_factory=dict)
    """By id of the parameter: its shape once it is resized."""
    replaced: object = None
    """The runtime that holds the parameters until then."""
    recalled: Recalled = field(default_factory=Recalled)


def plan_memory(model: nn.Module, config: ConfigSource, world_size: int | None = None) -> Plan:
    """Return what training `model` with `config` will allocate on each rank; allocates nothing.

    Args:
        model: the model, on the CPU or on `meta`.
        config: a ZeRO configuration: a path, a dictionary or base64 text.
        world_size: ranks to plan for; by default those of the running job.

    Raises:
        ConfigError: if the configuration or the model cannot be used.
        PlanError: if the budgets cannot hold the model.
        OSError: if the NVMe path cannot be used or is too full.
    """
    communicator = Communicator()
    ranks = world_size or communicator.world_size
    local = communicator.local_world_size if world_size is None else ranks
    settings = parse_config(config, model).settings(ranks)
    optimizer = make_optimizer(model, None, None, settings.optimizer)
    engine = open_io_engine(settings)
    try:
        return make_blueprint(model, settings, optimizer, engine, ranks, local).plan
    finally:
        engine.close()


def parse_config(config: ConfigSource, model: nn.Module) -> ZeroConfig:
    """Return a configuration parsed, with "auto" sizes that follow from the model's own config."""
    if isinstance(config, ZeroConfig):
        return config
    return load_config(config, hidden_size=hidden_size_of(model))


def open_io_engine(settings: Settings) -> Engine:
    """Open the engine that the settings ask for; "auto" tries each in the swap directory.

    Raises:
        OSError: if no swap files can be made there.
    """
    aio = settings.aio
    pages = Tier.NVME in (settings.parameter_offload.tier, settings.optimizer_offload.tier)
    pages = pages or settings.tiers.durable is not None
    path = settings.tiers.nvme[0].path if pages and settings.tiers.nvme else None
    if path is not None:
        require_writable(path)
    return open_engine(
        aio.engine,
        directory=path,
        thread_count=aio.thread_count,
        block_bytes=aio.block_bytes,
        queue_depth=aio.queue_depth,
    )


def open_spool_engine(nvme: NvmeSettings | None) -> Engine:
    """Open an engine for what rests in files beside the plan of an engine.

    Raises:
        OSError: if no files can be made where swap files go.
    """
    path = nvme.path if nvme is not None else None
    if path is not None:
        require_writable(path)
    return open_engine("auto", directory=path, thread_count=2)


def make_blueprint(
    model: nn.Module,
    settings: Settings,
    optimizer: ZeroOptimizer | None,
    engine: Engine,
    world_size: int,
    local_world_size: int,
    changes: Changes | None = None,
) -> Blueprint:
    """Decide units and placement, and check that the disk can hold the plan."""
    changes = changes or Changes()
    device = open_device(settings.tiers.device)
    _check_device(device, settings)
    groups = update_groups(optimizer, changes.births)
    units = form_units(
        model,
        [group.parameters for group in groups],
        Grouping(
            settings.element,
            settings.gradient_element,
            settings.persistence.where(
                stage=settings.stage,
                world_size=world_size,
                parameter_tier=settings.parameter_offload.tier,
                device_is_host=device.is_host,
            ),
        ),
        {key: shape.numel() for key, shape in changes.shapes.items()},
        changes.replaced,
        choose_formats(model, settings),
    )
    rates = (
        changes.recalled.rates
        if changes.recalled.held_bytes is not None
        else drive_rates(settings, engine, local_world_size)
    )
    ranks = world_size, local_world_size
    whole = _whole_tensors(optimizer, units, world_size, changes)
    request = _placement_request(settings, optimizer, units, device, ranks, rates, whole)
    request = _choose_update_device(request, settings, device)
    budget, source = _budget(request, settings, local_world_size, changes.recalled)
    request = fit_sharing(request, budget.host_bytes)
    memory = plan_placement(request, budget)
    held = changes.recalled.held_bytes
    needed = memory.swap_file_bytes if held is None else 0
    nvme = _swap_directories(settings, request, needed, local_world_size)
    warn_if_beyond_machine(memory, local_world_size)
    plan = Plan(
        memory=memory,
        nvme=nvme,
        engine_name=engine.name,
        engine_reason=engine.reason,
        kernels_name=load_kernels().name,
        host_budget_source=source,
        device=str(device.torch_device),
        rss_at_start_bytes=process_bytes("VmRSS")["VmRSS"],
    )
    return Blueprint(settings, plan, units, optimizer, device, groups)


def _placement_request(
    settings: Settings,
    optimizer: ZeroOptimizer | None,
    units: Sequence[UnitBlueprint],
    device: Device,
    ranks: tuple[int, int],
    rates: DriveRates | None,
    whole: WholeTensors,
) -> PlacementRequest:
    """Return what placement goes by; `ranks` are those of the run and those of this node."""
    world_size, local_world_size = ranks
    rule = optimizer.fused.rule if optimizer is not None else UpdateRule.ADAMW
    max_host_numel = settings.parameter_offload.max_host_numel
    return PlacementRequest(
        segments=tuple(spec for unit in units for spec, _ in unit.segments),
        world_size=world_size,
        parameter_tier=settings.parameter_offload.tier,
        optimizer_tier=settings.optimizer_offload.tier,
        state_format=settings.tiers.state_format,
        sub_group_numel=settings.sub_group_numel,
        alignment_bytes=NVME_ALIGNMENT_BYTES,
        trains=optimizer is not None,
        max_host_parameter_numel=(
            max_host_numel // local_world_size if max_host_numel is not None else None
        ),
        start_bytes=start_bytes(units, world_size) if device.is_host else 0,
        slot_count=settings.tiers.slot_count,
        holds_all=settings.tiers.double_backward,
        micro_batches=settings.batch.accumulation_steps,
        rates=rates,
        prefetch_limit=settings.prefetch_limit,
        live_limit=settings.live_limit,
        reuse_numel=settings.reuse_numel,
        durable=settings.tiers.durable is not None,
        device_is_host=device.is_host,
        update_on_device=not device.is_host and updates_on_device(settings, rule),
        replicates=settings.stage < 3,
        rule=rule,
        whole=whole,
        reduction_element=settings.reduction_element,
    )


def _whole_tensors(
    optimizer: ZeroOptimizer | None,
    units: Sequence[UnitBlueprint],
    world_size: int,
    changes: Changes,
) -> WholeTensors:
    if optimizer is None or not isinstance(optimizer.fused, WholeOptimizer):
        return WholeTensors()
    members = [each for unit in units for _, members in unit.segments for each in members]
    return optimizer.fused.assign(members, optimizer.param_groups, world_size, changes.shapes)


def _choose_update_device(
    request: PlacementRequest, settings: Settings, device: Device
) -> PlacementRequest:
    """Let the host update, or share the update, if the choice is "auto".

    It updates alone where that is measured to be much sooner over, and shares where state is
    offloaded to it (`estimators/update_share.py`). The rates of ranks differ, and those of one day
    from another's, but the plans of all ranks and of all starts of a durable run must be alike:
    there the device updates.
    """
    is_free = settings.tiers.update_device == "auto" and request.update_on_device
    if not is_free or request.world_size > 1 or request.durable:
        return request
    if request.optimizer_tier is Tier.DEVICE or not request.trains:
        return request
    rates = measure_update(device, request.state_format, thread_count(1))
    if not device_is_sooner(request, rates):
        return replace(request, update_on_device=False)
    return replace(request, shares_update=may_share(request) and native_available())


def updates_on_device(settings: Settings, rule: UpdateRule | GenericRule) -> bool:
    """Tell whether the optimizer runs on a device that there is: those without a kernel do not.

    Raises:
        ConfigError: if the configuration asks for what cannot be.
    """
    if isinstance(rule, UpdateRule):
        return settings.tiers.update_device != "cpu"
    if settings.tiers.update_device == "device":
        raise ConfigError(
            'tiers.update_device is "device", but this optimizer has no kernel, so its own step'
            ' runs on the host; write "auto" or "cpu", or use AdamW, Adam, Lion, Adagrad or SGD'
        )
    return False


def _check_device(device: Device, settings: Settings) -> None:
    if device.is_host and settings.tiers.update_device == "device":
        raise ConfigError(
            'tiers.update_device is "device", but the model computes on the processor; write "auto"'
            ' or "cpu"'
        )


def _budget(
    request: PlacementRequest, settings: Settings, local_world_size: int, recalled: Recalled
) -> tuple[Budget, str]:
    """Return the budget of a rank: as configured, as a durable run had it, or from the machine."""
    if recalled.host_bytes is None or settings.tiers.host_memory_bytes is not None:
        return node_budget(request, settings, local_world_size)
    given = replace(settings.tiers, host_memory_bytes=recalled.host_bytes * local_world_size)
    budget, _ = node_budget(request, replace(settings, tiers=given), local_world_size)
    return budget, "as the durable run began (auto)"


def _swap_directories(
    settings: Settings, request: PlacementRequest, size_bytes: int, local_world_size: int
) -> tuple[SwapDirectory, ...]:
    """Return where the swap files go, having looked whether they fit there."""
    if not request.durable and Tier.NVME not in (request.parameter_tier, request.optimizer_tier):
        return ()
    if not settings.tiers.nvme:
        raise PlanError("something is offloaded to NVMe but no path is given; set nvme_path")
    return check_paths(settings.tiers.nvme, size_bytes, local_world_size)


def describe_segments(segments: Sequence[SegmentSpec]) -> str:
    """Return one line on how much of the model is trained, frozen and in which types."""
    by_unit: dict[str, int] = {}
    for segment in segments:
        by_unit[segment.unit] = by_unit.get(segment.unit, 0) + sum(segment.numels)
    largest = max(by_unit, key=by_unit.__getitem__, default="")
    trained = sum(sum(segment.numels) for segment in segments if segment.trainable)
    total = sum(sum(segment.numels) for segment in segments)
    types = sorted({segment.element.value for segment in segments})
    share = by_unit.get(largest, 0) / total if total else 0.0
    return (
        f"{total:,} parameters ({trained:,} trained), {', '.join(types) or ElementType.FP32.value};"
        f" units: {len(by_unit)}, the largest ({largest}) has {share:.0%} of the model and is"
        " unsharded as a whole"
    )


def _describe_rates(rates: DriveRates | None) -> str:
    return rates.describe() if rates is not None else "reads and writes are weighed alike"


def plan_table(plan: Plan) -> Table:
    """Return the plan as a table for people."""
    memory = plan.memory
    table = Table(title="Plan for each rank", title_justify="left")
    table.add_column("tier")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    for row in memory.rows():
        name = row.tier.value
        if row.tier is Tier.DEVICE:
            is_host = memory.request.device_is_host
            name = "device (host RAM on this CPU run)" if is_host else f"device ({plan.device})"
        table.add_row(name, row.what, f"{row.size_bytes:,}")
    table.add_section()
    table.add_row("", "host budget", f"{memory.host_budget_bytes:,}")
    table.add_row("", "host planned", f"{memory.host_bytes:,}")
    if memory.request.device_is_host:
        both = memory.host_bytes + memory.device_bytes
        table.add_row("", "RAM in all (host and device)", f"{both:,}")
    if memory.slots.count:
        slots = memory.slots
        table.add_row("", f"{slots.count} slots of", f"{slots.size_bytes:,}")
        where = describe_paths(plan.nvme)
        table.add_row("", f"swap file in {where}", f"{memory.swap_file_bytes:,}")
    request = memory.request
    caption = [
        describe_segments(request.segments),
        f"{len(memory.sub_groups)} sub-groups, state format {request.state_format.value},"
        f" world size {request.world_size}",
        f"I/O engine: {plan.engine_name} ({plan.engine_reason}); kernels: {plan.kernels_name}",
        f"host budget: {plan.host_budget_source}",
        f"drive: {_describe_rates(request.rates)}",
    ]
    if spares_nvme(memory):
        caption.append(NVME_IS_SPARED)
    table.caption = "\n".join(caption)
    table.caption_justify = "left"
    return table
