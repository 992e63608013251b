"""Set parameters from fp32 masters, with whatever their state keeps of the master.

[Note: whoever writes a parameter writes its residual] In the exact format the parameter and the
residual together are the fp32 master, so setting parameters sets both, and the update writes both
in one transfer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from estimators import ElementType, Section, StateField, StateFormat, SubGroup
from offload.arrays import array_at, clear_bytes, torch_dtype
from offload.codes import quieted, split_short
from offload.host_view import HostView
from offload.kernels import Kernels
from offload.slots import Slot
from offload.state import state_arrays
from offload.store import Store

Array = np.ndarray[Any, Any]


def write_parameters(store: Store, segment: int, masters: Array) -> None:
    """Set the parameter shard of a segment and what its state keeps of the masters.

    Args:
        store: the shards of this rank.
        segment: index of the segment.
        masters: fp32 values, shape `[shard numel]`; their low bits survive in the state of
            16-bit parameters.

    Raises:
        PageError: if a transfer failed.
    """
    store.parameter_version += 1
    spec = store.plan.request.segments[segment]
    state_format = store.plan.request.format_of(spec)
    for group in store.plan.by_segment[segment]:
        values = masters[group.start : group.stop]
        raw, kept = encode_masters(store.kernels, spec.element, state_format, values)
        if group.tier(Section.STATE) is None or _says_nothing(store, group, kept):
            kept = {}
        _write_group(store, group, raw, kept)
    if store.pager is not None:
        store.pager.drain()


def round_like_store(store: Store, segment: int, values: torch.Tensor) -> torch.Tensor:
    """Return values in the type of a segment's parameters, with the bits that storing them gives.

    Returns:
        A tensor of the shape of `values`.
    """
    spec = store.plan.request.segments[segment]
    masters = values.detach().float().contiguous().reshape(-1).numpy()
    raw, _ = encode_masters(
        store.kernels, spec.element, store.plan.request.format_of(spec), masters
    )
    rounded = torch.from_numpy(raw.copy()).view(torch_dtype(spec.element))
    return rounded.view(values.shape)


def encode_masters(
    kernels: Kernels, element: ElementType, state_format: StateFormat, values: Array
) -> tuple[Array, dict[StateField, Array]]:
    """Return the parameter as raw bytes, and the fields of its state that follow from `values`."""
    match element:
        case ElementType.FP32:
            return values.view(np.uint8), {}
        case ElementType.FP16:
            rounded = np.empty(values.size, np.float16)
            kernels.round_to_fp16(values, rounded)
            return rounded.view(np.uint8), {StateField.MASTER: values}
        case ElementType.BF16:
            bits, residual = np.empty(values.size, np.uint16), np.empty(values.size, np.int16)
            kernels.split_master(values, bits, residual)
            if state_format in (StateFormat.EXACT, StateFormat.BF16):
                return bits.view(np.uint8), {StateField.RESIDUAL: residual}
            if state_format is StateFormat.COMPACT:
                short, rest = split_short(quieted(values))
                return short.view(np.uint8), {StateField.RESIDUAL: rest}
            return bits.view(np.uint8), {StateField.MASTER: quieted(values)}
        case _:
            raise ValueError(f"parameters cannot be {element.value}")


def _says_nothing(store: Store, group: SubGroup, kept: dict[StateField, Array]) -> bool:
    """Tell whether a state that is not written, and so is zero, says the same."""
    return (
        group.on_nvme(Section.STATE)
        and group.index not in store.written_states
        and not any(array.any() for array in kept.values())
    )


def _write_group(store: Store, group: SubGroup, raw: Array, kept: dict[StateField, Array]) -> None:
    """Write the parameters of one sub-group and the given fields of its state."""
    store.before_change(group)
    written = frozenset(
        section
        for section, is_set in ((Section.PARAMETER, True), (Section.STATE, bool(kept)))
        if is_set and group.on_nvme(section)
    )
    slot = lend_for_writing(store, group, written) if written else None
    view = HostView(store, group, slot)
    if kept:
        spec = store.plan.request.segments[group.segment]
        state = state_arrays(store.plan, spec, group, view.span(Section.STATE))
        for field, array in (
            (StateField.MASTER, state.master),
            (StateField.RESIDUAL, state.residual),
        ):
            if array is not None:
                array[:] = kept[field]
        view.put_back(Section.STATE)
    target = view.span(Section.PARAMETER, reads=False)
    array_at(target, ElementType.INT16, raw.size // 2).view(np.uint8)[:] = raw
    view.put_back(Section.PARAMETER)
    if slot is not None and store.pager is not None:
        store.pager.page_out(slot, written)
        if Section.STATE in written:
            store.written_states.add(group.index)


def lend_for_writing(store: Store, group: SubGroup, written: frozenset[Section]) -> Slot | None:
    """Return a slot in which everything that will be written, and stays as it is, is right."""
    if group.extent is None or store.pager is None:
        return None
    if Section.STATE in written and group.index in store.written_states:
        return store.pager.page_in(group.extent, written)
    slot = store.pager.blank(group.extent)
    if Section.STATE in written:
        clear_bytes(slot.section(Section.STATE))
    return slot
