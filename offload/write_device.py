"""Set parameters from fp32 masters that lie on a device, as `offload/write.py` does on the host."""

from __future__ import annotations

import torch

from estimators import ElementType, Section, StateField, StateFormat, SubGroup
from offload.device import PASSED, Fence, last_of
from offload.store import Store
from offload.write import lend_for_writing, write_parameters

_LOW_HALF = 0xFFFF
"""The bits of an fp32 value that a bf16 value does not have."""


def write_parameters_on_device(store: Store, segment: int, masters: torch.Tensor) -> None:
    """Set the parameter shard of a segment and what its state keeps of the masters.

    Args:
        store: the shards of this rank.
        segment: index of the segment.
        masters: fp32 values on the device, shape `[shard numel]`, as in `write_parameters`.

    Raises:
        PageError: if a transfer failed.
    """
    if _is_for_host(store, segment, masters):
        write_parameters(store, segment, masters.cpu().numpy())
        return
    store.parameter_version += 1
    for group in store.plan.by_segment[segment]:
        values = masters[group.start : group.stop]
        raw, kept = _encode(store, segment, values)
        if group.tier(Section.STATE) is None or _says_nothing(store, group, kept):
            kept = {}
        store.before_change(group)
        fence = _write_group(store, group, raw, kept)
        store.device.join(fence)  # the encoded values are freed now
        store.update_fence = last_of(store.update_fence, fence)
    if store.pager is not None:
        store.pager.drain()


def _is_for_host(store: Store, segment: int, masters: torch.Tensor) -> bool:
    """Tell whether only the host can encode masters: compact ones that are no bf16 values."""
    request = store.plan.request
    spec = request.segments[segment]
    if request.format_of(spec) is not StateFormat.COMPACT or spec.element is not ElementType.BF16:
        return False
    is_other = masters.isnan()
    is_other |= (masters.view(torch.int32) & _LOW_HALF) != 0
    return bool(is_other.any())


def _encode(
    store: Store, segment: int, values: torch.Tensor
) -> tuple[torch.Tensor, dict[StateField, torch.Tensor]]:
    """Return the parameters in their type, and the fields of the state that follow."""
    kernels = store.device_kernels
    spec = store.plan.request.segments[segment]
    element, state_format = spec.element, store.plan.request.format_of(spec)
    match element:
        case ElementType.FP32:
            return values, {}
        case ElementType.FP16:
            rounded = torch.empty_like(values, dtype=torch.float16)
            kernels.round_to_fp16(values, rounded)
            return rounded, {StateField.MASTER: values}
        case ElementType.BF16:
            bits = torch.empty_like(values, dtype=torch.bfloat16)
            residual = torch.empty_like(values, dtype=torch.int16)
            kernels.split_master(values, bits, residual)
            if state_format is StateFormat.COMPACT:
                return bits, {StateField.RESIDUAL: residual.to(torch.int8)}  # all are zero
            if state_format in (StateFormat.EXACT, StateFormat.BF16):
                return bits, {StateField.RESIDUAL: residual}
            quieted = torch.empty_like(values)
            kernels.join_master(bits, residual, quieted)
            return bits, {StateField.MASTER: quieted}
        case _:
            raise ValueError(f"parameters cannot be {element.value}")


def _says_nothing(store: Store, group: SubGroup, kept: dict[StateField, torch.Tensor]) -> bool:
    """Tell whether a state that is not written, and so is zero, says the same."""
    return (
        group.on_nvme(Section.STATE)
        and group.index not in store.written_states
        and not any(bool(values.view(torch.uint8).any()) for values in kept.values())
    )


def _write_group(
    store: Store, group: SubGroup, raw: torch.Tensor, kept: dict[StateField, torch.Tensor]
) -> Fence:
    """Write the parameters of one sub-group and the given fields of its state."""
    written = frozenset(
        section
        for section, is_set in ((Section.PARAMETER, True), (Section.STATE, bool(kept)))
        if is_set and group.on_nvme(section)
    )
    slot = lend_for_writing(store, group, written) if written else None
    spec = store.plan.request.segments[group.segment]
    layout = store.plan.request.record_of(spec, group.numel)
    fence = PASSED
    for field in layout.fields if kept else ():
        if field.field in kept:
            state = store.section_memory(group, Section.STATE, slot)
            target = state.sub(field.offset_bytes, field.size_bytes)
            fence = last_of(
                fence, store.device.copy(store.device.memory_of(kept[field.field]), target)
            )
    parameter = store.section_memory(group, Section.PARAMETER, slot)
    fence = last_of(
        fence, store.device.copy(store.device.memory_of(raw), parameter.sub(0, raw.nbytes))
    )
    if slot is not None and store.pager is not None:
        slot.fence = fence
        store.pager.page_out(slot, written)
        if Section.STATE in written:
            store.written_states.add(group.index)
    return fence
