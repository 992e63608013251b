"""What placement is asked to place: flat segments of the model, tiers allowed, sizes."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass

from estimators.formats import (
    ElementType,
    GenericRule,
    RecordLayout,
    StateFormat,
    UpdateRule,
    record_layout,
)
from estimators.layout import FlatLayout, flat_layout
from estimators.rates import DriveRates


class Tier(enum.Enum):
    """Where something rests between uses."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """One flat buffer: parameters of a unit alike in dtype, trainability and parameter group."""

    unit: str
    unit_index: int
    names: tuple[str, ...]
    numels: tuple[int, ...]
    element: ElementType
    trainable: bool
    param_group: int
    gradient_element: ElementType | None = None
    """Type that gradients accumulate in; None is the parameters' own."""
    state_format: StateFormat | None = None
    """How its state is stored where that is not as for the rest of the model."""
    persistent: bool = False
    """Whether each rank keeps all of it on the device, see [Note: persistent parameters]."""

    @property
    def name(self) -> str:
        """Name for people: unit, type and group."""
        kind = "trainable" if self.trainable else "frozen"
        kept = f", {self.state_format.value}" if self.state_format is not None else ""
        stays = ", persistent" if self.persistent else ""
        return f"{self.unit}[{self.element.value}, {kind}, group {self.param_group}{kept}{stays}]"

    @property
    def gradient(self) -> ElementType:
        """Type that gradients accumulate in."""
        return self.gradient_element or self.element

    def layout(self, world_size: int) -> FlatLayout:
        """Return the flat layout of the segment over `world_size` ranks."""
        return flat_layout(self.numels, self.element.size_bytes, world_size)


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """What an optimizer that sees whole tensors needs of the rank that needs most."""

    gathered_bytes: int = 0
    """Host bytes of the master and the gradient of the largest parameter."""
    record_bytes: int = 0
    """Bytes of the largest record, which is all that it keeps of one parameter."""
    state_bytes: int = 0
    """Bytes of all its records."""

    @property
    def working_bytes(self) -> int:
        """Host bytes that it takes in a step, wherever records rest; two of them are staged."""
        return self.gathered_bytes + 2 * self.record_bytes


@dataclass(frozen=True, slots=True)
class AheadLimit:
    """A limit to what is read ahead, in elements."""

    numel: int
    is_written: bool = True
    """Whether a user has written it, so that it binds."""

    def at_least(self, needed_numel: int) -> int:
        """Return the limit: what is needed, where nobody has written less."""
        return self.numel if self.is_written else max(self.numel, needed_numel)


NO_LIMIT = AheadLimit(sys.maxsize)
PREFETCH_LIMIT = AheadLimit(50_000_000, is_written=False)
"""`stage3_prefetch_bucket_size`, if it is not written."""
LIVE_LIMIT = AheadLimit(1_000_000_000, is_written=False)
"""`stage3_max_live_parameters`, if it is not written."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Everything that placement decides from."""

    segments: tuple[SegmentSpec, ...]
    world_size: int
    parameter_tier: Tier
    """The lowest tier that parameters may rest on."""
    optimizer_tier: Tier
    """The lowest tier that optimizer state and gradients may rest on."""
    state_format: StateFormat
    sub_group_numel: int
    """Upper bound of the elements of a sub-group."""
    alignment_bytes: int
    """Alignment that the swap file asks for."""
    trains: bool = True
    """False without an optimizer: no gradients and no state."""
    max_host_parameter_numel: int | None = None
    """Most elements of parameters, of one rank, that may rest on the host rather than on NVMe."""
    start_bytes: int = 0
    """Most bytes that the values of parameters take while they are moved to their shards."""
    slot_count: int | None = None
    """How many slots to plan (fewer where they do not fit); None chooses."""
    micro_batches: int = 1
    """Micro-batches of a step: each reads the parameters twice and adds to the gradients."""
    rates: DriveRates | None = None
    """What the drive can do, measured or given; None weighs reads and writes alike."""
    device_is_host: bool = True
    """Whether the device is the processor: then what rests on the host is used where it rests."""
    update_on_device: bool = False
    """Whether state passes through a device that is not the host, to be updated there."""
    shares_update: bool = False
    """Whether the host updates some of the sub-groups meanwhile, those that rest there."""
    prefetch_limit: AheadLimit = NO_LIMIT
    """Most elements that are read, or copied to a device, ahead of their use."""
    live_limit: AheadLimit = NO_LIMIT
    """Most elements of unsharded parameters at which that is still done."""
    reuse_numel: int = 0
    """Most elements of other units between two uses of one that is kept meanwhile; 0 keeps none."""
    holds_all: bool = False
    """Whether every unit may be unsharded at once, after a backward with `create_graph=True`."""
    durable: bool = False
    """Whether the swap file has two copies of parameters and state, resident ones too."""
    replicates: bool = False
    """Whether each rank has all parameters in full, on the device, its own shard among them."""
    whole: WholeTensors = WholeTensors()
    """What an optimizer that sees whole tensors needs."""
    rule: UpdateRule | GenericRule = UpdateRule.ADAMW
    """The optimizer, which decides which moments are stored."""
    reduction_element: ElementType | None = None
    """Type in which several ranks add up gradients; None is the one that they accumulate in."""

    @property
    def pages_whole_tensors(self) -> bool:
        """Whether records of whole tensors may rest on NVMe; a durable run keeps them there."""
        return self.durable or self.optimizer_tier is Tier.NVME

    def format_of(self, segment: SegmentSpec) -> StateFormat:
        """Return how the state of a segment is stored; without a kernel it is never lossy."""
        chosen = segment.state_format or self.state_format
        is_generic = isinstance(self.rule, GenericRule)
        return StateFormat.EXACT if is_generic and chosen.is_lossy else chosen

    def rounds(self, segment: SegmentSpec) -> bool:
        """Tell whether an update of a segment rounds by random bits."""
        lossy = self.format_of(segment).is_lossy and segment.element is ElementType.BF16
        return lossy and segment.trainable and self.trains

    def reduction_of(self, segment: SegmentSpec) -> ElementType:
        """Return the type in which several ranks add up the gradients of a segment."""
        return self.reduction_element or segment.gradient

    def record_of(self, segment: SegmentSpec, numel: int) -> RecordLayout:
        """Lay out the record of `numel` elements of a segment."""
        return record_layout(self.format_of(segment), segment.element, numel, self.rule)
