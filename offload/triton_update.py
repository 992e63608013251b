"""The update of every optimizer and format in Triton's language.

See [Note: Triton bits] and [Note: one] in offload/kernels_triton.py.
"""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"
# ruff: noqa: ANN001, ANN201, ANN202, FBT003, N803, N806, PLR1714, RET505, SIM109

from __future__ import annotations

import triton
import triton.language as tl

from offload import triton_adam, triton_codes
from offload.launches import ROW_NUMEL
from offload.triton_numbers import bf16_of, fp16_of, joined, sign_of, widened, with_one_nan

# How the master of a parameter is kept.
_OWN = tl.constexpr(0)
_EXACT = tl.constexpr(1)
_MASTER_BF16 = tl.constexpr(2)
_MASTER_FP16 = tl.constexpr(3)
_BF16 = tl.constexpr(4)
_COMPACT = tl.constexpr(5)

# The rules, as `UpdateScalars.rule_number` counts them.
_ADAMW = tl.constexpr(0)
_ADAM = tl.constexpr(1)
_LION = tl.constexpr(2)
_ADAGRAD = tl.constexpr(3)
_SGD = tl.constexpr(4)

_ROW = tl.constexpr(ROW_NUMEL)
_ADAMW_ASM = tl.constexpr(triton_adam.ADAMW_ASM)
_ADAM_ASM = tl.constexpr(triton_adam.ADAM_ASM)
_ADAM_CONSTRAINTS = tl.constexpr(triton_adam.CONSTRAINTS)
_PACK = tl.constexpr(triton_adam.PACK)
_ROOT_SCALE = tl.constexpr(triton_adam.ROOT_SCALE)
_LEAST_CORRECTION = tl.constexpr(triton_adam.LEAST_CORRECTION)
_LEAST_EPS = tl.constexpr(triton_adam.LEAST_EPS)
_GREATEST_EPS = tl.constexpr(triton_adam.GREATEST_EPS)
_DECODE_SIGNED = tl.constexpr(triton_codes.DECODE_SIGNED)
_DECODE_UNSIGNED = tl.constexpr(triton_codes.DECODE_UNSIGNED)
_DECODE_CONSTRAINTS = tl.constexpr(triton_codes.DECODE_CONSTRAINTS)
_JOIN = tl.constexpr(triton_codes.JOIN)
_JOIN_CONSTRAINTS = tl.constexpr(triton_codes.JOIN_CONSTRAINTS)
_SPLIT = tl.constexpr(triton_codes.SPLIT)
_SPLIT_CONSTRAINTS = tl.constexpr(triton_codes.SPLIT_CONSTRAINTS)
_ENCODE_SIGNED = tl.constexpr(triton_codes.ENCODE_SIGNED)
_ENCODE_UNSIGNED = tl.constexpr(triton_codes.ENCODE_UNSIGNED)
_ENCODE_CONSTRAINTS = tl.constexpr(triton_codes.ENCODE_CONSTRAINTS)


@triton.jit
def _reciprocal(value):
    """Return the reciprocal that a rounded division would use."""
    near = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(near, tl.fma(-value, near, 1.0), near)


@triton.jit
def _adam_moved(p, m, v, g, scalars, one, RULE: tl.constexpr):
    """Return master and moments after AdamW or Adam; see [Note: quick division]."""
    beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor, step_size = scalars[:6]
    correction, eps, grad_scale, l2, _initial, _nesterov = scalars[6:12]
    divisor = correction * _ROOT_SCALE
    is_usual = (correction >= _LEAST_CORRECTION) & (correction <= 1.0)
    is_usual = is_usual & (eps >= _LEAST_EPS) & (eps <= _GREATEST_EPS)
    all_ones = tl.where(is_usual, -1, 0)
    return tl.inline_asm_elementwise(
        _ADAMW_ASM if RULE == _ADAMW else _ADAM_ASM,
        _ADAM_CONSTRAINTS,
        [
            p,
            m,
            v,
            g,
            beta1,
            one_minus_beta1,
            beta2,
            one_minus_beta2,
            decay_factor,
            step_size,
            correction,
            eps,
            grad_scale,
            l2,
            divisor,
            _reciprocal(divisor),
            all_ones,
            one + one,
        ],
        dtype=(tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=_PACK,
    )


@triton.jit
def _moved(p, m, v, g, scalars, one, RULE: tl.constexpr):
    """Return master and moments after an update, each NaN as one; see [Note: update rules]."""
    if RULE == _ADAMW or RULE == _ADAM:
        return _adam_moved(p, m, v, g, scalars, one, RULE)
    beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor, step_size = scalars[:6]
    _correction, eps, grad_scale, l2, initial, nesterov = scalars[6:12]
    g = g * grad_scale
    if RULE == _ADAGRAD or RULE == _SGD:
        g = g + p * l2
    change = g
    if RULE == _LION:
        p = p * decay_factor
        change = sign_of(m * beta1 + g * one_minus_beta1)
        m = m * beta2 + g * one_minus_beta2
    if RULE == _ADAGRAD:
        v = v + g * g
        change = tl.div_rn(g, tl.sqrt_rn(v + initial) + eps)
    if RULE == _SGD:
        m = m * beta1 + g * one_minus_beta1
        change = tl.where(nesterov != 0, g + m * beta1, m)
    return with_one_nan(p - step_size * change), with_one_nan(m), with_one_nan(v)


@triton.jit
def _mixed(words):
    words = words ^ (words >> 16)
    words = words * tl.full((), 0x85EBCA6B, tl.uint32)
    words = words ^ (words >> 13)
    words = words * tl.full((), 0xC2B2AE35, tl.uint32)
    return words ^ (words >> 16)


@triton.jit
def _noise(lane, key):
    first, high, one = key
    return _mixed(_mixed(lane.to(tl.uint32) * one + first) ^ high)


@triton.jit
def _other_noise(noise, one):
    return _mixed(noise * one + tl.full((), 0x9E3779B9, tl.uint32))


@triton.jit
def _bits(value):
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def _upper(value, random, inside, one, SHIFT: tl.constexpr):
    """Return the upper bits of magnitudes with random bits added; doubling drops the sign."""
    upper = ((_bits(value) * (one + one) + random) >> (SHIFT + 1)).to(tl.int32)
    return upper if inside is None else tl.where(inside, upper, 0)


@triton.jit
def _base(upper, CODES: tl.constexpr):
    """Return the base of each block, a row of a tile, from the upper bits of its elements."""
    return tl.maximum(tl.max(upper, axis=1, keep_dims=True) - CODES, 0)


@triton.jit
def _loaded(moment, below, lanes, masks, one, KEPT: tl.constexpr, SIGNED: tl.constexpr):
    """Return a moment in fp32, however it is kept; `below` are the bases of its blocks."""
    lane, _ = lanes
    inside, _ = masks
    if KEPT == _COMPACT:
        code = tl.load(moment + lane, inside)
        below = below.to(tl.int32) & 0xFFFF
        return tl.inline_asm_elementwise(
            _DECODE_SIGNED if SIGNED else _DECODE_UNSIGNED,
            _DECODE_CONSTRAINTS,
            [code, below << (20 if SIGNED else 19), one << (20 if SIGNED else 19)],
            dtype=tl.float32,
            is_pure=True,
            pack=_PACK,
        )
    else:
        return widened(tl.load(moment + lane, inside))


@triton.jit
def _store_moment(
    moment, base, lanes, masks, value, random, KEPT: tl.constexpr, SIGNED: tl.constexpr
):  # fmt: skip
    noise, one = random
    lane, row = lanes
    inside, is_row = masks
    if KEPT == _COMPACT:
        if SIGNED:
            upper = _upper(value, noise >> 11, inside, one, 20)
            below = _base(upper, 0x7F)
        else:
            upper = _upper(value, _other_noise(noise, one) >> 12, inside, one, 19)
            below = _base(upper, 0xFF)
        code = tl.inline_asm_elementwise(
            _ENCODE_SIGNED if SIGNED else _ENCODE_UNSIGNED,
            _ENCODE_CONSTRAINTS,
            [_bits(value), upper, below],
            dtype=tl.uint8,
            is_pure=True,
            pack=_PACK,
        )
        tl.store(moment + lane, code, inside)
        tl.store(base + row, below.to(tl.int16), is_row)
    elif KEPT == _BF16:
        added = (noise & 0xFFFF) if SIGNED else (noise >> 16)
        half = ((_bits(value) + added) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(moment + lane, half, inside)
    else:
        tl.store(moment + lane, value, inside)


@triton.jit
def _master(param, weight, lane, inside, KEPT: tl.constexpr):
    """Return the fp32 master, however it is kept."""
    if KEPT == _EXACT or KEPT == _BF16:
        return joined(tl.load(param + lane, inside), tl.load(weight + lane, inside))
    elif KEPT == _COMPACT:
        return tl.inline_asm_elementwise(
            _JOIN,
            _JOIN_CONSTRAINTS,
            [tl.load(param + lane, inside), tl.load(weight + lane, inside)],
            dtype=tl.float32,
            is_pure=True,
            pack=_PACK,
        )
    elif KEPT == _OWN:
        return tl.load(param + lane, inside)
    else:
        return tl.load(weight + lane, inside)


@triton.jit
def _store_master(param, weight, lane, inside, p, noise, one, KEPT: tl.constexpr):
    bits = p.to(tl.int32, bitcast=True)
    if KEPT == _EXACT or KEPT == _BF16:
        tl.store(param + lane, bf16_of(bits), inside)
        tl.store(weight + lane, bits.to(tl.int16), inside)
    elif KEPT == _COMPACT:
        longer = (noise & 0xFF) * one + _bits(p)
        half, residual = tl.inline_asm_elementwise(
            _SPLIT,
            _SPLIT_CONSTRAINTS,
            [longer, longer * one + 0x8000],
            dtype=(tl.bfloat16, tl.int8),
            is_pure=True,
            pack=_PACK,
        )
        tl.store(param + lane, half, inside)
        tl.store(weight + lane, residual, inside)
    elif KEPT == _OWN:
        tl.store(param + lane, p, inside)
    else:
        tl.store(weight + lane, p, inside)
        tl.store(param + lane, bf16_of(bits) if KEPT == _MASTER_BF16 else fp16_of(bits), inside)


@triton.jit
def _bases(arrays, row, is_row, KEPT: tl.constexpr, RULE: tl.constexpr):
    """Return the bases of exp_avg and exp_avg_sq of a tile, zeros where there are none."""
    _param, _weight, _grad, _exp_avg, _exp_avg_sq, exp_avg_base, exp_avg_sq_base = arrays
    m = tl.zeros_like(row).to(tl.int16)
    v = m
    if KEPT == _COMPACT and RULE != _ADAGRAD:
        m = tl.load(exp_avg_base + row, is_row)
    if KEPT == _COMPACT and (RULE == _ADAMW or RULE == _ADAM or RULE == _ADAGRAD):
        v = tl.load(exp_avg_sq_base + row, is_row)
    return m, v


@triton.jit
def _update_tile(
    arrays, bases, scalars, key, lanes, masks, KEPT: tl.constexpr, RULE: tl.constexpr
):  # fmt: skip
    param, weight, grad, exp_avg, exp_avg_sq, exp_avg_base, exp_avg_sq_base = arrays
    lane, _ = lanes
    inside, _ = masks
    _first, _high, one = key
    m_base, v_base = bases
    master = _master(param, weight, lane, inside, KEPT)
    g = widened(tl.load(grad + lane, inside))
    m = tl.zeros_like(master)
    v = m
    if RULE != _ADAGRAD:
        m = _loaded(exp_avg, m_base, lanes, masks, one, KEPT, True)
    if RULE == _ADAMW or RULE == _ADAM or RULE == _ADAGRAD:
        v = _loaded(exp_avg_sq, v_base, lanes, masks, one, KEPT, False)
    p, m, v = _moved(master, m, v, g, scalars, one, RULE)
    noise = tl.zeros_like(master).to(tl.uint32)
    if KEPT == _BF16 or KEPT == _COMPACT:
        noise = _noise(lane, key)
    if RULE != _ADAGRAD:
        _store_moment(exp_avg, exp_avg_base, lanes, masks, m, (noise, one), KEPT, True)
    if RULE == _ADAMW or RULE == _ADAM or RULE == _ADAGRAD:
        _store_moment(exp_avg_sq, exp_avg_sq_base, lanes, masks, v, (noise, one), KEPT, False)
    _store_master(param, weight, lane, inside, p, noise, one, KEPT)


@triton.jit
def _from(arrays, key, tile, TILE: tl.constexpr):
    """Return where the arrays and the random bits of a tile are."""
    param, weight, grad, exp_avg, exp_avg_sq, exp_avg_base, exp_avg_sq_base = arrays
    first, high, one = key
    start = tile.to(tl.int64) * TILE
    block = tile.to(tl.int64) * (TILE // 32)
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
        (first.to(tl.uint32) + start.to(tl.uint32), high.to(tl.uint32), one),
    )


@triton.jit
def _bases_of(arrays, key, tile, whole, row, HOW: tl.constexpr):
    """Return the bases of a whole tile, if there is such a tile."""
    here, _ = _from(arrays, key, tile, HOW[2])
    return _bases(here, row, (row >= 0) & (tile < whole), HOW[0], HOW[1])


@triton.jit
def _at_part(arrays, row):
    """Return the arrays from where a part begins, its key and its size, from a row of a table.

    Arrays begin at multiples of 32 elements, gradients at multiples of 8.
    """
    param, weight, grad, exp_avg, exp_avg_sq, exp_avg_base, exp_avg_sq_base = arrays
    start = tl.multiple_of(tl.load(row), 32)
    grad_start = tl.multiple_of(tl.load(row + 1), 8)
    numel = tl.load(row + 2)
    first = tl.load(row + 3)
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
    return arrays, first, high, numel


@triton.jit(do_not_specialize=["first", "high", "numel"])
def update(
    arrays,
    scalars,
    first,
    high,
    numel,
    table,
    HOW: tl.constexpr,
    SHAPE: tl.constexpr,
):
    """Update the whole tiles there are, or the rest, as HOW says after format and rule.

    With a table, whose rows are those of [Note: launches], the second number of a program is that
    of its part.

    A program has a tile. Those of `compact` go on to others, whose arrays are copied to shared
    memory meanwhile: arithmetic takes as long as memory does there, so they must not take turns.
    What is left has a launch of its own, because masks take registers.

    The scalars are those of `UpdateScalars` and a 1; see [Note: one].
    """
    KEPT: tl.constexpr = HOW[0]
    RULE: tl.constexpr = HOW[1]
    IS_REST: tl.constexpr = HOW[2]
    TILE: tl.constexpr = SHAPE[0]
    STAGES: tl.constexpr = SHAPE[1]
    if table is not None:
        arrays, first, high, numel = _at_part(arrays, table + tl.program_id(1) * _ROW)
    if KEPT == _COMPACT:  # a row a block, so that its greatest is found within a row
        row = tl.expand_dims(tl.arange(0, TILE // 32), 1)
        lane = row * 32 + tl.expand_dims(tl.arange(0, 32), 0)
    else:
        lane = tl.arange(0, TILE)
        row = lane
    lanes = (lane, row)
    key = (first, high, scalars[12].to(tl.uint32))
    whole = (numel // TILE).to(tl.int32)
    start = tl.program_id(0)
    if IS_REST:
        left = (numel % TILE).to(tl.int32)
        here, words = _from(arrays, key, whole, TILE)
        bases = _bases(here, row, row * 32 < left, KEPT, RULE)
        masks = (lane < left, row * 32 < left)
        _update_tile(here, bases, scalars, words, lanes, masks, KEPT, RULE)
    elif KEPT == _COMPACT:
        m_base, v_base = _bases_of(arrays, key, start, whole, row, (KEPT, RULE, TILE))
        for tile in tl.range(start, whole, tl.num_programs(0), num_stages=STAGES):
            # Two bytes are too few to be copied meanwhile; they are loaded a tile ahead.
            following = tile + tl.num_programs(0)
            ahead = _bases_of(arrays, key, following, whole, row, (KEPT, RULE, TILE))
            here, words = _from(arrays, key, tile, TILE)
            bases = (m_base, v_base)
            _update_tile(here, bases, scalars, words, lanes, (None, None), KEPT, RULE)
            m_base, v_base = ahead
    elif start < whole:  # a part may have fewer tiles than the largest of its launch
        here, words = _from(arrays, key, start, TILE)
        bases = _bases(here, row, None, KEPT, RULE)
        _update_tile(here, bases, scalars, words, lanes, (None, None), KEPT, RULE)
