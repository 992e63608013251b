"""Pure arithmetic of layout and memory, shared by the estimates and by the allocator."""

from estimators.formats import ElementType, StateField, StateFormat, record_layout
from estimators.layout import (
    SHARD_ALIGNMENT_NUMEL,
    FlatLayout,
    Piece,
    align_up,
    flat_layout,
    shard_bounds,
    shard_pieces,
    split_evenly_bounded,
)
from estimators.placement import Budget, PlanError, plan_placement
from estimators.records import Extent, Section, SubGroup
from estimators.segments import PlacementRequest, SegmentSpec, Tier
from estimators.summary import MemoryPlan, PlanRow, SlotPlan, StepTraffic, step_traffic

__all__ = [
    "SHARD_ALIGNMENT_NUMEL",
    "Budget",
    "ElementType",
    "Extent",
    "FlatLayout",
    "MemoryPlan",
    "Piece",
    "PlacementRequest",
    "PlanError",
    "PlanRow",
    "Section",
    "SegmentSpec",
    "SlotPlan",
    "StateField",
    "StateFormat",
    "StepTraffic",
    "SubGroup",
    "Tier",
    "align_up",
    "flat_layout",
    "plan_placement",
    "record_layout",
    "shard_bounds",
    "shard_pieces",
    "split_evenly_bounded",
    "step_traffic",
]
