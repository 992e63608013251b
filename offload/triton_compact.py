"""The update of a tile of `compact` in Triton's language.

See [Note: codes] and [Note: random bits] in offload/codes.py, and [Note: one] in
offload/kernels_triton.py. A thread has the eight elements of a group, so that it mixes words once
and finds their greatest by itself; four threads have a block."""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR1714, RET505, SIM109

from __future__ import annotations

import triton
import triton.language as tl

from offload import triton_codes
from offload.triton_numbers import widened
from offload.triton_rules import ADAGRAD, ADAM, ADAMW, MANY, moved, one_of
from offload.triton_words import GROUP, factors, group_words

_BLOCK = tl.constexpr(32)
_GROUPS = tl.constexpr(4)
_GROUPS_SHIFT = tl.constexpr(2)
_JOIN = tl.constexpr((triton_codes.JOIN.text, triton_codes.JOIN.constraints))
_WIDEN = tl.constexpr((triton_codes.WIDEN.text, triton_codes.WIDEN.constraints))
_DECODE = tl.constexpr((triton_codes.DECODE.text, triton_codes.DECODE.constraints))
_ROUND = tl.constexpr((triton_codes.ROUND.text, triton_codes.ROUND.constraints))
_SPLIT = tl.constexpr((triton_codes.SPLIT.text, triton_codes.SPLIT.constraints))
_ENCODE_SIGNED = tl.constexpr(
    (triton_codes.ENCODE_SIGNED.text, triton_codes.ENCODE_SIGNED.constraints)
)
_ENCODE_UNSIGNED = tl.constexpr(
    (triton_codes.ENCODE_UNSIGNED.text, triton_codes.ENCODE_UNSIGNED.constraints)
)
_BASES = tl.constexpr((triton_codes.BASES.text, triton_codes.BASES.constraints))
_GREATEST = tl.constexpr((triton_codes.GREATEST.text, triton_codes.GREATEST.constraints))
_BOTH_GREATEST = tl.constexpr(
    (triton_codes.BOTH_GREATEST.text, triton_codes.BOTH_GREATEST.constraints)
)
_OPAQUE = tl.constexpr((triton_codes.OPAQUE.text, triton_codes.OPAQUE.constraints))


@triton.jit
def _greatest(one, other):
    return tl.inline_asm_elementwise(
        _GREATEST[0], _GREATEST[1], [one, other], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _greatest_of_group(halves, COUNT: tl.constexpr, MASK: tl.constexpr):
    """Return the greatest even and odd element of each group of upper halves, as a pair."""
    even, odd = tl.split(tl.reshape(halves, (COUNT, _GROUPS, 2)))
    low = even.to(tl.uint16, bitcast=True).to(tl.uint32)
    pairs = low | (odd.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return tl.reduce(pairs & MASK, 1, _greatest)


@triton.jit
def _greatest_of_block(m_half, v_half, COUNT: tl.constexpr):
    """Return for each group the greatest upper halves of its block: exp_avg below exp_avg_sq."""
    m = _greatest_of_group(m_half, COUNT, 0x7FFF7FFF)
    v = _greatest_of_group(v_half, COUNT, 0xFFFFFFFF)
    both = tl.reshape(
        tl.inline_asm_elementwise(
            _BOTH_GREATEST[0], _BOTH_GREATEST[1], [m, v], dtype=tl.uint32, is_pure=True, pack=1
        ),
        (COUNT // _GROUPS, _GROUPS),
    )
    greatest = tl.expand_dims(tl.reduce(both, 1, _greatest), 1)
    return tl.reshape(tl.broadcast_to(greatest, (COUNT // _GROUPS, _GROUPS)), (COUNT,))


@triton.jit
def _lanes(group):
    return tl.expand_dims(group, 1) * GROUP + tl.expand_dims(tl.arange(0, GROUP), 0)


@triton.jit
def _block_of(group):
    """Return where the base of each group is; that they follow each other must not be known.

    Else they would be loaded and stored in a layout of their own.
    """
    return tl.inline_asm_elementwise(
        _OPAQUE[0], _OPAQUE[1], [group >> _GROUPS_SHIFT], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _load_moments(moments, bases, where, inside, is_block, one, RULE: tl.constexpr):
    """Return exp_avg and exp_avg_sq in fp32, zeros where there are none."""
    lane, block = where
    m_code = tl.zeros_like(lane).to(tl.uint8)
    v_code = m_code
    m_base = tl.zeros_like(block)
    v_base = m_base
    if RULE != ADAGRAD:
        m_code = tl.load(moments[0] + lane, inside)
        m_base = tl.load(bases[0] + block, is_block).to(tl.int32) << 4
    if RULE == ADAMW or RULE == ADAM or RULE == ADAGRAD:
        v_code = tl.load(moments[1] + lane, inside)
        v_base = tl.load(bases[1] + block, is_block).to(tl.int32) << 19
    m_base = tl.expand_dims(m_base | (m_base << 16), 1)
    v_base = tl.expand_dims(v_base, 1)
    return tl.inline_asm_elementwise(
        _DECODE[0],
        _DECODE[1],
        [m_code, v_code, m_base, v_base, one << 4, one << 16, one << 19],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=MANY,
    )


@triton.jit
def _store_moments(moments, bases, halves, where, inside, is_block, one, RULE: tl.constexpr):
    """Store codes and bases of what is left of moments: their upper halves."""
    lane, block = where
    m_half, v_half = halves
    if inside is not None:
        m_half = tl.where(inside, m_half, 0)
        v_half = tl.where(inside, v_half, 0)
    greatest = _greatest_of_block(m_half, v_half, lane.shape[0])
    m_below, v_below, m_base, v_base = tl.inline_asm_elementwise(
        _BASES[0],
        _BASES[1],
        [greatest],
        dtype=(tl.uint32, tl.uint32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    if RULE != ADAGRAD:
        operands = [m_half, tl.expand_dims(m_below, 1), one << 4]
        codes = tl.inline_asm_elementwise(
            _ENCODE_SIGNED[0], _ENCODE_SIGNED[1], operands, dtype=tl.uint8, is_pure=True, pack=MANY
        )
        tl.store(moments[0] + lane, codes, inside)
        tl.store(bases[0] + block, m_base.to(tl.int16), is_block)
    if RULE == ADAMW or RULE == ADAM or RULE == ADAGRAD:
        operands = [v_half, tl.expand_dims(v_below, 1), one << 5]
        codes = tl.inline_asm_elementwise(
            _ENCODE_UNSIGNED[0],
            _ENCODE_UNSIGNED[1],
            operands,
            dtype=tl.uint8,
            is_pure=True,
            pack=MANY,
        )
        tl.store(moments[1] + lane, codes, inside)
        tl.store(bases[1] + block, v_base.to(tl.int16), is_block)


@triton.jit
def _load_gradient(grad, lane, inside, one):
    values = tl.load(grad + lane, inside)
    if values.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _WIDEN[0], _WIDEN[1], [values, one << 16], dtype=tl.float32, is_pure=True, pack=MANY
        )
    else:
        return widened(values)


@triton.jit
def update_compact(arrays, scalars, key, left, RULE: tl.constexpr, TILE: tl.constexpr):
    """Update a tile; `left` is None, or how many elements there are of one that is not whole."""
    param, weight, grad, exp_avg, exp_avg_sq, exp_avg_base, exp_avg_sq_base = arrays
    word, high = key
    one = one_of(scalars)
    group = tl.arange(0, TILE // GROUP)
    lane = _lanes(group)
    block = _block_of(group)
    inside = lane < left if left is not None else None
    is_block = block * _BLOCK < left if left is not None else None

    masters = [tl.load(param + lane, inside), tl.load(weight + lane, inside), one << 16, one]
    p = tl.inline_asm_elementwise(
        _JOIN[0], _JOIN[1], masters, dtype=tl.float32, is_pure=True, pack=MANY
    )
    g = _load_gradient(grad, lane, inside, one)
    moments = (exp_avg, exp_avg_sq)
    bases = (exp_avg_base, exp_avg_sq_base)
    m, v = _load_moments(moments, bases, (lane, block), inside, is_block, one, RULE)
    p, m, v = moved(p, m, v, g, scalars, RULE, MANY)

    x, y = group_words(word + group.to(tl.uint32), high)
    place = factors(tl.expand_dims(tl.arange(0, GROUP), 0))
    p, m, v = (
        p.to(tl.uint32, bitcast=True),
        m.to(tl.uint32, bitcast=True),
        v.to(tl.uint32, bitcast=True),
    )
    operands = [p, m, v, tl.expand_dims(x, 1), tl.expand_dims(y, 1), place, one]
    longer, m_half, v_half = tl.inline_asm_elementwise(
        _ROUND[0],
        _ROUND[1],
        operands,
        dtype=(tl.uint32, tl.int16, tl.int16),
        is_pure=True,
        pack=MANY,
    )

    # Addresses for the stores are made again: until here they would take registers.
    group = group.to(tl.uint32) * one
    lane = _lanes(group)
    block = _block_of(group)
    half, residual = tl.inline_asm_elementwise(
        _SPLIT[0], _SPLIT[1], [longer], dtype=(tl.bfloat16, tl.int8), is_pure=True, pack=MANY
    )
    tl.store(param + lane, half, inside)
    tl.store(weight + lane, residual, inside)
    _store_moments(moments, bases, (m_half, v_half), (lane, block), inside, is_block, one, RULE)
