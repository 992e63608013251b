"""The PTX inside the Triton kernels has, in an interpreter, the bits of the other kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offload import (
    AdamWScalars,
    StateArrays,
    UpdateScalars,
    load_kernels,
    triton_adam,
    triton_codes,
)
from offload.codes import (
    FACTORS,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    join_short,
    split_short,
)
from offload.rules import AdamScalars
from offload.triton_codes import Asm
from tests.support.ptx import Lanes, Machine

PACK = triton_codes.PACK
PATTERNS = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7FFFFFFF]
COMMON: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "grad_scale": 0.5}


def ordinary(random: np.random.Generator, count: int, scale: float) -> np.ndarray[Any, Any]:
    """Return values over many octaves, a fifth of them zeros of both signs."""
    values = random.normal(size=count) * np.exp2(random.integers(-30, 6, count)) * scale
    values[random.random(count) < 0.2] *= 0.0
    return values.astype(np.float32)


def odd(random: np.random.Generator, count: int) -> np.ndarray[Any, Any]:
    """Return any bits at all, among them the patterns at which something changes."""
    bits = random.integers(0, 1 << 32, count, dtype=np.uint32)
    chosen = random.choice(np.array(PATTERNS, np.uint32), count)
    chosen |= random.integers(0, 2, count, dtype=np.uint32) << np.uint32(31)
    return np.where(random.random(count) < 0.3, chosen, bits).view(np.float32)


def scalar_words(scalars: UpdateScalars) -> list[float | int]:
    """Return the scalars as the kernel hands them to its PTX."""
    divisor = np.float32(scalars.bias_correction2_sqrt) * np.float32(triton_adam.ROOT_SCALE)
    is_usual = (
        triton_adam.LEAST_CORRECTION <= scalars.bias_correction2_sqrt <= 1.0
        and triton_adam.LEAST_EPS <= scalars.eps <= triton_adam.GREATEST_EPS
    )
    return [
        *(scalars.beta1, scalars.one_minus_beta1, scalars.beta2, scalars.one_minus_beta2),
        *(scalars.decay_factor, scalars.step_size, scalars.bias_correction2_sqrt, scalars.eps),
        *(scalars.grad_scale, scalars.l2, divisor, np.float32(1) / divisor),
        0xFFFF_FFFF if is_usual else 0,
    ]


def run_adam(
    values: list[np.ndarray[Any, Any]], scalars: UpdateScalars, pack: int
) -> tuple[list[Lanes], float]:
    """Return masters and moments after an update, and how many took the careful path."""
    text = triton_adam.update_asm(pack, is_adamw=isinstance(scalars, AdamWScalars))
    count = values[0].size // pack
    inputs = [each.view(np.uint32)[i::pack].copy() for each in values for i in range(pack)]
    for word in scalar_words(scalars):
        bits = word if isinstance(word, int) else int(np.float32(word).view(np.uint32))
        inputs += [np.full(count, bits, np.uint32)] * pack
    assert len(inputs) + 3 * pack == len(triton_adam.constraints(pack).split(","))
    machine = Machine(count)
    results = machine.run(text, inputs, 3 * pack)
    found = [np.empty(values[0].size, np.uint32) for _ in range(3)]
    for at in range(3 * pack):
        found[at // pack][at % pack :: pack] = results[at]
    return found, float(machine.branched.mean())


@pytest.mark.parametrize("pack", [4, 8])
@pytest.mark.parametrize("is_adamw", [True, False])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_quick_division_has_the_bits_of_the_numpy_kernel(is_adamw, step, pack) -> None:
    random = np.random.default_rng(step)
    kind = AdamWScalars if is_adamw else AdamScalars
    scalars = kind.from_hyperparameters(**COMMON, betas=(0.9, 0.999), weight_decay=0.01, step=step)
    count = 1 << 17
    for is_odd in (False, True):
        values = [ordinary(random, count, scale) for scale in (0.1, 1e-3, 1e-6, 1e-3)]
        if is_odd:
            values = [odd(random, count) for _ in values]
        values[2] = np.abs(values[2])
        with np.errstate(all="ignore"):
            found, careful = run_adam(values, scalars, pack)
            param, exp_avg, exp_avg_sq, grad = (each.copy() for each in values)
            state = StateArrays(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
            load_kernels("numpy").update(param, grad, state, scalars)
        for name, got, wanted in zip("pmv", found, (param, exp_avg, exp_avg_sq), strict=True):
            wrong = np.flatnonzero(got != wanted.view(np.uint32))
            assert wrong.size == 0, (name, is_odd, wrong[:5])
        assert careful > 0.9 if is_odd else careful < 0.02


def run(asm: Asm, operands: list[Lanes], result_count: int) -> list[Lanes]:
    assert result_count + len(operands) == len(asm.constraints.split(","))
    return Machine(operands[0].size).run(asm.text, operands, result_count)


def lanes_of(values: np.ndarray[Any, Any]) -> list[Lanes]:
    """Return the elements of each pack, as many in a register as fit."""
    words = values.view(np.uint32)
    count = PACK * values.itemsize // 4
    return [words[i::count].copy() for i in range(count)]


def gathered(lanes: list[Lanes], kind: type[np.generic] = np.uint32) -> np.ndarray[Any, Any]:
    return np.stack(lanes, axis=1).reshape(-1).view(kind)


def same(count: int, word: int) -> list[Lanes]:
    """Return a number that all elements share."""
    return [np.full(count // PACK, word, np.uint32)] * PACK


def in_both(values: np.ndarray[Any, Any]) -> Lanes:
    """Return 16-bit numbers in both halves of a register."""
    halves = values.astype(np.uint32) & np.uint32(0xFFFF)
    return halves | halves << np.uint32(16)


def of_each(values: np.ndarray[Any, Any]) -> list[Lanes]:
    """Return what a block has, once for each element of its packs."""
    return [np.repeat(values, 32 // PACK).astype(np.uint32)] * PACK


def moments(random: np.random.Generator, count: int) -> tuple[np.ndarray[Any, Any], ...]:
    """Return exp_avg and exp_avg_sq over many octaves, some blocks zero or with NaN or infinity."""
    m, v = ordinary(random, count, 1.0), np.abs(ordinary(random, count, 1e-20))
    for values in (m, v):
        values[:64] = 0.0
        values[70] = np.inf
        values[100:102] = np.array([0x7FC0_0000], np.uint32).view(np.float32)
        values[130] = np.finfo(np.float32).max
    return m, v


def test_a_tile_is_rounded_and_encoded_as_numpy_does() -> None:
    random = np.random.default_rng(3)
    count = 1 << 14
    m, v = moments(random, count)
    master = random.integers(0, 1 << 32, count, dtype=np.uint32)
    x, y = (random.integers(0, 1 << 32, count // PACK, dtype=np.uint32) for _ in range(2))
    factors = [np.full(x.size, each, np.uint32) for each in FACTORS]
    words = (x[:, None] * np.array(FACTORS, np.uint32) + y[:, None]).reshape(-1)
    operands = [*lanes_of(master), *lanes_of(m), *lanes_of(v), *[x] * PACK, *[y] * PACK]
    results = run(triton_codes.ROUND, [*operands, *factors, *same(count, 1)], 2 * PACK)
    longer, m_half, v_half = results[:PACK], results[PACK : PACK + 4], results[PACK + 4 :]

    found = run(triton_codes.SPLIT, longer, 6)
    param, residual = split_short(master.view(np.float32), words & np.uint32(0xFF))
    np.testing.assert_array_equal(gathered(found[:4], np.uint16), param)
    np.testing.assert_array_equal(gathered(found[4:], np.int8), residual)

    m_codes, m_bases = encode_signed(m, words & np.uint32(0xF_FFFF))
    v_codes, v_bases = encode_unsigned(v, words >> np.uint32(13))
    greatest = [
        (gathered(halves, np.uint16) & 0x7FFF).reshape(-1, 32).max(axis=1)
        for halves in (m_half, v_half)
    ]
    both = greatest[0] | greatest[1].astype(np.uint32) << np.uint32(16)
    m_below, v_below, m_base, v_base = run(triton_codes.BASES, [both], 4)
    np.testing.assert_array_equal(m_base, m_bases)
    np.testing.assert_array_equal(v_base, v_bases)
    for asm, halves, below, factor, codes in (
        (triton_codes.ENCODE_SIGNED, m_half, m_below, 16, m_codes),
        (triton_codes.ENCODE_UNSIGNED, v_half, v_below, 32, v_codes),
    ):
        found = run(asm, [*halves, *of_each(below), *same(count, factor)], 2)
        np.testing.assert_array_equal(gathered(found, np.uint8), codes)


def test_the_greatest_of_pairs() -> None:
    one, other = (np.random.default_rng(at).integers(0, 1 << 32, 99, np.uint32) for at in (1, 2))
    (found,) = run(triton_codes.GREATEST, [one, other], 1)
    pairs = [each.view(np.uint16).reshape(-1, 2) for each in (one, other)]
    np.testing.assert_array_equal(found.view(np.uint16).reshape(-1, 2), np.maximum(*pairs))
    (found,) = run(triton_codes.BOTH_GREATEST, [one, other], 1)
    wanted = np.stack([each.max(axis=1) for each in pairs], axis=1)
    np.testing.assert_array_equal(found.view(np.uint16).reshape(-1, 2), wanted)


def test_codes_are_decoded_as_numpy_does() -> None:
    random = np.random.default_rng(3)
    m, v = moments(random, 1 << 14)
    m_codes, m_bases = encode_signed(m)
    v_codes, v_bases = encode_unsigned(v)
    m_codes[random.random(m.size) < 0.1] &= 0x80
    v_codes[random.random(m.size) < 0.1] = 0
    operands = [*lanes_of(m_codes), *lanes_of(v_codes)]
    operands += of_each(in_both(m_bases << 4)) + of_each(v_bases.astype(np.uint32) << 19)
    factors = [*same(m.size, 16), *same(m.size, 1 << 16), *same(m.size, 1 << 19)]
    found = run(triton_codes.DECODE, [*operands, *factors], 2 * PACK)
    wanted = decode_signed(m_codes, m_bases), decode_unsigned(v_codes, v_bases)
    np.testing.assert_array_equal(gathered(found[:PACK]), wanted[0].view(np.uint32))
    np.testing.assert_array_equal(gathered(found[PACK:]), wanted[1].view(np.uint32))


def test_masters_are_joined_as_numpy_does() -> None:
    random = np.random.default_rng(4)
    param = random.integers(0, 1 << 16, 1 << 14, dtype=np.uint16)
    residual = random.integers(-128, 128, param.size, dtype=np.int8)
    halves = lanes_of(param)
    factors = [*same(param.size, 1 << 16), *same(param.size, 1)]
    found = run(triton_codes.JOIN, [*halves, *lanes_of(residual), *factors], PACK)
    np.testing.assert_array_equal(gathered(found), join_short(param, residual).view(np.uint32))
    found = run(triton_codes.WIDEN, [*halves, *same(param.size, 1 << 16)], PACK)
    np.testing.assert_array_equal(gathered(found), param.astype(np.uint32) << np.uint32(16))
