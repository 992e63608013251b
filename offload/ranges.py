"""Read and write a range of one field of a segment's shard, wherever its sub-groups rest.

A range is in elements of the shard. Fields are the parameter, its fp32 master, its gradient, the
two moments, and the state of optimizers without a kernel. Writing a parameter or a master writes
both, see [Note: whoever writes a parameter writes its residual]. What is on NVMe moves in whole
sections of a sub-group; `ShardReader` keeps the last sub-group, so ranges in ascending order page
each once.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from aio_ops import Span
from estimators import (
    CODE_BLOCK_NUMEL,
    EXTRA_FIELDS,
    ElementType,
    Section,
    SegmentSpec,
    StateField,
    StateFormat,
    SubGroup,
)
from offload.arrays import (
    array_at,
    clear_bytes,
    copy_bytes,
    tensor_at,
    tensor_span,
    torch_dtype,
)
from offload.host_view import HostView
from offload.kernels import Kernels
from offload.operands import StateArrays
from offload.slots import Slot
from offload.state import (
    master_values,
    moment_values,
    put_moment,
    state_arrays,
    stored_values,
)
from offload.store import Store
from offload.write import encode_masters

Array = np.ndarray[Any, Any]


class Field(enum.Enum):
    """What is kept of each parameter."""

    PARAMETER = "parameter"
    MASTER = "fp32_param"
    GRADIENT = "grad"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    EXTRA_0 = "extra_0"
    EXTRA_1 = "extra_1"
    EXTRA_2 = "extra_2"
    EXTRA_3 = "extra_3"
    EXTRA_4 = "extra_4"
    EXTRA_5 = "extra_5"


MOMENTS: Mapping[Field, StateField] = {
    Field(each.value): each for each in (StateField.EXP_AVG, StateField.EXP_AVG_SQ, *EXTRA_FIELDS)
}


def field_dtype(store: Store, segment: int, field: Field) -> torch.dtype:
    """Return the type in which a field of a segment is read and written."""
    spec = store.plan.request.segments[segment]
    match field:
        case Field.PARAMETER:
            return torch_dtype(spec.element)
        case Field.GRADIENT:
            return torch_dtype(spec.gradient)
        case _:
            return torch.float32


def stored_dtype(store: Store, segment: int, field: Field) -> torch.dtype:
    """Return the type in which a field of a segment rests: codes, of which blocks share a base, are
    uint8. For masters that is fp32, whatever their residuals are kept in.
    """
    spec = store.plan.request.segments[segment]
    if field in MOMENTS:
        for layout in store.plan.request.record_of(spec, CODE_BLOCK_NUMEL).fields:
            if layout.field is MOMENTS[field]:
                return torch_dtype(layout.element)
    return field_dtype(store, segment, field)


def has_field(store: Store, segment: int, field: Field) -> bool:
    """Tell whether a segment has a field now: frozen ones have no state, and gradients come."""
    request = store.plan.request
    if field is Field.PARAMETER:
        return True
    if not (request.trains and request.segments[segment].trainable):
        return False
    if field in MOMENTS:
        return MOMENTS[field] in request.rule.moments
    return field is not Field.GRADIENT or store.has_gradient(segment)


def read_range(store: Store, segment: int, field: Field, start: int, stop: int) -> torch.Tensor:
    """Return a private copy of elements `[start, stop)` of a field, shape `[stop - start]`.

    It is in host memory.

    Raises:
        PageError: if a page-in failed.
    """
    store.require_intact()
    target = torch.zeros(stop - start, dtype=field_dtype(store, segment, field), device="cpu")
    for group in store.plan.by_segment[segment]:
        low, high = max(start, group.start), min(stop, group.stop)
        if low < high:
            part = target[low - start : high - start]
            with _lent(store, group, _sections((field,))) as slot:
                _copy_out(store, group, slot, field, (low - group.start, part))
    return target


def write_range(store: Store, segment: int, field: Field, start: int, values: torch.Tensor) -> None:
    """Set elements of a field from `start` on; `values` are of the field's type, contiguous.

    They may lie on any device.

    Raises:
        PageError: if a transfer failed.
    """
    store.require_intact()
    if field is Field.GRADIENT:
        ensure_gradient(store, segment)
    store.parameter_version += 1
    values = values.cpu()
    stop = start + values.numel()
    for group in store.plan.by_segment[segment]:
        low, high = max(start, group.start), min(stop, group.stop)
        if low < high:
            _write_group(store, group, field, low - group.start, values[low - start : high - start])
    if store.pager is not None:
        store.pager.drain()


def ensure_gradient(store: Store, segment: int) -> None:
    """Give a segment that has no gradients of this window gradients of zero.

    Raises:
        PageError: if a transfer failed.
    """
    if store.has_gradient(segment):
        return
    numel = sum(group.numel for group in store.plan.by_segment[segment])
    if numel:
        zeros = store.device.zeros(numel, field_dtype(store, segment, Field.GRADIENT))
        fence = store.add_gradient(segment, store.device.memory_of(zeros))
        store.device.join(fence)
    else:
        store.note_gradient(segment)  # the other ranks have all of it


class ShardReader:
    """Reads several fields of one segment; ranges in ascending order page each sub-group once."""

    def __init__(self, store: Store, segment: int, fields: Collection[Field]) -> None:
        self._store = store
        self._segment = segment
        self._fields = [field for field in fields if has_field(store, segment, field)]
        self._group: SubGroup | None = None
        self._copies: dict[Field, torch.Tensor] = {}

    def read(self, start: int, stop: int) -> dict[Field, torch.Tensor]:
        """Return private copies of elements `[start, stop)` of the fields that there are."""
        store = self._store
        store.require_intact()
        found = {
            field: torch.zeros(
                stop - start, dtype=field_dtype(store, self._segment, field), device="cpu"
            )
            for field in self._fields
        }
        for group in store.plan.by_segment[self._segment]:
            low, high = max(start, group.start), min(stop, group.stop)
            if low >= high:
                continue
            self._load(group)
            for field, target in found.items():
                source = self._copies[field][low - group.start : high - group.start]
                target[low - start : high - start] = source
        return found

    def _load(self, group: SubGroup) -> None:
        if self._group is group:
            return
        self._copies = {}
        with _lent(self._store, group, _sections(self._fields)) as slot:
            for field in self._fields:
                copy = torch.zeros(
                    group.numel,
                    dtype=field_dtype(self._store, self._segment, field),
                    device="cpu",
                )
                _copy_out(self._store, group, slot, field, (0, copy))
                self._copies[field] = copy
        self._group = group


def _sections(fields: Collection[Field]) -> frozenset[Section]:
    """Return the sections that hold some fields."""
    needed: set[Section] = set()
    for field in fields:
        match field:
            case Field.PARAMETER:
                needed.add(Section.PARAMETER)
            case Field.GRADIENT:
                needed.add(Section.GRADIENT)
            case Field.MASTER:
                needed.update((Section.PARAMETER, Section.STATE))
            case _:
                needed.add(Section.STATE)
    if {Section.GRADIENT, Section.STATE} <= needed:
        needed.add(Section.PARAMETER)  # lies between them: one read
    return frozenset(needed)


def _stored(store: Store, group: SubGroup, section: Section) -> bool:
    """Tell whether NVMe holds values of a section; state that was never written is zero."""
    if section is Section.STATE and group.index not in store.written_states:
        return False
    if section is Section.GRADIENT and not store.has_gradient(group.segment):
        return False
    return group.on_nvme(section)


def _lend(store: Store, group: SubGroup, wanted: frozenset[Section]) -> Slot | None:
    """Return a slot with the wanted sections that rest on NVMe (None: none of them does)."""
    paged = frozenset(section for section in wanted if group.on_nvme(section))
    if group.extent is None or store.pager is None or not paged:
        return None
    reads = frozenset(section for section in paged if _stored(store, group, section))
    if {Section.GRADIENT, Section.STATE} <= reads and group.on_nvme(Section.PARAMETER):
        reads |= {Section.PARAMETER}
    slot = store.pager.page_in(group.extent, reads) if reads else store.pager.blank(group.extent)
    for section in paged - reads:
        clear_bytes(slot.section(section))
    return slot


@contextmanager
def _lent(store: Store, group: SubGroup, wanted: frozenset[Section]) -> Iterator[Slot | None]:
    """Lend a slot for reading; it is given back unchanged."""
    slot = _lend(store, group, wanted)
    try:
        yield slot
    finally:
        if slot is not None and store.pager is not None:
            store.pager.release(slot)


def _copy_out(
    store: Store, group: SubGroup, slot: Slot | None, field: Field, part: tuple[int, torch.Tensor]
) -> None:
    """Copy a field of a lent sub-group, from an element on, into a tensor."""
    copy_field(store, group, HostView(store, group, slot), field, part)


def copy_field(
    store: Store,
    group: SubGroup,
    view: HostView,
    field: Field,
    part: tuple[int, torch.Tensor],
    kernels: Kernels | None = None,
) -> None:
    """Copy a field of a sub-group that is in host memory, from an element on, into a tensor.

    Several threads may, of one sub-group, with `kernels` that run on one thread. A target of
    another type than the field's gets what is stored, see `stored_dtype`; one of uint16 the bases,
    and then `part` counts blocks.
    """
    kernels = kernels or store.kernels
    first, target = part
    chosen = slice(first, first + target.numel())
    spec = store.plan.request.segments[group.segment]
    if field is Field.PARAMETER or (field is Field.MASTER and spec.element is ElementType.FP32):
        _copy_elements(view.span(Section.PARAMETER), spec.element, first, target)
    elif field is Field.GRADIENT:
        if store.has_gradient(group.segment):
            _copy_elements(view.span(Section.GRADIENT), spec.gradient, first, target)
    else:
        state = state_arrays(store.plan, spec, group, view.span(Section.STATE))
        array: Array | None
        if field is Field.MASTER:
            parameter = array_at(view.span(Section.PARAMETER), spec.element, group.numel)
            masters = _masters_of(state, chosen)
            if masters.residual is not None and masters.residual.dtype == np.int16:
                kernels.join_master(parameter[chosen], masters.residual, target.numpy())
                return
            array = master_values(kernels, parameter[chosen], masters)
        elif target.dtype is not torch.float32:
            stored = stored_values(state, MOMENTS[field], target.dtype)[chosen]
            target.view(torch.uint8).numpy()[:] = stored.view(np.uint8)
            return
        else:
            array = _moment_part(state, MOMENTS[field], chosen)
        if array is not None:
            target.numpy()[:] = array


def _copy_elements(span: Span, element: ElementType, first: int, target: torch.Tensor) -> None:
    """Copy elements as bytes: torch would start threads of its own for each thread that copies."""
    size_bytes = target.numel() * element.size_bytes
    if size_bytes:
        source = span.sub(first * element.size_bytes, size_bytes)
        copy_bytes(source, tensor_span(target), size_bytes)


def has_codes(store: Store, group: SubGroup) -> bool:
    """Tell whether the moments of a sub-group rest in codes, a block of them under one base."""
    spec = store.plan.request.segments[group.segment]
    fields = {field.field for field in store.plan.request.record_of(spec, group.numel).fields}
    return bool(fields & {StateField.EXP_AVG_BASE, StateField.EXP_AVG_SQ_BASE})


def _masters_of(state: StateArrays, chosen: slice) -> StateArrays:
    """Return what some elements keep of their masters."""
    return StateArrays(
        master=state.master[chosen] if state.master is not None else None,
        residual=state.residual[chosen] if state.residual is not None else None,
    )


def _moment_part(state: StateArrays, field: StateField, chosen: slice) -> Array | None:
    """Return some elements of a moment in fp32; codes are read in whole blocks."""
    low = chosen.start // CODE_BLOCK_NUMEL * CODE_BLOCK_NUMEL
    values: Array | None = moment_values(state.part(slice(low, chosen.stop)), field)
    return None if values is None else values[chosen.start - low :]


def _write_group(
    store: Store, group: SubGroup, field: Field, first: int, values: torch.Tensor
) -> None:
    """Set elements of one field of one sub-group, and what follows from them."""
    if field is not Field.GRADIENT:
        store.before_change(group)
    sections = sections_set_by(store, group, field)
    slot = _lend(store, group, sections)
    try:
        view = HostView(store, group, slot)
        put_field(store, group, view, field, (first, values))
        for section in sections:
            view.put_back(section)
    except BaseException:
        if slot is not None and store.pager is not None:
            store.pager.release(slot)
        raise
    if slot is not None and store.pager is not None:
        written = frozenset(section for section in sections if group.on_nvme(section))
        store.pager.page_out(slot, written)
        if Section.STATE in written:
            store.written_states.add(group.index)


def sections_set_by(store: Store, group: SubGroup, field: Field) -> frozenset[Section]:
    """Return the sections that change when a field of a sub-group is set.

    [Note: whoever writes a parameter writes its residual]
    """
    if field not in (Field.PARAMETER, Field.MASTER):
        return _sections((field,))
    spec = store.plan.request.segments[group.segment]
    keeps_master = spec.element is not ElementType.FP32
    if keeps_master and group.tier(Section.STATE) is not None:
        return frozenset({Section.PARAMETER, Section.STATE})
    return frozenset({Section.PARAMETER})


def put_field(
    store: Store,
    group: SubGroup,
    view: HostView,
    field: Field,
    part: tuple[int, torch.Tensor],
    kernels: Kernels | None = None,
) -> None:
    """Set elements of a sub-group in host memory, from an element on, and what follows.

    Whoever calls puts the sections back that are set, see `sections_set_by`. Several threads may
    set elements of one sub-group, with `kernels` that run on one thread, but not of one block of
    codes.
    """
    first, values = part
    spec = store.plan.request.segments[group.segment]
    if field is Field.GRADIENT:
        span = view.span(Section.GRADIENT)
        tensor_at(span, spec.gradient, group.numel)[first : first + values.numel()] = values
        return
    kept: Mapping[StateField, Array]
    if field in MOMENTS:
        kept = {MOMENTS[field]: values.numpy()}
    else:
        masters = values.float().contiguous().numpy()
        if _put_exact(store, group, view, first, masters, kernels or store.kernels):
            return
        state_format = store.plan.request.format_of(spec)
        raw, kept = encode_masters(kernels or store.kernels, spec.element, state_format, masters)
        _put_parameter(view, spec, first, raw)
    if kept and group.tier(Section.STATE) is not None:
        state = state_arrays(store.plan, spec, group, view.span(Section.STATE))
        _put_state(state, first, kept)


def _put_exact(
    store: Store,
    group: SubGroup,
    view: HostView,
    first: int,
    masters: Array,
    kernels: Kernels,
) -> bool:
    """Split masters straight into parameters and residuals, if that is how they are kept."""
    spec = store.plan.request.segments[group.segment]
    is_split = store.plan.request.format_of(spec) in (StateFormat.EXACT, StateFormat.BF16)
    if spec.element is not ElementType.BF16 or not is_split or group.tier(Section.STATE) is None:
        return False
    residual = state_arrays(store.plan, spec, group, view.span(Section.STATE)).residual
    parameter = array_at(view.span(Section.PARAMETER), spec.element, group.numel)
    chosen = slice(first, first + masters.size)
    kernels.split_master(masters, parameter[chosen], residual[chosen])
    return True


def _put_parameter(view: HostView, spec: SegmentSpec, first: int, raw: Array) -> None:
    span = view.span(Section.PARAMETER)
    array = array_at(span, ElementType.INT16, span.size_bytes // 2).view(np.uint8)
    begin = first * spec.element.size_bytes
    array[begin : begin + raw.size] = raw


def _put_state(state: StateArrays, first: int, fields: Mapping[StateField, Array]) -> None:
    for key, values in fields.items():
        target = state.get(key)
        if target is None:
            continue
        if key in MOMENTS.values():
            low = first // CODE_BLOCK_NUMEL * CODE_BLOCK_NUMEL
            high = -(-(first + values.size) // CODE_BLOCK_NUMEL) * CODE_BLOCK_NUMEL
            part = state.part(slice(low, min(high, len(target))))
            put_moment(part, key, first - low, values)
        else:
            target[first : first + values.size] = values
