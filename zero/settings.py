"""Settings after parsing: frozen, complete, with nothing left to resolve but the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from estimators import (
    LIVE_LIMIT,
    NOTHING_STAYS,
    PREFETCH_LIMIT,
    AheadLimit,
    ElementType,
    Persistence,
    StateFormat,
    Tier,
)


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """The lowest tier that something may rest on."""

    tier: Tier = Tier.DEVICE
    pin_memory: bool = False
    max_host_numel: int | None = None
    """Most elements that a node keeps in host memory with the lowest tier NVME; None: no cap."""


@dataclass(frozen=True, slots=True)
class NvmeSettings:
    """One directory for swap files."""

    path: Path
    capacity_bytes: int | None = None
    allow_any_file_system: bool = False
    read_bytes_per_s: int | None = None
    write_bytes_per_s: int | None = None
    """What the drive does, as given; both are known or none."""
    weight: float | None = None
    """Its share beside the others'; None in all of them: measured."""


@dataclass(frozen=True, slots=True)
class DurableSettings:
    """A run that is kept under a name, and how often it commits."""

    name: str
    every_steps: int = 1


@dataclass(frozen=True, slots=True)
class FormatOverride:
    """How the state of the parameters whose names match a pattern is stored."""

    pattern: str
    state_format: StateFormat


@dataclass(frozen=True, slots=True)
class TierSettings:
    """How much of each tier a node gives; None means decided from the machine ("auto")."""

    device: str = "auto"
    """Where the model computes: "cpu", "cuda", or "auto"."""
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    nvme: tuple[NvmeSettings, ...] = ()
    state_format: StateFormat = StateFormat.EXACT
    update_device: str = "auto"
    """Where the optimizer runs: "cpu", "device", or "auto"."""
    format_overrides: tuple[FormatOverride, ...] = ()
    rounding_seed: int = 0
    measures_bandwidth: bool = False
    slot_count: int | None = None
    double_backward: bool = False
    """Whether a backward with `create_graph=True` is planned for."""
    write_burst: int = 0
    measures_schedule: bool = False
    verify: bool = False
    durable: DurableSettings | None = None
    keep_last_checkpoints: int | None = None
    checkpoints_as_stored: bool = False


@dataclass(frozen=True, slots=True)
class AioSettings:
    """How transfers are made."""

    engine: str = "auto"
    block_bytes: int = 1 << 20
    queue_depth: int = 32
    thread_count: int = 4


@dataclass(frozen=True, slots=True)
class NamedFactory:
    """An optimizer or scheduler by name."""

    type_name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The batch triple, resolved for one world size."""

    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the engine works from."""

    batch: BatchSettings
    element: ElementType | None
    """Type that parameters are trained in; None keeps the model's own."""
    stage: int = 3
    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    parameter_offload: OffloadSettings = OffloadSettings()
    optimizer_offload: OffloadSettings = OffloadSettings()
    sub_group_numel: int = 1_000_000_000
    prefetch_limit: AheadLimit = PREFETCH_LIMIT
    """Most parameters that are read ahead of their use."""
    live_limit: AheadLimit = LIVE_LIMIT
    """Parameters unsharded and read ahead together; reading ahead ends there."""
    reuse_numel: int = 0
    """Elements of other units before the next use of one that is kept; 0 keeps none."""
    tiers: TierSettings = TierSettings()
    aio: AioSettings = AioSettings()
    optimizer: NamedFactory | None = None
    scheduler: NamedFactory | None = None
    drop_last_batch: bool = False
    gradient_element: ElementType | None = None
    """Type that gradients accumulate in; None is the parameters' own."""
    reduction_element: ElementType | None = None
    """Type in which several ranks add up gradients; None is the one that they accumulate in."""
    persistence: Persistence = NOTHING_STAYS
    """Which small parameters stay unsharded on the device."""
    autocasts: bool = False
    """Whether forward runs under torch.autocast to bfloat16."""
