"""Tiers, slots, pager, state formats and the update: knows shards of tensors, no ranks."""

from offload.arrays import array_at, copy_bytes, tensor_at, tensor_span
from offload.footprint import disk_bytes, process_bytes, resident_set_bytes
from offload.heap import HeapTrimmer
from offload.kernels import (
    AdamWScalars,
    Kernels,
    load_kernels,
    native_available,
    native_unavailable_reason,
)
from offload.ledger import Activity, Ledger, LedgerSnapshot, Link
from offload.measure import measure_rates
from offload.pager import Pager, PagerFailedError, PagerState
from offload.ranges import (
    Field,
    ShardReader,
    ensure_gradient,
    field_dtype,
    has_field,
    read_range,
    write_range,
)
from offload.report import LedgerReport, StepRecord
from offload.slots import Slot, SlotState, carve_slots
from offload.spool import Spool, SpooledArray
from offload.step import update
from offload.store import Store, StoreParts, SwapDirectory
from offload.transfers import CorruptionError, PageError, SlotTransfers
from offload.write import round_like_store, write_parameters

__all__ = [
    "Activity",
    "AdamWScalars",
    "CorruptionError",
    "Field",
    "HeapTrimmer",
    "Kernels",
    "Ledger",
    "LedgerReport",
    "LedgerSnapshot",
    "Link",
    "PageError",
    "Pager",
    "PagerFailedError",
    "PagerState",
    "ShardReader",
    "Slot",
    "SlotState",
    "SlotTransfers",
    "Spool",
    "SpooledArray",
    "StepRecord",
    "Store",
    "StoreParts",
    "SwapDirectory",
    "array_at",
    "carve_slots",
    "copy_bytes",
    "disk_bytes",
    "ensure_gradient",
    "field_dtype",
    "has_field",
    "load_kernels",
    "measure_rates",
    "native_available",
    "native_unavailable_reason",
    "process_bytes",
    "read_range",
    "resident_set_bytes",
    "round_like_store",
    "tensor_at",
    "tensor_span",
    "update",
    "write_parameters",
    "write_range",
]
