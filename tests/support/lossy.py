"""The fp64 oracle of the lossy formats: what records mean, and what an update should make of them.

It reads stored numbers by their meaning, in Python's fp64, and shares no code with the product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offload import StateArrays

BLOCK = 32
FRACTION_BITS = {"exp_avg": 3, "exp_avg_sq": 4}
Wide = np.ndarray[Any, np.dtype[np.float64]]


def value_of_upper(upper: np.ndarray, fraction_bits: int) -> Wide:
    """Return the numbers whose 8 bits of exponent and few of fraction are given."""
    exponent = (upper >> fraction_bits).astype(np.int64)
    fraction = (upper & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    return np.where(exponent == 0, fraction * 2.0**-126, (1 + fraction) * 2.0 ** (exponent - 127.0))


def moment_of(state: StateArrays, name: str) -> Wide:
    """Return what a stored moment means."""
    codes, bits = getattr(state, name), FRACTION_BITS[name]
    if codes.dtype == np.uint16:
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    base = np.repeat(getattr(state, f"{name}_base").astype(np.int64), BLOCK)[: codes.size]
    if name == "exp_avg_sq":
        return value_of_upper(base + codes, bits)
    magnitude = codes & 0x7F
    value = np.where(magnitude == 0, 0.0, value_of_upper(base + magnitude, bits))
    return np.where(codes & 0x80, -value, value)


def master_of(param: np.ndarray, residual: np.ndarray) -> Wide:
    """Return the master that a bf16 parameter and its residual, of 8 or 16 bits, are together."""
    shift = 8 if residual.dtype == np.int8 else 0
    bits = (param.astype(np.int64) << 16) + (residual.astype(np.int64) << shift)
    return (bits & 0xFFFF_FFFF).astype(np.uint32).view(np.float32).astype(np.float64)


def unit(values: Wide, fraction_bits: int) -> Wide:
    """Return the distance of the numbers with this much fraction around each value."""
    exponent = np.floor(np.log2(np.maximum(np.abs(values), 2.0**-126)))
    return 2.0 ** (exponent - fraction_bits)


def adamw(p: Wide, m: Wide, v: Wide, g: Wide, scalars: Any) -> tuple[Wide, Wide, Wide]:
    """One step of AdamW in fp64."""
    g = g * scalars.grad_scale
    m = m * scalars.beta1 + g * scalars.one_minus_beta1
    v = v * scalars.beta2 + g * g * scalars.one_minus_beta2
    denominator = np.sqrt(v) / scalars.bias_correction2_sqrt + scalars.eps
    return p * scalars.decay_factor - scalars.step_size * m / denominator, m, v


def least_of_block(values: Wide, fraction_bits: int, octaves: float) -> Wide:
    """Return, for each element, below what its block's codes cannot say more than the least."""
    rows = np.pad(np.abs(values), (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    greatest = np.repeat(rows.max(axis=1), BLOCK)[: values.size]
    return 2.0 ** (np.floor(np.log2(np.maximum(greatest, 2.0**-126))) + 2 - octaves)
