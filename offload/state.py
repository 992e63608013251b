"""The arrays of one record, and the update of one sub-group on them.

On the host they are numpy arrays, on a device tensors; the kernels of either have the same calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from aio_ops import Span
from estimators import (
    MemoryPlan,
    RecordLayout,
    SegmentSpec,
    StateField,
    SubGroup,
    record_layout,
)
from offload.arrays import array_at, torch_dtype
from offload.kernels import AdamWScalars, Kernels
from offload.kernels_device import DeviceKernels

Array = np.ndarray[Any, Any]
Values: TypeAlias = Any
"""An array on the host, or a tensor on a device."""


@dataclass(frozen=True, slots=True)
class StateArrays:
    """Views of one record, each shape `[sub-group numel]`; absent fields are None."""

    exp_avg: Values
    exp_avg_sq: Values
    master: Values | None = None
    residual: Values | None = None

    def part(self, inside: slice) -> StateArrays:
        """Return the arrays of some of the elements."""
        return StateArrays(
            self.exp_avg[inside],
            self.exp_avg_sq[inside],
            self.master[inside] if self.master is not None else None,
            self.residual[inside] if self.residual is not None else None,
        )


def state_arrays(plan: MemoryPlan, spec: SegmentSpec, group: SubGroup, span: Span) -> StateArrays:
    """View the memory of a record as its arrays."""
    layout = record_layout(plan.request.state_format, spec.element, group.numel)
    views = {
        field.field: array_at(
            span.sub(field.offset_bytes, field.size_bytes), field.element, group.numel
        )
        for field in layout.fields
    }
    return _named(views)


def state_tensors(layout: RecordLayout, record: torch.Tensor) -> StateArrays:
    """View the bytes of a record on a device, a flat uint8 tensor, as tensors of its fields."""
    if record.dtype is not torch.uint8 or record.numel() < layout.size_bytes:
        raise ValueError(
            f"a record of {layout.numel} elements has {layout.size_bytes} bytes (uint8), got"
            f" {record.numel()} elements of {record.dtype}"
        )
    return _named(
        {
            field.field: record[field.offset_bytes : field.offset_bytes + field.size_bytes].view(
                torch_dtype(field.element)
            )
            for field in layout.fields
        }
    )


def _named(views: dict[StateField, Values]) -> StateArrays:
    return StateArrays(
        exp_avg=views[StateField.EXP_AVG],
        exp_avg_sq=views[StateField.EXP_AVG_SQ],
        master=views.get(StateField.MASTER),
        residual=views.get(StateField.RESIDUAL),
    )


def update_sub_group(
    kernels: Kernels | DeviceKernels,
    parameter: Values,
    gradient: Values,
    state: StateArrays,
    scalars: AdamWScalars,
) -> None:
    """Run AdamW on one sub-group in place, all on the host or all on one device."""
    moments = (state.exp_avg, state.exp_avg_sq)
    if state.residual is not None:
        kernels.adamw_exact(parameter, state.residual, gradient, *moments, scalars)
    elif state.master is not None:
        kernels.adamw_master(parameter, state.master, gradient, *moments, scalars)
    else:
        kernels.adamw_fp32(parameter, gradient, *moments, scalars)
