"""What a plan is made from: a model, how it is trained, and what a node gives."""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from estimators.activations import Batch
from estimators.formats import ElementType, GenericRule, StateFormat, UpdateRule
from estimators.hardware import Bandwidths, bandwidths_of
from estimators.models import ModelShape, ParameterShape
from estimators.persistence import NOTHING_STAYS, Persistence
from estimators.placement import Budget, PlanError
from estimators.rates import DriveRates
from estimators.segments import (
    LIVE_LIMIT,
    PREFETCH_LIMIT,
    AheadLimit,
    PlacementRequest,
    SegmentSpec,
    Tier,
    WholeTensors,
)
from estimators.start import StartTensor, start_bytes
from estimators.update_share import may_share

ROOT_UNIT = "<root>"
NVME_ALIGNMENT_BYTES = 4096
"""Alignment of extents; a file system that asks for more is refused when the file is made."""


class DeviceKind(enum.Enum):
    """Where forward and backward run."""

    CPU = "cpu"
    """The device is host memory as well."""
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Node:
    """What each node has; None means that no limit is known."""

    device: DeviceKind = DeviceKind.CUDA
    gpus: int = 1
    """Devices, and so ranks, of a node."""
    count: int = 1
    device_bytes: int | None = None
    """Memory of each device."""
    host_bytes: int | None = None
    """Host budget of the node; None holds everything that may rest there."""
    host_memory_bytes: int | None = None
    """All memory of the node, of which the host budget is a part; None is not looked at."""
    nvme_bytes: int | None = None
    bandwidths: Bandwidths = field(default_factory=lambda: bandwidths_of(None))
    drive_bytes: int | None = None
    """Size of the node's drives, for drive writes a day; None takes `nvme_bytes`."""
    rated_written_bytes: float | None = None
    """What the drives may write in their life (TBW)."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.count < 1:
            raise ValueError(
                f"a plan needs at least one device on at least one node, got {self.gpus} and"
                f" {self.count}"
            )

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.gpus * self.count


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything that an estimate follows from; plain data."""

    model: ModelShape
    node: Node = field(default_factory=Node)
    batch: Batch = field(default_factory=Batch)
    accumulation_steps: int = 1
    element: ElementType = ElementType.BF16
    """Type of the parameters in training."""
    keeps_elements: bool = False
    """Whether parameters of which it is known train in the type that they are built in."""
    gradient_element: ElementType | None = None
    reduction_element: ElementType | None = None
    """Type in which ranks add up gradients; None is the one that they accumulate in."""
    parameter_tier: Tier = Tier.DEVICE
    optimizer_tier: Tier = Tier.DEVICE
    state_format: StateFormat = StateFormat.EXACT
    sub_group_numel: int = 1_000_000_000
    slot_count: int | None = None
    holds_all: bool = False
    """Whether a backward with `create_graph=True` holds every unit."""
    max_host_parameter_numel: int | None = None
    trains: bool = True
    stage: int = 3
    """ZeRO stage; below 3 each rank has all parameters in full, on the device."""
    persistence: Persistence = NOTHING_STAYS
    """Which small parameters stay on the device."""
    rule: UpdateRule | GenericRule = UpdateRule.ADAMW
    whole: WholeTensors = field(default_factory=WholeTensors)
    """What an optimizer that sees whole tensors needs, on `node.world_size` ranks."""
    parameter_groups: tuple[frozenset[str], ...] = ()
    """Names of the trained parameters of each parameter group; empty for a single one."""
    format_overrides: tuple[tuple[str, StateFormat], ...] = ()
    """Patterns of names, and how the state of parameters is stored that match; the first counts."""
    prefetch_limit: AheadLimit = PREFETCH_LIMIT
    """`stage3_prefetch_bucket_size`: what may be copied to a device ahead."""
    live_limit: AheadLimit = LIVE_LIMIT
    """`stage3_max_live_parameters`."""
    reuse_numel: int = 1_000_000_000
    """`stage3_max_reuse_distance`."""
    is_durable: bool = False
    commit_steps: int = 1
    """Steps between two commits of a durable run."""
    device_budget_bytes: int | None = None
    """What a rank may put on a GPU, activations aside: what is spare of it takes what would rest
    below (`tiers.device_memory`); None moves nothing up."""
    updates_on_device: bool = True
    """Whether a GPU updates what rests below it; else the processor does."""
    shares_update: bool = True
    """Whether the processor updates some of it meanwhile, where it can."""
    built_on_meta: bool = True
    """Whether parameters get their values only when they are sharded."""
    built_element: ElementType = ElementType.FP32
    """Type in which the model is built, where that is not known of each parameter."""
    placement_rates: DriveRates | None = None
    """A rank's share of the drive's rates, as far as the allocator will know them: those of the
    configuration. What else is known (`node.bandwidths`) tells the time alone."""

    def __post_init__(self) -> None:
        if self.accumulation_steps < 1:
            raise ValueError(
                f"accumulation_steps must be at least 1, got {self.accumulation_steps}"
            )


def units_of(
    model: ModelShape, persistent: Collection[str] = ()
) -> list[tuple[str, list[ParameterShape]]]:
    """Return the units of a model as `zero.units` forms them: the root unit, then each block.

    Parameters that stay on the device, given by name, belong to the root.
    """
    units: dict[str, list[ParameterShape]] = {name: [] for name in ("", *model.blocks)}
    for each in model.parameters:
        units["" if each.name in persistent else each.block].append(each)
    return [(name or ROOT_UNIT, members) for name, members in units.items()]


def element_of(inputs: PlanInputs, parameter: ParameterShape) -> ElementType:
    """Return the type that a parameter has in training."""
    own = parameter.element if inputs.keeps_elements else None
    return own or inputs.element


def state_format_of(inputs: PlanInputs, parameter: ParameterShape) -> StateFormat | None:
    """Return how the state of a parameter is stored, None being as for the rest of the model.

    The same as `zero.state_formats` decides: the first override that matches counts; without one
    `compact` keeps embeddings and parameters of one dimension exact.
    """
    usual = inputs.state_format
    if element_of(inputs, parameter) is not ElementType.BF16 or not _is_trained(inputs, parameter):
        return None
    chosen = usual
    if usual is StateFormat.COMPACT and (len(parameter.shape) < 2 or parameter.is_embedding):
        chosen = StateFormat.EXACT
    for pattern, other in inputs.format_overrides:
        if fnmatch.fnmatchcase(parameter.name, pattern):
            chosen = other
            break
    return None if chosen is usual else chosen


def persistent_names(inputs: PlanInputs) -> frozenset[str]:
    """Return the parameters that stay on the device, see [Note: persistent parameters]."""
    limits = inputs.persistence.where(
        stage=inputs.stage,
        world_size=inputs.node.world_size,
        parameter_tier=inputs.parameter_tier,
        device_is_host=inputs.node.device is DeviceKind.CPU,
    )
    shapes = inputs.model.parameters
    chosen = limits.choose([each.numel for each in shapes])
    return frozenset(each.name for each, stays in zip(shapes, chosen, strict=True) if stays)


def _is_trained(inputs: PlanInputs, parameter: ParameterShape) -> bool:
    return inputs.trains and parameter.is_trainable


def segments_of(inputs: PlanInputs) -> tuple[SegmentSpec, ...]:
    """Return the segments of a model."""
    segments: list[SegmentSpec] = []
    groups = {name: i for i, names in enumerate(inputs.parameter_groups) for name in names}
    persistent = persistent_names(inputs)
    for index, (name, members) in enumerate(units_of(inputs.model, persistent)):
        keyed: dict[tuple[ElementType, int, StateFormat | None, bool], list[ParameterShape]] = {}
        for each in members:
            group = groups.get(each.name, 0) if _is_trained(inputs, each) else -1
            kept = state_format_of(inputs, each)
            key = element_of(inputs, each), group, kept, each.name in persistent
            keyed.setdefault(key, []).append(each)
        segments += [
            SegmentSpec(
                unit=name,
                unit_index=index,
                names=tuple(each.name for each in chosen),
                numels=tuple(each.numel for each in chosen),
                element=element,
                trainable=group >= 0,
                param_group=max(group, 0),
                gradient_element=inputs.gradient_element,
                state_format=kept,
                persistent=stays,
            )
            for (element, group, kept, stays), chosen in keyed.items()
        ]
    return tuple(segments)


def placement_request(inputs: PlanInputs) -> PlacementRequest:
    """Return what the allocator is asked to place for one rank."""
    segments = segments_of(inputs)
    world_size, gpus = inputs.node.world_size, inputs.node.gpus
    cap = inputs.max_host_parameter_numel
    is_host = inputs.node.device is DeviceKind.CPU
    tensors = [
        [
            StartTensor(
                each.numel,
                (each.element or inputs.built_element).size_bytes * each.numel,
                inputs.built_on_meta,
            )
            for each in members
        ]
        for _, members in units_of(inputs.model, persistent_names(inputs))
    ]
    shards = [each.layout(world_size).shard_numel for each in segments]
    request = PlacementRequest(
        segments=segments,
        world_size=world_size,
        parameter_tier=inputs.parameter_tier,
        optimizer_tier=inputs.optimizer_tier,
        state_format=inputs.state_format,
        sub_group_numel=inputs.sub_group_numel,
        alignment_bytes=NVME_ALIGNMENT_BYTES,
        trains=inputs.trains,
        max_host_parameter_numel=cap // gpus if cap is not None else None,
        start_bytes=start_bytes(tensors, shards, world_size) if is_host else 0,
        slot_count=inputs.slot_count,
        holds_all=inputs.holds_all,
        micro_batches=inputs.accumulation_steps,
        rates=inputs.placement_rates,
        prefetch_limit=inputs.prefetch_limit,
        live_limit=inputs.live_limit,
        reuse_numel=inputs.reuse_numel,
        durable=inputs.is_durable,
        device_is_host=is_host,
        update_on_device=(
            not is_host and inputs.updates_on_device and isinstance(inputs.rule, UpdateRule)
        ),
        replicates=inputs.stage < 3,
        rule=inputs.rule,
        whole=inputs.whole,
        reduction_element=inputs.reduction_element,
    )
    return replace(request, shares_update=inputs.shares_update and may_share(request))


def rank_budget(inputs: PlanInputs, in_play_bytes: int) -> Budget:
    """Return one rank's share of the budgets; limits of the machine are looked at later.

    Raises:
        PlanError: if the share is nothing.
    """
    node = inputs.node
    if node.host_bytes is None:
        return Budget(in_play_bytes, inputs.device_budget_bytes, ranks=node.gpus)
    share = node.host_bytes // node.gpus
    if share <= 0:
        raise PlanError(
            f"{node.host_bytes} bytes of host memory are left for {node.gpus} ranks, which is none"
            " for each; give more (a number without a unit is bytes: 64GB, not 64)"
        )
    return Budget(share, inputs.device_budget_bytes, ranks=node.gpus)
