"""The device kernels in Triton: one pass over memory, with the bits of the host kernels.

Imported only where CUDA and Triton are. [Note: Triton bits] A launch switches contraction off
(`enable_fp_fusion`) and keeps library functions from flushing denormals (`enable_reflect_ftz`);
divisions and roots are the rounded ones.
"""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"
# ruff: noqa: ANN001, ANN202, N803, RET505

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload.kernels import BLOCK_NUMEL, AdamWScalars
from offload.kernels_device import (
    HALVES,
    check_adamw,
    check_fp16,
    check_join,
    check_norm,
    check_split,
    gradient_dtypes,
)

_TILE = 1024
_WARPS = 4
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False, "enable_reflect_ftz": False}

# How the master of a parameter is kept.
_OWN = tl.constexpr(0)
_EXACT = tl.constexpr(1)
_MASTER_BF16 = tl.constexpr(2)
_MASTER_FP16 = tl.constexpr(3)


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
def _adamw(
    param, weight, grad, moments, scalars, numel, KEPT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    beta1, one_minus_beta1, beta2, one_minus_beta2 = scalars[:4]
    decay_factor, step_size, bias_correction2_sqrt, eps, grad_scale = scalars[4:]
    exp_avg, exp_avg_sq = moments
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < numel
    if KEPT == _EXACT:
        master = _joined(tl.load(param + at, inside), tl.load(weight + at, inside))
    elif KEPT == _OWN:
        master = tl.load(param + at, inside)
    else:
        master = tl.load(weight + at, inside)
    g = _widened(tl.load(grad + at, inside)) * grad_scale
    p = master * decay_factor
    m = tl.load(exp_avg + at, inside) * beta1 + g * one_minus_beta1
    v = tl.load(exp_avg_sq + at, inside) * beta2 + (g * g) * one_minus_beta2
    denominator = tl.div_rn(tl.sqrt_rn(v), bias_correction2_sqrt) + eps
    p = _with_one_nan(p - step_size * tl.div_rn(m, denominator))
    tl.store(exp_avg + at, _with_one_nan(m), inside)
    tl.store(exp_avg_sq + at, _with_one_nan(v), inside)
    bits = p.to(tl.int32, bitcast=True)
    if KEPT == _EXACT:
        tl.store(param + at, _bf16_of(bits), inside)
        tl.store(weight + at, bits.to(tl.int16), inside)
    elif KEPT == _OWN:
        tl.store(param + at, p, inside)
    else:
        tl.store(weight + at, p, inside)
        tl.store(param + at, _bf16_of(bits) if KEPT == _MASTER_BF16 else _fp16_of(bits), inside)


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
        with torch.cuda.device(operands[0].device):
            kernel[(triton.cdiv(numel, _TILE),)](
                *operands, numel, **constants, TILE=_TILE, num_warps=_WARPS, **_OPTIONS
            )


class TritonKernels:
    """The kernels in Triton, on CUDA devices."""

    name = "triton"

    def adamw_fp32(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 parameters, which are their own master, and their moments in place."""
        fp32 = (torch.float32,)
        check_adamw(scalars, moments=(exp_avg, exp_avg_sq), grad=(grad, fp32), param=(param, fp32))
        self._adamw(_OWN, (param, param, grad), (exp_avg, exp_avg_sq), scalars)

    def adamw_exact(
        self,
        param: Tensor,
        residual: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """Update bf16 parameters, the residuals that complete them to fp32, and the moments."""
        check_adamw(
            scalars,
            moments=(exp_avg, exp_avg_sq),
            grad=(grad, gradient_dtypes(param)),
            param=(param, (torch.bfloat16,)),
            residual=(residual, (torch.int16,)),
        )
        self._adamw(_EXACT, (param, residual, grad), (exp_avg, exp_avg_sq), scalars)

    def adamw_master(
        self,
        param: Tensor,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 masters and their moments, and write the 16-bit parameters from them."""
        check_adamw(
            scalars,
            moments=(exp_avg, exp_avg_sq),
            grad=(grad, gradient_dtypes(param)),
            param=(param, HALVES),
            master=(master, (torch.float32,)),
        )
        kept = _MASTER_BF16 if param.dtype is torch.bfloat16 else _MASTER_FP16
        self._adamw(kept, (param, master, grad), (exp_avg, exp_avg_sq), scalars)

    def _adamw(
        self,
        kept: Any,
        operands: tuple[Tensor, ...],
        moments: tuple[Tensor, Tensor],
        scalars: AdamWScalars,
    ) -> None:
        values = dataclasses.astuple(scalars)
        _launch(_adamw, *operands, moments, values, numel=operands[0].numel(), KEPT=kept.value)

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
