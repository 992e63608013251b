"""Numbers and their bits in Triton's language.

See [Note: Triton bits] in offload/kernels_triton.py.
"""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"
# ruff: noqa: ANN001, ANN201, RET505

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_nan(bits):
    """Tell which bits are NaNs."""
    return (bits & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def with_one_nan(value):
    """Return results, each NaN as the one pattern that all kernels store."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(is_nan(bits), 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def quiet(bits):
    """Return the bits of masters, each NaN as the quiet one with its sign."""
    sign = (bits >> 31) << 31
    return tl.where(is_nan(bits), sign | 0x7FC00000, bits)


@triton.jit
def widened(value):
    """Return values in fp32."""
    if value.dtype == tl.bfloat16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def joined(param, residual):
    """Return the masters that parameters and 16-bit residuals are together."""
    bits = (param.to(tl.int16, bitcast=True).to(tl.int32) << 16) + residual.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bf16_of(bits):
    """Return the bf16 nearest to numbers given as bits, ties away from zero."""
    return ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def fp16_of(bits):
    """Return the fp16 nearest to numbers given as bits, a NaN as the quiet one."""
    sign = (bits >> 16) & 0x8000
    rounded = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
    half = tl.where(is_nan(bits), (sign | 0x7E00).to(tl.int16), rounded)
    return half.to(tl.float16, bitcast=True)


@triton.jit
def sign_of(value):
    """Return 1 with the sign of a number; zeros and NaNs are returned as they are."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    one = (((bits >> 31) << 31) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where((magnitude != 0) & (magnitude <= 0x7F800000), one, value)
