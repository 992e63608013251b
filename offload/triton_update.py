"""The update of every optimizer and format in Triton's language.

See [Note: Triton bits] and [Note: one] in offload/kernels_triton.py.
"""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, PLR1714, RET505, SIM109

from __future__ import annotations

import triton
import triton.language as tl

from offload.launches import ROW_NUMEL
from offload.triton_compact import update_compact
from offload.triton_numbers import bf16_of, fp16_of, joined, widened
from offload.triton_rules import ADAGRAD, ADAM, ADAMW, FEW, moved
from offload.triton_words import GROUP, factors, group_words

# How the master of a parameter is kept.
_OWN = tl.constexpr(0)
_EXACT = tl.constexpr(1)
_MASTER_BF16 = tl.constexpr(2)
_MASTER_FP16 = tl.constexpr(3)
_BF16 = tl.constexpr(4)
_COMPACT = tl.constexpr(5)

_ROW = tl.constexpr(ROW_NUMEL)


@triton.jit
def _rounded(value, noise):
    """Return the bf16 that values with 16 random bits added are cut to."""
    bits = value.to(tl.uint32, bitcast=True) + noise
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _random_words(lane, key):
    word, high = key
    x, y = group_words(word + (lane // GROUP).to(tl.uint32), high)
    return x * factors(lane % GROUP) + y


@triton.jit
def _master(param, weight, lane, inside, KEPT: tl.constexpr):
    """Return the fp32 master, however it is kept."""
    if KEPT == _EXACT or KEPT == _BF16:
        return joined(tl.load(param + lane, inside), tl.load(weight + lane, inside))
    elif KEPT == _OWN:
        return tl.load(param + lane, inside)
    else:
        return tl.load(weight + lane, inside)


@triton.jit
def _store_master(param, weight, lane, inside, p, KEPT: tl.constexpr):
    bits = p.to(tl.int32, bitcast=True)
    if KEPT == _EXACT or KEPT == _BF16:
        tl.store(param + lane, bf16_of(bits), inside)
        tl.store(weight + lane, bits.to(tl.int16), inside)
    elif KEPT == _OWN:
        tl.store(param + lane, p, inside)
    else:
        tl.store(weight + lane, p, inside)
        tl.store(param + lane, bf16_of(bits) if KEPT == _MASTER_BF16 else fp16_of(bits), inside)


@triton.jit
def _update_tile(
    arrays, scalars, key, left, KEPT: tl.constexpr, RULE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Update a tile; `left` is None, or how many elements there are of one that is not whole."""
    param, weight, grad, exp_avg, exp_avg_sq, _exp_avg_base, _exp_avg_sq_base = arrays
    lane = tl.arange(0, TILE)
    inside = lane < left if left is not None else None
    master = _master(param, weight, lane, inside, KEPT)
    g = widened(tl.load(grad + lane, inside))
    m = tl.zeros_like(master)
    v = m
    if RULE != ADAGRAD:
        m = widened(tl.load(exp_avg + lane, inside))
    if RULE == ADAMW or RULE == ADAM or RULE == ADAGRAD:
        v = widened(tl.load(exp_avg_sq + lane, inside))
    p, m, v = moved(master, m, v, g, scalars, RULE, FEW)
    if KEPT == _BF16:
        words = _random_words(lane, key)
        m = _rounded(m, words & 0xFFFF)
        v = _rounded(v, words >> 16)
    if RULE != ADAGRAD:
        tl.store(exp_avg + lane, m, inside)
    if RULE == ADAMW or RULE == ADAM or RULE == ADAGRAD:
        tl.store(exp_avg_sq + lane, v, inside)
    _store_master(param, weight, lane, inside, p, KEPT)


@triton.jit
def _from(arrays, key, tile, TILE: tl.constexpr):
    """Return where the arrays and the random words of a tile are."""
    param, weight, grad, exp_avg, exp_avg_sq, exp_avg_base, exp_avg_sq_base = arrays
    word, high = key
    start = tile.to(tl.int64) * TILE
    block = tile.to(tl.int64) * (TILE // 32)
    group = tile.to(tl.uint32) * (TILE // GROUP)
    return (
        (
            param + start,
            weight + start,
            grad + start,
            exp_avg + start,
            exp_avg_sq + start,
            exp_avg_base + block,
            exp_avg_sq_base + block,
        ),
        (word.to(tl.uint32) + group, high.to(tl.uint32)),
    )


@triton.jit
def _at_part(arrays, row):
    """Return the arrays from where a part begins, its key and its size, from a row of a table.

    Arrays begin at multiples of 32 elements, gradients at multiples of 8.
    """
    param, weight, grad, exp_avg, exp_avg_sq, exp_avg_base, exp_avg_sq_base = arrays
    start = tl.multiple_of(tl.load(row), 32)
    grad_start = tl.multiple_of(tl.load(row + 1), 8)
    numel = tl.load(row + 2)
    word = tl.load(row + 3)
    high = tl.load(row + 4)
    block = start // 32
    arrays = (
        param + start,
        weight + start,
        grad + grad_start,
        exp_avg + start,
        exp_avg_sq + start,
        exp_avg_base + block,
        exp_avg_sq_base + block,
    )
    return arrays, word, high, numel


@triton.jit(do_not_specialize=["word", "high", "numel"])
def update(
    arrays,
    scalars,
    word,
    high,
    numel,
    table,
    HOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update the whole tiles there are, or the rest, as HOW says after format and rule.

    A program has a tile. With a table, whose rows are those of [Note: launches], the second number
    of a program is that of its part. What is left of a part has a launch of its own, because masks
    take registers.

    The scalars are those of `UpdateScalars`, a 1 (see [Note: one]) and `derived_scalars`.
    """
    KEPT: tl.constexpr = HOW[0]
    RULE: tl.constexpr = HOW[1]
    IS_REST: tl.constexpr = HOW[2]
    if table is not None:
        arrays, word, high, numel = _at_part(arrays, table + tl.program_id(1) * _ROW)
    whole = (numel // TILE).to(tl.int32)
    tile = whole if IS_REST else tl.program_id(0)
    left = (numel % TILE).to(tl.int32) if IS_REST else None
    here, key = _from(arrays, (word, high), tile, TILE)
    if IS_REST or tile < whole:  # a part may have fewer tiles than the largest of its launch
        if KEPT == _COMPACT:
            update_compact(here, scalars, key, left, RULE, TILE)
        else:
            _update_tile(here, scalars, key, left, KEPT, RULE, TILE)
