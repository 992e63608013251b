"""Pure arithmetic of layout and memory, shared by the estimates and by the allocator."""

from estimators.field import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from estimators.formats import (
    CODE_BLOCK_NUMEL,
    EXTRA_FIELDS,
    ElementType,
    GenericRule,
    RecordLayout,
    StateField,
    StateFormat,
    UpdateRule,
    record_fields,
    record_layout,
)
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
from estimators.persistence import NOTHING_STAYS, Persistence
from estimators.placement import Budget, PlanError, minimum_host_bytes, plan_placement
from estimators.rates import ASSUMED_RATES, DriveRates
from estimators.records import Extent, ResidentCopy, Section, SubGroup
from estimators.segments import PlacementRequest, SegmentSpec, Tier, WholeTensors
from estimators.summary import MemoryPlan, PlanRow, SlotPlan, StepTraffic, step_traffic
from estimators.update_device import UpdateRates, device_is_sooner, update_seconds

__all__ = [
    "ASSUMED_RATES",
    "CODE_BLOCK_NUMEL",
    "EXTRA_FIELDS",
    "NOTHING_STAYS",
    "SHARD_ALIGNMENT_NUMEL",
    "Budget",
    "DriveRates",
    "ElementType",
    "Extent",
    "FlatLayout",
    "GenericRule",
    "MemoryPlan",
    "Persistence",
    "Piece",
    "PlacementRequest",
    "PlanError",
    "PlanRow",
    "RecordLayout",
    "ResidentCopy",
    "Section",
    "SegmentSpec",
    "SlotPlan",
    "StateField",
    "StateFormat",
    "StepTraffic",
    "SubGroup",
    "Tier",
    "UpdateRates",
    "UpdateRule",
    "WholeTensors",
    "align_up",
    "device_is_sooner",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "flat_layout",
    "minimum_host_bytes",
    "plan_placement",
    "record_fields",
    "record_layout",
    "shard_bounds",
    "shard_pieces",
    "split_evenly_bounded",
    "step_traffic",
    "update_seconds",
]
