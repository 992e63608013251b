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
from offload.slots import Slot, SlotState, carve_slots
from offload.step import update
from offload.store import Store, StoreParts, SwapDirectory
from offload.write import write_parameters

__all__ = [
    "Activity",
    "AdamWScalars",
    "Kernels",
    "Ledger",
    "LedgerSnapshot",
    "Link",
    "PageError",
    "Pager",
    "PagerFailedError",
    "PagerState",
    "Slot",
    "SlotState",
    "Store",
    "StoreParts",
    "SwapDirectory",
    "array_at",
    "carve_slots",
    "copy_bytes",
    "load_kernels",
    "native_available",
    "native_unavailable_reason",
    "tensor_at",
    "tensor_span",
    "update",
    "write_parameters",
]
