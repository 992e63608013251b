"""Tiers, slots, pager, state formats and the update: knows shards of tensors, no ranks."""

from offload.arrays import array_at, copy_bytes, tensor_at, tensor_span
from offload.kernels import (
    AdamWScalars,
    Kernels,
    load_kernels,
    native_available,
    native_unavailable_reason,
)
from offload.ledger import Activity, Ledger, LedgerSnapshot, Link
from offload.pager import PageError, Pager, PagerFailedError, PagerState
from offload.ranges import (
    Field,
    ShardReader,
    field_dtype,
    has_field,
    read_range,
    write_range,
)
from offload.slots import Slot, SlotState, carve_slots
from offload.spool import Spool, SpooledArray
from offload.step import update
from offload.store import Store, StoreParts
from offload.write import write_parameters

__all__ = [
    "Activity",
    "AdamWScalars",
    "Field",
    "Kernels",
    "Ledger",
    "LedgerSnapshot",
    "Link",
    "PageError",
    "Pager",
    "PagerFailedError",
    "PagerState",
    "ShardReader",
    "Slot",
    "SlotState",
    "Spool",
    "SpooledArray",
    "Store",
    "StoreParts",
    "array_at",
    "carve_slots",
    "copy_bytes",
    "field_dtype",
    "has_field",
    "load_kernels",
    "native_available",
    "native_unavailable_reason",
    "read_range",
    "tensor_at",
    "tensor_span",
    "update",
    "write_parameters",
    "write_range",
]
