"""Tiers, slots, pager, state formats and the update: knows shards of tensors, no ranks."""

from offload.arrays import array_at, copy_bytes, tensor_at, tensor_span
from offload.codes import RoundingKey
from offload.commits import StoreCommits, layout_digest
from offload.copies import Copies, CopyEntry
from offload.device import (
    Device,
    DeviceMemory,
    HostDevice,
    Memory,
    elements_at,
    open_cuda_device,
)
from offload.device_checksums import DeviceChecksums, checksums_of_all
from offload.footprint import disk_bytes, process_bytes, resident_set_bytes
from offload.generic import GenericStep
from offload.heap import HeapTrimmer
from offload.kernels import (
    Kernels,
    load_kernels,
    native_available,
    native_unavailable_reason,
)
from offload.kernels_device import (
    DeviceKernels,
    add_block_sums,
    load_device_kernels,
    triton_unavailable_reason,
)
from offload.ledger import Activity, Ledger, LedgerSnapshot, Link
from offload.manifests import Commit, CommitName, ManifestError, Manifests
from offload.measure import measure_rates
from offload.measure_update import measure_update
from offload.operands import StateArrays
from offload.pager import Pager, PagerFailedError, PagerState
from offload.ranges import (
    Field,
    ShardReader,
    ensure_gradient,
    field_dtype,
    has_field,
    read_range,
    stored_dtype,
    write_range,
)
from offload.report import LedgerReport, StepRecord
from offload.rules import (
    AdagradScalars,
    AdamScalars,
    AdamWScalars,
    LionScalars,
    SgdScalars,
    UpdateScalars,
)
from offload.slots import Slot, SlotState, carve_slots
from offload.spool import Spool, SpooledArray
from offload.state import state_tensors, update_sub_group
from offload.step import read_ahead_states, update
from offload.store import KeptFile, Store, StoreParts, SwapDirectory, pages_parameters
from offload.transfers import CorruptionError, PageError, SlotTransfers
from offload.update_pass import NamedPiece, Rounding
from offload.write import round_like_store, write_parameters
from offload.write_device import write_parameters_on_device

__all__ = [
    "Activity",
    "AdagradScalars",
    "AdamScalars",
    "AdamWScalars",
    "Commit",
    "CommitName",
    "Copies",
    "CopyEntry",
    "CorruptionError",
    "Device",
    "DeviceChecksums",
    "DeviceKernels",
    "DeviceMemory",
    "Field",
    "GenericStep",
    "HeapTrimmer",
    "HostDevice",
    "KeptFile",
    "Kernels",
    "Ledger",
    "LedgerReport",
    "LedgerSnapshot",
    "Link",
    "LionScalars",
    "ManifestError",
    "Manifests",
    "Memory",
    "NamedPiece",
    "PageError",
    "Pager",
    "PagerFailedError",
    "PagerState",
    "Rounding",
    "RoundingKey",
    "SgdScalars",
    "ShardReader",
    "Slot",
    "SlotState",
    "SlotTransfers",
    "Spool",
    "SpooledArray",
    "StateArrays",
    "StepRecord",
    "Store",
    "StoreCommits",
    "StoreParts",
    "SwapDirectory",
    "UpdateScalars",
    "add_block_sums",
    "array_at",
    "carve_slots",
    "checksums_of_all",
    "copy_bytes",
    "disk_bytes",
    "elements_at",
    "ensure_gradient",
    "field_dtype",
    "has_field",
    "layout_digest",
    "load_device_kernels",
    "load_kernels",
    "measure_rates",
    "measure_update",
    "native_available",
    "native_unavailable_reason",
    "open_cuda_device",
    "pages_parameters",
    "process_bytes",
    "read_ahead_states",
    "read_range",
    "resident_set_bytes",
    "round_like_store",
    "state_tensors",
    "stored_dtype",
    "tensor_at",
    "tensor_span",
    "triton_unavailable_reason",
    "update",
    "update_sub_group",
    "write_parameters",
    "write_parameters_on_device",
    "write_range",
]
