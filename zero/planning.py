"""The plan of a model and a configuration, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from aio_ops import Engine, open_engine
from estimators import (
    DriveRates,
    ElementType,
    MemoryPlan,
    PlacementRequest,
    SegmentSpec,
    Tier,
    plan_placement,
)
from offload import load_kernels, process_bytes
from zero.budgets import drive_rates, node_budget, start_bytes, warn_if_beyond_machine
from zero.comm import Communicator
from zero.config import ZeroConfig, load_config, preflight
from zero.config.autos import hidden_size_of
from zero.errors import PlanError
from zero.optimizer import ZeroOptimizer, group_parameters, make_optimizer
from zero.settings import Settings
from zero.units import UnitBlueprint, form_units

NVME_ALIGNMENT_BYTES = 4096
"""Alignment of extents; a file system that asks for more is refused when the file is made."""

ConfigSource = str | Path | Mapping[str, Any] | ZeroConfig


@dataclass(frozen=True)
class Plan:
    """What one rank will allocate and where, and with which engine."""

    memory: MemoryPlan
    nvme_path: Path | None
    engine_name: str
    engine_reason: str
    kernels_name: str
    host_budget_source: str
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
            "device_bytes": self.memory.device_bytes,
            "nvme_path": str(self.nvme_path) if self.nvme_path else None,
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
    """Open the engine that the settings ask for; "auto" tries each in the swap directory."""
    aio = settings.aio
    pages = Tier.NVME in (settings.parameter_offload.tier, settings.optimizer_offload.tier)
    path = settings.tiers.nvme[0].path if pages and settings.tiers.nvme else None
    return open_engine(
        aio.engine,
        directory=path if path is not None and path.is_dir() else None,
        thread_count=aio.thread_count,
        block_bytes=aio.block_bytes,
        queue_depth=aio.queue_depth,
    )


def make_blueprint(
    model: nn.Module,
    settings: Settings,
    optimizer: ZeroOptimizer | None,
    engine: Engine,
    world_size: int,
    local_world_size: int,
) -> Blueprint:
    """Decide units and placement, and check that the disk can hold the plan."""
    units = form_units(
        model, group_parameters(optimizer), settings.element, settings.gradient_element
    )
    request = PlacementRequest(
        segments=tuple(spec for unit in units for spec, _ in unit.segments),
        world_size=world_size,
        parameter_tier=settings.parameter_offload.tier,
        optimizer_tier=settings.optimizer_offload.tier,
        state_format=settings.tiers.state_format,
        sub_group_numel=settings.sub_group_numel,
        alignment_bytes=NVME_ALIGNMENT_BYTES,
        trains=optimizer is not None,
        max_host_parameter_numel=(
            settings.parameter_offload.max_host_numel // local_world_size
            if settings.parameter_offload.max_host_numel is not None
            else None
        ),
        start_bytes=start_bytes(units, world_size),
        slot_count=settings.tiers.slot_count,
        micro_batches=settings.batch.accumulation_steps,
        rates=drive_rates(settings, engine, local_world_size),
    )
    budget, source = node_budget(request, settings, local_world_size)
    memory = plan_placement(request, budget)
    path = settings.tiers.nvme[0].path if settings.tiers.nvme else None
    if Tier.NVME in (request.parameter_tier, request.optimizer_tier):
        if path is None:
            raise PlanError("something is offloaded to NVMe but no path is given; set nvme_path")
        preflight(
            path,
            memory.swap_file_bytes * local_world_size,
            allow_any_file_system=settings.tiers.nvme[0].allow_any_file_system,
        )
    warn_if_beyond_machine(memory, local_world_size)
    plan = Plan(
        memory=memory,
        nvme_path=path,
        engine_name=engine.name,
        engine_reason=engine.reason,
        kernels_name=load_kernels().name,
        host_budget_source=source,
        rss_at_start_bytes=process_bytes("VmRSS")["VmRSS"],
    )
    return Blueprint(settings, plan, units, optimizer)


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
        name = "device (host RAM on this CPU run)" if row.tier is Tier.DEVICE else row.tier.value
        table.add_row(name, row.what, f"{row.size_bytes:,}")
    table.add_section()
    table.add_row("", "host budget", f"{memory.host_budget_bytes:,}")
    table.add_row("", "host planned", f"{memory.host_bytes:,}")
    table.add_row(
        "", "RAM in all (host and device)", f"{memory.host_bytes + memory.device_bytes:,}"
    )
    if memory.slots.count:
        slots = memory.slots
        table.add_row("", f"{slots.count} slots of", f"{slots.size_bytes:,}")
        table.add_row("", f"swap file in {plan.nvme_path}", f"{memory.swap_file_bytes:,}")
    request = memory.request
    caption = [
        describe_segments(request.segments),
        f"{len(memory.sub_groups)} sub-groups, state format {request.state_format.value},"
        f" world size {request.world_size}",
        f"I/O engine: {plan.engine_name} ({plan.engine_reason}); kernels: {plan.kernels_name}",
        f"host budget: {plan.host_budget_source}",
        f"drive: {_describe_rates(request.rates)}",
    ]
    table.caption = "\n".join(caption)
    table.caption_justify = "left"
    return table
