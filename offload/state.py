"""The arrays of one record, and the update of one sub-group on them.

On the host they are numpy arrays, on a device tensors; the kernels of either have the same calls.
"""

from __future__ import annotations

import torch

from aio_ops import Span
from estimators import MemoryPlan, RecordLayout, SegmentSpec, SubGroup
from offload.arrays import array_at, torch_dtype
from offload.codes import RoundingKey
from offload.kernels import Kernels
from offload.kernels_device import DeviceKernels
from offload.operands import StateArrays, Values
from offload.rules import UpdateScalars


def state_arrays(plan: MemoryPlan, spec: SegmentSpec, group: SubGroup, span: Span) -> StateArrays:
    """View the memory of a record as its arrays."""
    layout = plan.request.record_of(spec, group.numel)
    views = {
        field.field: array_at(
            span.sub(field.offset_bytes, field.size_bytes), field.element, field.numel
        )
        for field in layout.fields
    }
    return StateArrays.of(views)


def state_tensors(layout: RecordLayout, record: torch.Tensor) -> StateArrays:
    """View the bytes of a record on a device, a flat uint8 tensor, as tensors of its fields."""
    if record.dtype is not torch.uint8 or record.numel() < layout.size_bytes:
        raise ValueError(
            f"a record of {layout.numel} elements has {layout.size_bytes} bytes (uint8), got"
            f" {record.numel()} elements of {record.dtype}"
        )
    return StateArrays.of(
        {
            field.field: record[field.offset_bytes : field.offset_bytes + field.size_bytes].view(
                torch_dtype(field.element)
            )
            for field in layout.fields
        }
    )


def update_sub_group(
    kernels: Kernels | DeviceKernels,
    parameter: Values,
    gradient: Values,
    state: StateArrays,
    scalars: UpdateScalars,
    key: RoundingKey | None = None,
) -> None:
    """Update one sub-group in place, all on the host or all on one device."""
    kernels.update(parameter, gradient, state, scalars, key)
