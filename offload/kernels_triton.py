"""The device kernels in Triton: one pass over memory, with the bits of the host kernels.

Imported only where CUDA and Triton are.

[Note: Triton bits] A launch switches contraction off (`enable_fp_fusion`) and keeps library
functions from flushing denormals (`enable_reflect_ftz`); divisions and roots are the rounded ones,
for AdamW and Adam by [Note: quick division].

[Note: one] `compact` is bound by arithmetic, and of that by shifts, selections and additions of
integers, which run at half the rate of products. So some of its sums are products with a 1, and
some shifts products with a power of two, that the compiler does not know.
"""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.codes import RoundingKey
from offload.kernel_calls import Kept, UpdateCalls, kept_of
from offload.kernels import BLOCK_NUMEL
from offload.kernels_device import (
    PartsAndGradients,
    block_count,
    check_device_parts,
    check_device_update,
    check_fp16,
    check_join,
    check_norm,
    check_split,
    update_one_by_one,
)
from offload.launches import Launch, alike, offsets_from_first, on_device, prepare_launches
from offload.operands import StateArrays
from offload.rules import UpdateScalars
from offload.triton_numbers import bf16_of, fp16_of, joined, quiet, widened
from offload.triton_update import update
from offload.update_parts import GroupParts

_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """How a launch divides elements: those of a tile, and warps, registers and copies ahead."""

    tile: int = 1024
    warps: int = 4
    registers: int | None = None
    stages: int = 1
    programs: int | None = None
    """Most programs for each multiprocessor; None has one for every tile."""


_PLAIN = _Shape()
_SHAPES = {Kept.COMPACT: _Shape(tile=512, warps=1, registers=128, stages=3, programs=64)}

_KEPT = {Kept.OWN: 0, Kept.EXACT: 1, Kept.BF16: 4, Kept.COMPACT: 5}
"""How the update kernel calls the ways to keep a master; those kept whole have 2 with bf16
parameters, 3 with fp16."""
_WHOLE_BF16, _WHOLE_FP16 = 2, 3


@triton.jit
def _split(master, param, residual, numel, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    bits = quiet(tl.load(master + at, inside))
    tl.store(param + at, bf16_of(bits), inside)
    tl.store(residual + at, bits.to(tl.int16), inside)


@triton.jit
def _join(param, residual, master, numel, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    master_values = joined(tl.load(param + at, inside), tl.load(residual + at, inside))
    tl.store(master + at, master_values.to(tl.int32, bitcast=True), inside)


@triton.jit
def _to_fp16(master, out, numel, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    tl.store(out + at, fp16_of(tl.load(master + at, inside)), inside)


@triton.jit
def _fold(lanes, HALF: tl.constexpr):
    return tl.sum(tl.reshape(lanes, (2, HALF)), axis=0)


@triton.jit
def _block_sum(values, lead, numel, block):
    lane = tl.arange(0, 64)
    lanes = tl.zeros((64,), tl.float64)
    for row in range(64):
        at = block * 4096 + row * 64 + lane - lead
        value = widened(tl.load(values + at, (at >= 0) & (at < numel), other=0.0)).to(tl.float64)
        lanes = lanes + value * value
    lanes = _fold(_fold(_fold(lanes, 32), 16), 8)
    return _fold(_fold(_fold(lanes, 4), 2), 1)


@triton.jit
def _block_sums(values, sums, lead, numel):
    block = tl.program_id(0).to(tl.int64)
    tl.store(sums + block + tl.arange(0, 1), _block_sum(values, lead, numel, block))


@triton.jit
def _block_sums_of(values, sums, table):
    """Sum the blocks of several pieces; a row has where one begins, its lead, its size and where
    its sums begin."""
    block = tl.program_id(0).to(tl.int64)
    row = table + tl.program_id(1) * 4
    start = tl.load(row)
    lead = tl.load(row + 1)
    numel = tl.load(row + 2)
    if block * 4096 < lead + numel:
        sums += tl.load(row + 3) + block
        tl.store(sums + tl.arange(0, 1), _block_sum(values + start, lead, numel, block))


def _launch(kernel: Any, *operands: Any, numel: int) -> None:
    """Run a kernel that masks what is not there on all elements."""
    if numel:
        with torch.cuda.device(operands[0].get_device()):
            kernel[(triton.cdiv(numel, _PLAIN.tile),)](
                *operands, numel, TILE=_PLAIN.tile, num_warps=_PLAIN.warps, **_OPTIONS
            )


def _launch_update(
    operands: tuple[Any, ...], shape: _Shape, how: tuple[int, int], launch: Launch | None = None
) -> None:
    """Run the update on all elements: on whole tiles, then on what is left of each part."""
    arrays, numels = operands[0], launch.numels if launch is not None else operands[-1:]
    device = arrays[0].device
    tiles = max(numels) // shape.tile
    most = shape.programs * _processors(device) if shape.programs is not None else tiles
    options = {**_OPTIONS, "num_warps": shape.warps}
    if shape.registers is not None:
        options["maxnreg"] = shape.registers
    table = launch.rows if launch is not None else None
    with torch.cuda.device(arrays[0].get_device()):
        if tiles:
            update[(min(tiles, most), len(numels))](
                *operands,
                table,
                HOW=(*how, False),
                SHAPE=(shape.tile, shape.stages),
                **options,
            )
        if any(numel % shape.tile for numel in numels):
            update[(1, len(numels))](
                *operands,
                table,
                HOW=(*how, True),
                SHAPE=(shape.tile, 1),
                num_warps=shape.warps,
                **_OPTIONS,
            )


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _as_int32(word: int) -> int:
    """Return the number with the same 32 bits that Triton takes for an int32, whatever they are."""
    return (word & 0xFFFF_FFFF ^ 0x8000_0000) - 0x8000_0000


@functools.lru_cache(maxsize=64)
def _values(scalars: UpdateScalars) -> tuple[float, ...]:
    """Return the scalars of an update in order; a step has one set for each parameter group."""
    return tuple(float(getattr(scalars, each.name)) for each in dataclasses.fields(scalars))


def _bases(state: StateArrays) -> tuple[Tensor | None, ...]:
    """Return the bases as int16: Triton and torch agree on that type in every version."""
    return tuple(
        each.view(torch.int16) if each is not None else None
        for each in (state.exp_avg_base, state.exp_avg_sq_base)
    )


def _arrays(
    kept: Kept, operands: tuple[Tensor, Tensor], state: StateArrays
) -> tuple[Tensor | None, ...]:
    """Return what the update kernel calls its arrays, of parameter, gradient and state."""
    param, grad = operands
    weight = {Kept.OWN: param, Kept.MASTER: state.master}.get(kept, state.residual)
    absent = weight  # a kernel does not touch what its rule or format lacks
    moments = (
        each if each is not None else absent
        for each in (state.exp_avg, state.exp_avg_sq, *_bases(state))
    )
    return param, weight, grad, *moments


def _how(kept: Kept, param: Tensor) -> int:
    whole = _WHOLE_FP16 if param.dtype is torch.float16 else _WHOLE_BF16
    return _KEPT.get(kept, whole)


class TritonKernels(UpdateCalls):
    """The kernels in Triton, on CUDA devices."""

    name = "triton"

    def _update(
        self,
        kept: Kept,
        param: Tensor,
        grad: Tensor,
        state: StateArrays,
        scalars: UpdateScalars,
        key: RoundingKey | None,
    ) -> None:
        check_device_update(kept, (param, grad), state, scalars, key)
        first, high = (key.first + key.low, key.high) if key is not None else (0, 0)
        words = (_as_int32(first), _as_int32(high))
        arrays, how = _arrays(kept, (param, grad), state), _how(kept, param)
        operands = (arrays, (*_values(scalars), 1.0), *words, param.numel())
        _launch_update(operands, _SHAPES.get(kept, _PLAIN), (how, scalars.rule_number))

    def prepare(
        self, groups: Sequence[PartsAndGradients], device: torch.device
    ) -> Sequence[GroupParts]:
        """Return the parts of sub-groups, with launches that have their places on the device."""
        return prepare_launches(groups, device)

    def update_parts(
        self,
        param: Tensor,
        grads: Sequence[Tensor],
        state: StateArrays,
        scalars: UpdateScalars,
        prepared: GroupParts,
    ) -> None:
        """Update the parts of one sub-group in place by the rule of the scalars."""
        if not prepared.launches:
            update_one_by_one(self, (param, grads), state, scalars, prepared.parts)
            return
        kept = kept_of(state)
        check_device_parts(kept, (param, grads), state, scalars, prepared.parts)
        arrays, how = _arrays(kept, (param, grads[0]), state), _how(kept, param)
        operands = (arrays, (*_values(scalars), 1.0), 0, 0, 0)
        for launch in prepared.launches:
            shape = _SHAPES.get(kept, _PLAIN)
            _launch_update(operands, shape, (how, scalars.rule_number), launch)

    def split_master(self, master: Tensor, param: Tensor, residual: Tensor) -> None:
        """Write each master as a bf16 parameter and its residual, a NaN made quiet first."""
        check_split(master, param, residual)
        _launch(_split, master.view(torch.int32), param, residual, numel=master.numel())

    def join_master(self, param: Tensor, residual: Tensor, master: Tensor) -> None:
        """Write the masters that parameters and residuals are together."""
        check_join(param, residual, master)
        _launch(_join, param, residual, master.view(torch.int32), numel=master.numel())

    def round_to_fp16(self, master: Tensor, out: Tensor) -> None:
        """Write each master as the fp16 nearest to it, a NaN as the quiet one with its sign."""
        check_fp16(master, out)
        _launch(_to_fp16, master.view(torch.int32), out, numel=master.numel())

    def block_sums(self, values: Tensor, first_index: int) -> Tensor:
        """Return the fp64 sums of squares of the norm's blocks, shape [block], on the device."""
        check_norm(values, first_index)
        count = block_count(values.numel(), first_index)
        sums = torch.empty(count, dtype=torch.float64, device=values.device)
        if count:
            lead = first_index % BLOCK_NUMEL
            with torch.cuda.device(values.get_device()):
                _block_sums[(count,)](values, sums, lead, values.numel(), num_warps=2, **_OPTIONS)
        return sums

    def block_sums_of(self, pieces: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Return the sums of blocks of several `(values, first index)`, one after another."""
        for values, first_index in pieces:
            check_norm(values, first_index)
        tensors = [values for values, _ in pieces]
        starts = offsets_from_first(tensors) if len(pieces) > 1 else None
        if starts is None:
            return torch.cat([self.block_sums(*each) for each in pieces])
        counts = [block_count(values.numel(), first) for values, first in pieces]
        ends = itertools.accumulate(counts)
        launches = alike([count * BLOCK_NUMEL for count in counts])
        rows = [
            (start, first % BLOCK_NUMEL, values.numel(), end - count)
            for (values, first), start, end, count in zip(pieces, starts, ends, counts, strict=True)
        ]
        origin = tensors[0]
        table = on_device([rows[at] for each in launches for at in each], origin.device)
        sums = torch.empty(sum(counts), dtype=torch.float64, device=origin.device)
        with torch.cuda.device(origin.get_device()):
            for each in launches:
                grid = (counts[each[0]], len(each))
                if grid[0]:
                    _block_sums_of[grid](origin, sums, table, num_warps=2, **_OPTIONS)
                table = table[len(each) :]
        return sums
