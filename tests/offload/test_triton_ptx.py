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
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    join_short,
    split_short,
)
from offload.rules import AdamScalars
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
        *(0xFFFF_FFFF if is_usual else 0, 2),
    ]


def run_adam(
    values: list[np.ndarray[Any, Any]], scalars: UpdateScalars
) -> tuple[list[Lanes], float]:
    """Return masters and moments after an update, and how many took the careful path."""
    text = triton_adam.ADAMW_ASM if isinstance(scalars, AdamWScalars) else triton_adam.ADAM_ASM
    count = values[0].size // PACK
    inputs = [each.view(np.uint32)[i::PACK].copy() for each in values for i in range(PACK)]
    for word in scalar_words(scalars):
        bits = word if isinstance(word, int) else int(np.float32(word).view(np.uint32))
        inputs += [np.full(count, bits, np.uint32)] * PACK
    machine = Machine(count)
    results = machine.run(text, inputs, 3 * PACK)
    found = [np.empty(values[0].size, np.uint32) for _ in range(3)]
    for at in range(3 * PACK):
        found[at // PACK][at % PACK :: PACK] = results[at]
    return found, float(machine.branched.mean())


@pytest.mark.parametrize("is_adamw", [True, False])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_quick_division_has_the_bits_of_the_numpy_kernel(is_adamw, step) -> None:
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
            found, careful = run_adam(values, scalars)
            param, exp_avg, exp_avg_sq, grad = (each.copy() for each in values)
            state = StateArrays(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
            load_kernels("numpy").update(param, grad, state, scalars)
        for name, got, wanted in zip("pmv", found, (param, exp_avg, exp_avg_sq), strict=True):
            wrong = np.flatnonzero(got != wanted.view(np.uint32))
            assert wrong.size == 0, (name, is_odd, wrong[:5])
        assert careful > 0.9 if is_odd else careful < 0.01


def lanes_of(values: np.ndarray[Any, Any]) -> list[Lanes]:
    """Return four elements of four bytes, a register each."""
    return [values.view(np.uint32)[i::PACK].copy() for i in range(PACK)]


def gathered(lanes: list[Lanes]) -> Lanes:
    return np.stack(lanes, axis=1).reshape(-1)


@pytest.mark.parametrize("is_signed", [True, False])
def test_codes(is_signed) -> None:
    random = np.random.default_rng(3)
    values = ordinary(random, 1 << 14, 1.0)
    values = values if is_signed else np.abs(values)
    shift, encode = (20, encode_signed) if is_signed else (19, encode_unsigned)
    codes, bases = encode(values)
    spread = np.repeat(bases.astype(np.uint32), 32)
    bits = values.view(np.uint32)
    upper = ((bits * np.uint32(2) + np.uint32(1 << shift)) >> np.uint32(shift + 1)).astype(
        np.uint32
    )
    text = triton_codes.ENCODE_SIGNED if is_signed else triton_codes.ENCODE_UNSIGNED
    operands = [*lanes_of(bits), *lanes_of(upper), *lanes_of(spread)]
    (word,) = Machine(values.size // PACK).run(text, operands, 1)
    np.testing.assert_array_equal(word.view(np.uint8), codes)

    text = triton_codes.DECODE_SIGNED if is_signed else triton_codes.DECODE_UNSIGNED
    unit = [np.full(word.size, 1 << shift, np.uint32)] * PACK
    operands = [word, *lanes_of(spread << np.uint32(shift)), *unit]
    found = gathered(Machine(word.size).run(text, operands, PACK))
    decode = decode_signed if is_signed else decode_unsigned
    np.testing.assert_array_equal(found, decode(codes, bases).view(np.uint32))


def test_masters() -> None:
    random = np.random.default_rng(4)
    master = random.integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
    noise = random.integers(0, 256, master.size, dtype=np.uint32)
    param, residual = split_short(master.view(np.float32), noise)
    longer = master + noise
    operands = [*lanes_of(longer), *lanes_of(longer + np.uint32(0x8000))]
    found = Machine(master.size // PACK).run(triton_codes.SPLIT, operands, 3)
    np.testing.assert_array_equal(gathered(found[:2]).view(np.uint16), param)
    np.testing.assert_array_equal(found[2].view(np.int8), residual)
    halves = param.view(np.uint32)
    operands = [halves[::2].copy(), halves[1::2].copy(), residual.view(np.uint32)]
    joined = gathered(Machine(master.size // PACK).run(triton_codes.JOIN, operands, PACK))
    np.testing.assert_array_equal(joined, join_short(param, residual).view(np.uint32))
