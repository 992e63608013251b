"""The arrays of one record, and the update of one sub-group on them.

On the host they are numpy arrays, on a device tensors; the kernels of either have the same calls.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from aio_ops import Span
from estimators import MemoryPlan, RecordLayout, SegmentSpec, StateField, SubGroup
from offload.arrays import array_at, torch_dtype
from offload.codes import (
    RoundingKey,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    join_short,
    to_bf16,
)
from offload.generic import GenericStep
from offload.kernel_calls import Array
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


def moment_values(state: StateArrays, field: StateField) -> Values:
    """Return a moment of a record on the host in fp32, or None if the record does not keep it."""
    stored = state.get(field)
    if stored is None or stored.dtype == np.float32:
        return stored
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if field is StateField.EXP_AVG:
        return decode_signed(stored, state.exp_avg_base)
    return decode_unsigned(stored, state.exp_avg_sq_base)


def stored_values(state: StateArrays, field: StateField, dtype: torch.dtype) -> Array:
    """Return a moment of a record on the host as it is stored, or, if that is asked for by their
    type, the bases of its codes.

    Raises:
        TypeError: if it is not stored in that type.
    """
    values = state.get(field)
    if dtype is torch.uint16:
        values = state.exp_avg_base if field is StateField.EXP_AVG else state.exp_avg_sq_base
    wanted = {torch.bfloat16: np.uint16, torch.uint8: np.uint8, torch.uint16: np.uint16}
    if values is None or values.dtype != wanted.get(dtype):
        raise TypeError(f"{field.value} is not stored as {dtype}")
    return cast("Array", values)


def decode_stored(field: StateField, values: torch.Tensor, bases: Array | None) -> torch.Tensor:
    """Return in fp32 what stored elements of a moment stand for.

    Args:
        field: the moment.
        values: fp32, bf16, or codes from a block's start on.
        bases: of the codes, from their first block on.
    """
    if values.dtype is torch.float32:
        return values
    if values.dtype is torch.bfloat16:
        bits = values.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return torch.from_numpy((bits << np.uint32(16)).view(np.float32))
    if values.dtype is not torch.uint8 or bases is None:
        raise TypeError(f"a moment cannot be stored as {values.dtype}")
    decode = decode_signed if field is StateField.EXP_AVG else decode_unsigned
    return torch.from_numpy(decode(values.numpy(), bases))


def put_moment(state: StateArrays, field: StateField, first: int, values: Array) -> None:
    """Set elements of a moment of a record on the host from fp32 values, rounded to nearest.

    What was read and is put back stays the same, also the other elements of a block. Those at its
    least, as padding is, stay at the least: else padding would keep the base from going down.
    """
    stored = state.get(field)
    inside = slice(first, first + values.size)
    if stored.dtype == np.float32:
        stored[inside] = values
    elif stored.dtype == np.uint16:
        stored[inside] = to_bf16(np.ascontiguousarray(values))
    else:
        whole = np.where(stored != 0, moment_values(state, field), np.float32(0))
        whole[inside] = values
        encode = encode_signed if field is StateField.EXP_AVG else encode_unsigned
        bases = state.exp_avg_base if field is StateField.EXP_AVG else state.exp_avg_sq_base
        stored[:], bases[:] = encode(whole)


def master_values(kernels: Kernels, parameter: Array, state: StateArrays) -> Values:
    """Return the fp32 masters of 16-bit parameters on the host, or None if none are kept."""
    if state.master is not None:
        return state.master
    if state.residual is None:
        return None
    if state.residual.dtype == np.int8:
        return join_short(parameter, state.residual)
    master = np.empty(parameter.size, np.float32)
    kernels.join_master(parameter, state.residual, master)
    return master


def update_sub_group(
    kernels: Kernels | DeviceKernels,
    parameter: Values,
    gradient: Values,
    state: StateArrays,
    scalars: UpdateScalars | GenericStep,
    key: RoundingKey | None = None,
) -> None:
    """Update one sub-group in place, all on the host or all on one device.

    Raises:
        TypeError: if an optimizer without a kernel is to run on tensors of a device.
    """
    if isinstance(scalars, GenericStep) and isinstance(parameter, np.ndarray):
        scalars.apply(cast("Kernels", kernels), parameter, gradient, state)
        return
    kernels.update(parameter, gradient, state, kernel_scalars(scalars), key)


def kernel_scalars(scalars: UpdateScalars | GenericStep) -> UpdateScalars:
    """Return the scalars of an update by a kernel.

    Raises:
        TypeError: if the optimizer has none.
    """
    if isinstance(scalars, GenericStep):
        raise TypeError(
            "an optimizer without a kernel updates on the host: set update_device to cpu"
        )
    return scalars
