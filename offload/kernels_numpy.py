"""The kernels in numpy, for machines without the native module: the same bits, more slowly.

The formulas are in the notes of offload/kernels.py.
Work goes in chunks that fit the cache, so that temporaries stay small whatever the array.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from offload.kernels import (
    BLOCK_NUMEL,
    LANE_COUNT,
    AdamWScalars,
    Bf16Bits,
    FloatArray,
    Fp16Array,
    Fp32Array,
    ResidualArray,
    check_adamw,
    check_arrays,
    check_values,
    gradient_types,
)

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


def _update(
    master: Fp32Array,
    grad: Fp32Array,
    exp_avg: Fp32Array,
    exp_avg_sq: Fp32Array,
    scalars: AdamWScalars,
) -> None:
    """Update a chunk of fp32 masters and moments in place, one operation a line."""
    scaled_grad = grad * np.float32(scalars.grad_scale)
    master *= np.float32(scalars.decay_factor)
    exp_avg *= np.float32(scalars.beta1)
    exp_avg += scaled_grad * np.float32(scalars.one_minus_beta1)
    scaled_grad *= scaled_grad
    scaled_grad *= np.float32(scalars.one_minus_beta2)
    exp_avg_sq *= np.float32(scalars.beta2)
    exp_avg_sq += scaled_grad
    denominator = np.sqrt(exp_avg_sq)
    denominator /= np.float32(scalars.bias_correction2_sqrt)
    denominator += np.float32(scalars.eps)
    change = np.divide(exp_avg, denominator, out=denominator)
    change *= np.float32(scalars.step_size)
    master -= change
    for result in (master, exp_avg, exp_avg_sq):
        np.copyto(result, _QUIET_NAN, where=np.isnan(result))


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


class NumpyKernels:
    """The kernels in numpy, on the calling thread."""

    name = "numpy"

    def adamw_fp32(
        self,
        param: Fp32Array,
        grad: Fp32Array,
        exp_avg: Fp32Array,
        exp_avg_sq: Fp32Array,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 parameters, which are their own master, and their moments in place."""
        check_adamw(
            scalars,
            moments=(exp_avg, exp_avg_sq),
            grad=(grad, np.float32),
            param=(param, np.float32),
        )
        with np.errstate(all="ignore"):
            for chunk in _chunks(param.size):
                _update(param[chunk], grad[chunk], exp_avg[chunk], exp_avg_sq[chunk], scalars)

    def adamw_exact(
        self,
        param: Bf16Bits,
        residual: ResidualArray,
        grad: Bf16Bits | Fp32Array,
        exp_avg: Fp32Array,
        exp_avg_sq: Fp32Array,
        scalars: AdamWScalars,
    ) -> None:
        """Update bf16 parameters, the residuals that complete them to fp32, and the moments."""
        check_adamw(
            scalars,
            moments=(exp_avg, exp_avg_sq),
            grad=(grad, gradient_types(param)),
            param=(param, np.uint16),
            residual=(residual, np.int16),
        )
        with np.errstate(all="ignore"):
            for chunk in _chunks(param.size):
                master = _join(param[chunk], residual[chunk])
                widened = _widen(grad[chunk])
                _update(master, widened, exp_avg[chunk], exp_avg_sq[chunk], scalars)
                bits = master.view(np.uint32)
                param[chunk] = _round_to_bf16(bits)
                residual[chunk] = bits.astype(np.uint16).view(np.int16)

    def adamw_master(
        self,
        param: Bf16Bits | Fp16Array,
        master: Fp32Array,
        grad: FloatArray,
        exp_avg: Fp32Array,
        exp_avg_sq: Fp32Array,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 masters and their moments, and write the 16-bit parameters from them."""
        check_adamw(
            scalars,
            moments=(exp_avg, exp_avg_sq),
            grad=(grad, gradient_types(param)),
            param=(param, (np.uint16, np.float16)),
            master=(master, np.float32),
        )
        with np.errstate(all="ignore"):
            for chunk in _chunks(param.size):
                widened = _widen(grad[chunk])
                _update(master[chunk], widened, exp_avg[chunk], exp_avg_sq[chunk], scalars)
                _round_into(param[chunk], master[chunk])

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
