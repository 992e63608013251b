"""The device kernels in Triton: one pass over memory, with the bits of the host kernels.

Imported only where CUDA and Triton are.

[Note: Triton bits] A launch switches contraction off (`enable_fp_fusion`) and keeps library
functions from flushing denormals (`enable_reflect_ftz`); divisions and roots are the rounded ones.
"""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"
# ruff: noqa: ANN001, ANN202, FBT003, N803, PLR1714, RET505, SIM109

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.codes import RoundingKey
from offload.kernel_calls import Kept, UpdateCalls
from offload.kernels import BLOCK_NUMEL
from offload.kernels_device import (
    check_device_update,
    check_fp16,
    check_join,
    check_norm,
    check_split,
)
from offload.operands import StateArrays
from offload.rules import UpdateScalars

_TILE = 1024
_WARPS = 4
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "enable_reflect_ftz": False}

# How the master of a parameter is kept.
_OWN = tl.constexpr(0)
_EXACT = tl.constexpr(1)
_MASTER_BF16 = tl.constexpr(2)
_MASTER_FP16 = tl.constexpr(3)
_BF16 = tl.constexpr(4)
_COMPACT = tl.constexpr(5)
_KEPT = {Kept.OWN: 0, Kept.EXACT: 1, Kept.BF16: 4, Kept.COMPACT: 5}

# The rules, as `UpdateScalars.rule_number` counts them.
_ADAMW = tl.constexpr(0)
_ADAM = tl.constexpr(1)
_LION = tl.constexpr(2)
_ADAGRAD = tl.constexpr(3)
_SGD = tl.constexpr(4)


@triton.jit
def _is_nan(bits):
    return (bits & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def _with_one_nan(value):
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(_is_nan(bits), 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _quiet(bits):
    sign = (bits >> 31) << 31
    return tl.where(_is_nan(bits), sign | 0x7FC00000, bits)


@triton.jit
def _widened(value):
    if value.dtype == tl.bfloat16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _joined(param, residual):
    bits = (param.to(tl.int16, bitcast=True).to(tl.int32) << 16) + residual.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bf16_of(bits):
    return ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _fp16_of(bits):
    sign = (bits >> 16) & 0x8000
    rounded = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
    half = tl.where(_is_nan(bits), (sign | 0x7E00).to(tl.int16), rounded)
    return half.to(tl.float16, bitcast=True)


@triton.jit
def _sign(value):
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    one = (((bits >> 31) << 31) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where((magnitude != 0) & (magnitude <= 0x7F800000), one, value)


@triton.jit
def _moved(p, m, v, g, scalars, RULE: tl.constexpr):
    """Return master and moments after an update; see [Note: update rules]."""
    beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor, step_size = scalars[:6]
    bias_correction2_sqrt, eps, grad_scale, l2, initial, nesterov = scalars[6:]
    g = g * grad_scale
    if RULE == _ADAM or RULE == _ADAGRAD or RULE == _SGD:
        g = g + p * l2
    if RULE == _ADAMW or RULE == _LION:
        p = p * decay_factor
    change = g
    if RULE == _ADAMW or RULE == _ADAM:
        m = m * beta1 + g * one_minus_beta1
        v = v * beta2 + (g * g) * one_minus_beta2
        change = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), bias_correction2_sqrt) + eps)
    if RULE == _LION:
        change = _sign(m * beta1 + g * one_minus_beta1)
        m = m * beta2 + g * one_minus_beta2
    if RULE == _ADAGRAD:
        v = v + g * g
        change = tl.div_rn(g, tl.sqrt_rn(v + initial) + eps)
    if RULE == _SGD:
        m = m * beta1 + g * one_minus_beta1
        change = tl.where(nesterov != 0, g + m * beta1, m)
    return _with_one_nan(p - step_size * change), _with_one_nan(m), _with_one_nan(v)


@triton.jit
def _mixed(words):
    words = words ^ (words >> 16)
    words = words * tl.full((), 0x85EBCA6B, tl.uint32)
    words = words ^ (words >> 13)
    words = words * tl.full((), 0xC2B2AE35, tl.uint32)
    return words ^ (words >> 16)


@triton.jit
def _noise(at, key):
    first, high = key
    numbers = (at + first).to(tl.uint32)
    return _mixed(_mixed(numbers) ^ high.to(tl.uint32))


@triton.jit
def _other_noise(noise):
    return _mixed(noise + tl.full((), 0x9E3779B9, tl.uint32))


@triton.jit
def _bits(value):
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def _base(upper, CODES: tl.constexpr):
    """Return the base of each block, a row of a tile, from the upper bits of its elements."""
    return tl.maximum(tl.max(upper, axis=1, keep_dims=True) - CODES, 0)


@triton.jit
def _loaded(moment, base, blocks, at, inside, KEPT: tl.constexpr, SIGNED: tl.constexpr):
    """Return a moment in fp32, however it is kept."""
    if KEPT == _COMPACT:
        code = tl.load(moment + at, inside, other=0).to(tl.int32)
        block, is_block = blocks
        below = tl.load(base + block, is_block, other=0).to(tl.int32) & 0xFFFF
        if SIGNED:
            magnitude = code & 0x7F
            upper = tl.where(magnitude != 0, below + magnitude, 0)
            return ((upper << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
        else:
            upper = tl.where(code != 0, below + code, 0)
            return (upper << 19).to(tl.float32, bitcast=True)
    else:
        return _widened(tl.load(moment + at, inside, other=0.0))


@triton.jit
def _store_moment(
    moment, base, blocks, places, value, noise, KEPT: tl.constexpr, SIGNED: tl.constexpr
):  # fmt: skip
    at, inside = places
    bits = tl.where(inside, _bits(value), 0)
    if KEPT == _COMPACT:
        magnitude = bits & 0x7FFFFFFF
        if SIGNED:
            upper = ((magnitude + (noise >> 12)) >> 20).to(tl.int32)
            upper = tl.where(inside, upper, 0)
            below = _base(upper, 0x7F)
            code = tl.maximum(upper - below, 0) | ((bits >> 31).to(tl.int32) << 7)
        else:
            upper = ((magnitude + (_other_noise(noise) >> 13)) >> 19).to(tl.int32)
            upper = tl.where(inside, upper, 0)
            below = _base(upper, 0xFF)
            code = tl.maximum(upper - below, tl.where(magnitude != 0, 1, 0))
        tl.store(moment + at, code.to(tl.uint8), inside)
        block, is_block = blocks
        tl.store(base + block, below.to(tl.int16), is_block)
    elif KEPT == _BF16:
        random = (noise & 0xFFFF) if SIGNED else (noise >> 16)
        half = ((bits + random) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(moment + at, half, inside)
    else:
        tl.store(moment + at, value, inside)


@triton.jit
def _master(param, weight, at, inside, KEPT: tl.constexpr):
    """Return the fp32 master, however it is kept."""
    if KEPT == _EXACT or KEPT == _BF16:
        return _joined(tl.load(param + at, inside), tl.load(weight + at, inside))
    elif KEPT == _COMPACT:
        upper = tl.load(param + at, inside).to(tl.int16, bitcast=True).to(tl.int32) << 16
        lower = tl.load(weight + at, inside).to(tl.int32) << 8
        return (upper + lower).to(tl.float32, bitcast=True)
    elif KEPT == _OWN:
        return tl.load(param + at, inside)
    else:
        return tl.load(weight + at, inside)


@triton.jit
def _store_master(param, weight, at, inside, p, noise, KEPT: tl.constexpr):
    bits = p.to(tl.int32, bitcast=True)
    if KEPT == _EXACT or KEPT == _BF16:
        tl.store(param + at, _bf16_of(bits), inside)
        tl.store(weight + at, bits.to(tl.int16), inside)
    elif KEPT == _COMPACT:
        shorter = ((_bits(p) + (noise & 0xFF)) >> 8).to(tl.int32)
        half = ((shorter + 0x80) >> 8).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(param + at, half, inside)
        tl.store(weight + at, shorter.to(tl.int8), inside)
    elif KEPT == _OWN:
        tl.store(param + at, p, inside)
    else:
        tl.store(weight + at, p, inside)
        tl.store(param + at, _bf16_of(bits) if KEPT == _MASTER_BF16 else _fp16_of(bits), inside)


@triton.jit
def _update(
    operands, moments, scalars, key, numel, KEPT: tl.constexpr, RULE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    param, weight, grad = operands
    exp_avg, exp_avg_sq, exp_avg_base, exp_avg_sq_base = moments
    start = tl.program_id(0).to(tl.int64) * TILE
    if KEPT == _COMPACT:  # a row a block, so that its greatest is found within a row
        block = start // 32 + tl.expand_dims(tl.arange(0, TILE // 32), 1)
        at = block * 32 + tl.expand_dims(tl.arange(0, 32), 0)
    else:
        at = start + tl.arange(0, TILE)
        block = at
    inside = at < numel
    blocks = (block, block * 32 < numel)
    places = (at, inside)
    master = _master(param, weight, at, inside, KEPT)
    g = _widened(tl.load(grad + at, inside))
    m = tl.zeros_like(master)
    v = m
    if RULE != _ADAGRAD:
        m = _loaded(exp_avg, exp_avg_base, blocks, at, inside, KEPT, True)
    if RULE == _ADAMW or RULE == _ADAM or RULE == _ADAGRAD:
        v = _loaded(exp_avg_sq, exp_avg_sq_base, blocks, at, inside, KEPT, False)
    p, m, v = _moved(master, m, v, g, scalars, RULE)
    noise = tl.zeros_like(master).to(tl.uint32)
    if KEPT == _BF16 or KEPT == _COMPACT:
        noise = _noise(at, key)
    if RULE != _ADAGRAD:
        _store_moment(exp_avg, exp_avg_base, blocks, places, m, noise, KEPT, True)
    if RULE == _ADAMW or RULE == _ADAM or RULE == _ADAGRAD:
        _store_moment(exp_avg_sq, exp_avg_sq_base, blocks, places, v, noise, KEPT, False)
    _store_master(param, weight, at, inside, p, noise, KEPT)


@triton.jit
def _split(master, param, residual, numel, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    bits = _quiet(tl.load(master + at, inside))
    tl.store(param + at, _bf16_of(bits), inside)
    tl.store(residual + at, bits.to(tl.int16), inside)


@triton.jit
def _join(param, residual, master, numel, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    joined = _joined(tl.load(param + at, inside), tl.load(residual + at, inside))
    tl.store(master + at, joined.to(tl.int32, bitcast=True), inside)


@triton.jit
def _to_fp16(master, out, numel, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    tl.store(out + at, _fp16_of(tl.load(master + at, inside)), inside)


@triton.jit
def _fold(lanes, HALF: tl.constexpr):
    return tl.sum(tl.reshape(lanes, (2, HALF)), axis=0)


@triton.jit
def _block_sums(values, sums, lead, numel):
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, 64)
    lanes = tl.zeros((64,), tl.float64)
    for row in range(64):
        at = block * 4096 + row * 64 + lane - lead
        value = _widened(tl.load(values + at, (at >= 0) & (at < numel), other=0.0)).to(tl.float64)
        lanes = lanes + value * value
    lanes = _fold(_fold(_fold(lanes, 32), 16), 8)
    lanes = _fold(_fold(_fold(lanes, 4), 2), 1)
    tl.store(sums + block + tl.arange(0, 1), lanes)


def _launch(kernel: Any, *operands: Any, numel: int, **constants: Any) -> None:
    if numel:
        first = operands[0][0] if isinstance(operands[0], tuple) else operands[0]
        with torch.cuda.device(first.device):
            kernel[(triton.cdiv(numel, _TILE),)](
                *operands, numel, **constants, TILE=_TILE, num_warps=_WARPS, **_OPTIONS
            )


def _bases(state: StateArrays) -> tuple[Tensor | None, ...]:
    """Return the bases as int16: Triton and torch agree on that type in every version."""
    return tuple(
        each.view(torch.int16) if each is not None else None
        for each in (state.exp_avg_base, state.exp_avg_sq_base)
    )


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
        weight = {Kept.OWN: param, Kept.MASTER: state.master}.get(kept, state.residual)
        absent = weight  # a kernel does not touch what its rule or format lacks
        moments = tuple(
            each if each is not None else absent
            for each in (state.exp_avg, state.exp_avg_sq, *_bases(state))
        )
        is_fp16 = param.dtype is torch.float16
        how = _KEPT.get(kept, _MASTER_FP16.value if is_fp16 else _MASTER_BF16.value)
        values = tuple(float(each) for each in dataclasses.astuple(scalars))
        first = (key.first + key.low) & 0xFFFF_FFFF if key is not None else 0
        words = (first, key.high if key is not None else 0)
        _launch(
            _update,
            (param, weight, grad),
            moments,
            values,
            words,
            numel=param.numel(),
            KEPT=how,
            RULE=scalars.rule_number,
        )

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
        lead = first_index % BLOCK_NUMEL
        count = triton.cdiv(lead + values.numel(), BLOCK_NUMEL) if values.numel() else 0
        sums = torch.empty(count, dtype=torch.float64, device=values.device)
        if count:
            with torch.cuda.device(values.device):
                _block_sums[(count,)](values, sums, lead, values.numel(), num_warps=2, **_OPTIONS)
        return sums
