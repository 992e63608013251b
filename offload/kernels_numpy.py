"""The kernels in numpy, for machines without the native module: the same bits, more slowly.

The formulas are in the notes of offload/kernels.py.
Work goes in chunks that fit the cache, so that temporaries stay small whatever the array.
"""

from collections.abc import Iterator
from typing import assert_never

import numpy as np
import numpy.typing as npt

from estimators import StateField, UpdateRule
from offload.codes import (
    MASTER_BITS,
    SIGNED_SHIFT,
    UNSIGNED_LOWEST,
    UNSIGNED_SHIFT,
    RoundingKey,
    Words,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    join_short,
    random_words,
    split_short,
    to_bf16,
)
from offload.kernel_calls import (
    Array,
    Kept,
    UpdateCalls,
    check_arrays,
    check_update,
    check_values,
)
from offload.kernels import (
    BLOCK_NUMEL,
    LANE_COUNT,
    Bf16Bits,
    FloatArray,
    Fp16Array,
    Fp32Array,
    ResidualArray,
)
from offload.operands import StateArrays
from offload.rules import UpdateScalars

_CHUNK_NUMEL = 16 * BLOCK_NUMEL
_SIGN_BIT = np.uint32(0x8000_0000)
_MAGNITUDE_BITS = np.uint32(0x7FFF_FFFF)
_INFINITY_BITS = np.uint32(0x7F80_0000)
_QUIET_NAN_BITS = np.uint32(0x7FC0_0000)
_QUIET_NAN = _QUIET_NAN_BITS.view(np.float32)


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _CHUNK_NUMEL):
        yield slice(start, min(start + _CHUNK_NUMEL, numel))


def _widen(values: FloatArray) -> Fp32Array:
    """Return fp32 values as they are, others widened."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def _join(param: Bf16Bits, residual: ResidualArray) -> Fp32Array:
    bits = param.astype(np.uint32) << np.uint32(16)
    bits += residual.astype(np.int32).view(np.uint32)
    return bits.view(np.float32)


def _quiet_bits(master: Fp32Array) -> npt.NDArray[np.uint32]:
    bits = master.view(np.uint32)
    is_nan = (bits & _MAGNITUDE_BITS) > _INFINITY_BITS
    return np.where(is_nan, (bits & _SIGN_BIT) | _QUIET_NAN_BITS, bits)


def _round_to_bf16(bits: npt.NDArray[np.uint32]) -> Bf16Bits:
    return ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def _round_into(param: Bf16Bits | Fp16Array, master: Fp32Array) -> None:
    """Write a chunk of masters, whose NaNs are quiet, as 16-bit parameters."""
    param[:] = _round_to_bf16(master.view(np.uint32)) if param.dtype == np.uint16 else master


def _adam(working: StateArrays, g: Fp32Array, scalars: UpdateScalars) -> Fp32Array:
    """Move both moments and return by how much the masters change."""
    m, v = working.exp_avg, working.exp_avg_sq
    m *= np.float32(scalars.beta1)
    m += g * np.float32(scalars.one_minus_beta1)
    g *= g
    g *= np.float32(scalars.one_minus_beta2)
    v *= np.float32(scalars.beta2)
    v += g
    denominator: Fp32Array = np.sqrt(v)
    denominator /= np.float32(scalars.bias_correction2_sqrt)
    denominator += np.float32(scalars.eps)
    return np.divide(m, denominator, out=denominator)


def _sign(values: Fp32Array) -> Fp32Array:
    """Return 1 with the sign of each number; zeros and NaNs are returned as they are."""
    return np.where(np.abs(values) > 0, np.copysign(np.float32(1), values), values)


def _change(p: Fp32Array, working: StateArrays, g: Fp32Array, scalars: UpdateScalars) -> Fp32Array:
    """Move the moments of a chunk by a rule, one operation a line; see [Note: update rules]."""
    match scalars.rule:
        case UpdateRule.ADAMW:
            p *= np.float32(scalars.decay_factor)
            return _adam(working, g, scalars)
        case UpdateRule.ADAM:
            g += p * np.float32(scalars.l2)
            return _adam(working, g, scalars)
        case UpdateRule.LION:
            m = working.exp_avg
            c = m * np.float32(scalars.beta1)
            c += g * np.float32(scalars.one_minus_beta1)
            m *= np.float32(scalars.beta2)
            m += g * np.float32(scalars.one_minus_beta2)
            p *= np.float32(scalars.decay_factor)
            return _sign(c)
        case UpdateRule.ADAGRAD:
            g += p * np.float32(scalars.l2)
            v = working.exp_avg_sq
            v += g * g
            g /= np.sqrt(v + np.float32(scalars.initial)) + np.float32(scalars.eps)
            return g
        case UpdateRule.SGD:
            g += p * np.float32(scalars.l2)
            m = working.exp_avg
            m *= np.float32(scalars.beta1)
            m += g * np.float32(scalars.one_minus_beta1)
            change: Fp32Array = g + m * np.float32(scalars.beta1) if scalars.nesterov else m.copy()
            return change
        case _:
            assert_never(scalars.rule)


def _step(master: Fp32Array, grad: Fp32Array, working: StateArrays, scalars: UpdateScalars) -> None:
    """Update a chunk of fp32 masters and moments in place."""
    change = _change(master, working, grad * np.float32(scalars.grad_scale), scalars)
    change *= np.float32(scalars.step_size)
    master -= change
    for result in (master, *(working.get(moment) for moment in scalars.rule.moments)):
        np.copyto(result, _QUIET_NAN, where=np.isnan(result))


def _update_bf16(
    param: Bf16Bits, grad: Fp32Array, state: StateArrays, scalars: UpdateScalars, key: RoundingKey
) -> None:
    """Update a chunk whose moments are kept in bf16."""
    master = _join(param, state.residual)
    moments = scalars.rule.moments
    working = StateArrays.of({moment: _widen(state.get(moment)) for moment in moments})
    _step(master, grad, working, scalars)
    noise = random_words(key, param.size)
    if working.exp_avg is not None:
        state.exp_avg[:] = to_bf16(working.exp_avg, noise & np.uint32(0xFFFF))
    if working.exp_avg_sq is not None:
        state.exp_avg_sq[:] = to_bf16(working.exp_avg_sq, noise >> np.uint32(16))
    _split_into(param, state.residual, master)


def _field(words: Words, lowest: int, count: int) -> Words:
    return (words >> np.uint32(lowest)) & np.uint32((1 << count) - 1)


def _update_compact(
    param: Bf16Bits, grad: Fp32Array, state: StateArrays, scalars: UpdateScalars, key: RoundingKey
) -> None:
    """Update a chunk of whole blocks whose moments are kept as codes."""
    master = join_short(param, state.residual)
    moments = scalars.rule.moments
    working = StateArrays(
        decode_signed(state.exp_avg, state.exp_avg_base) if StateField.EXP_AVG in moments else None,
        decode_unsigned(state.exp_avg_sq, state.exp_avg_sq_base)
        if StateField.EXP_AVG_SQ in moments
        else None,
    )
    _step(master, grad, working, scalars)
    words = random_words(key, param.size)
    param[:], state.residual[:] = split_short(master, _field(words, 0, MASTER_BITS))
    if working.exp_avg is not None:
        noise = _field(words, 0, SIGNED_SHIFT)
        state.exp_avg[:], state.exp_avg_base[:] = encode_signed(working.exp_avg, noise)
    if working.exp_avg_sq is not None:
        noise = _field(words, UNSIGNED_LOWEST, UNSIGNED_SHIFT)
        rounded = encode_unsigned(working.exp_avg_sq, noise)
        state.exp_avg_sq[:], state.exp_avg_sq_base[:] = rounded


def _split_into(param: Bf16Bits, residual: ResidualArray, master: Fp32Array) -> None:
    bits = master.view(np.uint32)
    param[:] = _round_to_bf16(bits)
    residual[:] = bits.astype(np.uint16).view(np.int16)


def _fold_lanes(lanes: npt.NDArray[np.float64]) -> list[float]:
    """Fold lane sums, shape [block, lane], by halves and return the sum of each block."""
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums: list[float] = lanes[:, 0].tolist()
    return sums


def _block_lanes(squares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return lane sums [block, lane] of whole blocks, rows added one by one, as numpy may not."""
    rows = squares.reshape(-1, BLOCK_NUMEL // LANE_COUNT, LANE_COUNT)
    lanes = np.zeros((rows.shape[0], LANE_COUNT))
    for row in range(rows.shape[1]):
        lanes += rows[:, row, :]
    return lanes


def _update_chunk(
    kept: Kept,
    param: Array,
    grad: Fp32Array,
    state: StateArrays,
    how: tuple[UpdateScalars, RoundingKey | None],
) -> None:
    scalars, key = how
    if kept is Kept.OWN:
        _step(param, grad, state, scalars)
    elif kept is Kept.MASTER:
        _step(state.master, grad, state, scalars)
        _round_into(param, state.master)
    elif kept is Kept.EXACT:
        master = _join(param, state.residual)
        _step(master, grad, state, scalars)
        _split_into(param, state.residual, master)
    elif key is not None:
        lossy = _update_bf16 if kept is Kept.BF16 else _update_compact
        lossy(param, grad, state, scalars, key)


class NumpyKernels(UpdateCalls):
    """The kernels in numpy, on the calling thread."""

    name = "numpy"

    def _update(
        self,
        kept: Kept,
        param: Array,
        grad: Array,
        state: StateArrays,
        scalars: UpdateScalars,
        key: RoundingKey | None,
    ) -> None:
        check_update(kept, (param, grad), state, scalars, key)
        with np.errstate(all="ignore"):
            for chunk in _chunks(param.size):
                part = state.part(chunk)
                here = key.after(chunk.start) if key is not None else None
                _update_chunk(kept, param[chunk], _widen(grad[chunk]), part, (scalars, here))

    def split_master(self, master: Fp32Array, param: Bf16Bits, residual: ResidualArray) -> None:
        """Write each master as a bf16 parameter and its residual, a NaN made quiet first."""
        check_arrays(
            written={"param": (param, np.uint16), "residual": (residual, np.int16)},
            read={"master": (master, np.float32)},
        )
        for chunk in _chunks(master.size):
            bits = _quiet_bits(master[chunk])
            param[chunk] = _round_to_bf16(bits)
            residual[chunk] = bits.astype(np.uint16).view(np.int16)

    def join_master(self, param: Bf16Bits, residual: ResidualArray, master: Fp32Array) -> None:
        """Write the masters that parameters and residuals are together."""
        check_arrays(
            written={"master": (master, np.float32)},
            read={"param": (param, np.uint16), "residual": (residual, np.int16)},
        )
        bits = master.view(np.uint32)
        for chunk in _chunks(master.size):
            bits[chunk] = _join(param[chunk], residual[chunk]).view(np.uint32)

    def round_to_fp16(self, master: Fp32Array, out: Fp16Array) -> None:
        """Write each master as the fp16 nearest to it, a NaN as the quiet one with its sign."""
        check_arrays(written={"out": (out, np.float16)}, read={"master": (master, np.float32)})
        with np.errstate(all="ignore"):
            for chunk in _chunks(master.size):
                out[chunk] = _quiet_bits(master[chunk]).view(np.float32)

    def sum_squares(self, values: FloatArray, first_index: int) -> float:
        """Return the fp64 sum of squares of logical elements `first_index` on of one parameter."""
        check_values(values, first_index)
        total = 0.0
        start = 0
        with np.errstate(all="ignore"):
            while start < values.size:
                lead = (first_index + start) % BLOCK_NUMEL
                stop = min(start + _CHUNK_NUMEL - lead, values.size)
                wide = _widen(values[start:stop])
                squares = np.zeros(-(-(lead + wide.size) // BLOCK_NUMEL) * BLOCK_NUMEL)
                squares[lead : lead + wide.size] = wide
                squares *= squares
                for block_sum in _fold_lanes(_block_lanes(squares)):
                    total += block_sum
                start = stop
        return total
