"""The arrays of one record, and the update of one sub-group on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aio_ops import Span
from estimators import MemoryPlan, SegmentSpec, StateField, SubGroup, record_layout
from offload.arrays import array_at
from offload.kernels import AdamWScalars, Kernels

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class StateArrays:
    """Views of one record, each shape `[sub-group numel]`; absent fields are None."""

    exp_avg: Array
    exp_avg_sq: Array
    master: Array | None = None
    residual: Array | None = None

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
    return StateArrays(
        exp_avg=views[StateField.EXP_AVG],
        exp_avg_sq=views[StateField.EXP_AVG_SQ],
        master=views.get(StateField.MASTER),
        residual=views.get(StateField.RESIDUAL),
    )


def update_sub_group(
    kernels: Kernels,
    parameter: Array,
    gradient: Array,
    state: StateArrays,
    scalars: AdamWScalars,
) -> None:
    """Run AdamW on one sub-group in place; parameter and gradient are fp32 or bf16 bits."""
    moments = (state.exp_avg, state.exp_avg_sq)
    if state.residual is not None:
        kernels.adamw_exact(parameter, state.residual, gradient, *moments, scalars)
    elif state.master is not None:
        kernels.adamw_master(parameter, state.master, gradient, *moments, scalars)
    else:
        kernels.adamw_fp32(parameter, gradient, *moments, scalars)
