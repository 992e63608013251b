"""The arithmetic of the optimizer step on the host: every rule on every format, and the norm.

[Note: same bits] Native and numpy kernels give equal bits. The formulas are those of
[Note: update rules] in offload/rules.py, each operator one IEEE fp32 operation.

IEEE leaves sign and payload of a computed NaN open, and hardware differs; so each of p, m and v
that comes out as NaN is stored as 0x7FC00000. Splitting a master that is NaN keeps its sign.

[Note: exact split] A master is a bf16 parameter and a residual, in unsigned 32-bit arithmetic:
`residual = int16(bits)`, `param = (bits + 0x8000) >> 16` (nearest, ties away from zero), and back
`bits = (param << 16) + sign_extend(residual)`: a bijection on all patterns but NaNs, which are
made quiet first.

[Note: fp16] An fp16 parameter is its fp32 master rounded to nearest, ties to even, as IEEE and
numpy round: subnormals are kept, 65520 and beyond are infinite, a NaN is 0x7E00 with its sign.

[Note: block norm] Squares are summed over fixed blocks of 4096 logical elements, in each over 64
lanes by index, in fp64; the lanes are folded by halves and the blocks added in order. So a norm
does not depend on threads, nor on where the memory lies.
"""

from __future__ import annotations

import os
import warnings
from typing import Literal, Protocol, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from offload.codes import RoundingKey
from offload.kernel_calls import (
    Array,
    Kept,
    UpdateCalls,
    check_arrays,
    check_update,
    check_values,
)
from offload.operands import StateArrays
from offload.rules import AdamWScalars, UpdateScalars

try:
    # Spelled so that the reason of a failure names the module, also while `offload` is imported.
    import offload._kernels as _kernels  # noqa: PLR0402
except ImportError as error:
    _native_import_error: str | None = str(error)
else:
    _native_import_error = None

Fp32Array: TypeAlias = npt.NDArray[np.float32]
Fp16Array: TypeAlias = npt.NDArray[np.float16]
Bf16Bits: TypeAlias = npt.NDArray[np.uint16]
ResidualArray: TypeAlias = npt.NDArray[np.int16]
KernelKind: TypeAlias = Literal["auto", "native", "numpy"]
FloatArray: TypeAlias = Fp32Array | Bf16Bits | Fp16Array

BLOCK_NUMEL = 4096
LANE_COUNT = 64


class Kernels(Protocol):
    """Kernels on 1-D contiguous arrays; bf16 travels as uint16 bits, a residual as int16.

    Gradients of 16-bit parameters have the type of the parameters or are fp32. A wrong type raises
    TypeError; a wrong length, layout or overlap raises ValueError.
    """

    @property
    def name(self) -> str:
        """Return which implementation this is: "native" or "numpy"."""

    def update(
        self,
        param: Array,
        grad: Array,
        state: StateArrays,
        scalars: UpdateScalars,
        key: RoundingKey | None = None,
    ) -> None:
        """Update parameters and their state in place by the rule of the scalars.

        How they are stored follows from the fields of the state and their types. A format that is
        lossy needs a key for its random bits.
        """

    def adamw_fp32(
        self, param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, scalars: AdamWScalars
    ) -> None:
        """Update fp32 parameters, which are their own master, and their moments in place."""

    def adamw_exact(
        self,
        param: Array,
        residual: Array,
        grad: Array,
        exp_avg: Array,
        exp_avg_sq: Array,
        scalars: AdamWScalars,
    ) -> None:
        """Update bf16 parameters, the residuals that complete them to fp32, and the moments."""

    def adamw_master(
        self,
        param: Array,
        master: Array,
        grad: Array,
        exp_avg: Array,
        exp_avg_sq: Array,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 masters and their moments, and write the 16-bit parameters from them."""

    def split_master(self, master: Fp32Array, param: Bf16Bits, residual: ResidualArray) -> None:
        """Write each master as a bf16 parameter and its residual, a NaN made quiet first."""

    def join_master(self, param: Bf16Bits, residual: ResidualArray, master: Fp32Array) -> None:
        """Write the masters that parameters and residuals are together."""

    def round_to_fp16(self, master: Fp32Array, out: Fp16Array) -> None:
        """Write each master as the fp16 nearest to it, a NaN as the quiet one with its sign."""

    def sum_squares(self, values: FloatArray, first_index: int) -> float:
        """Return the fp64 sum of squares of logical elements `first_index` on of one parameter."""


def _check_thread_count(thread_count: int) -> None:
    if thread_count < 1:
        raise ValueError(f"thread_count must be at least 1, got {thread_count}")


class NativeKernels(UpdateCalls):
    """The kernels of the native module, on up to `thread_count` threads a call."""

    name = "native"

    def __init__(self, thread_count: int = 1, queue: _kernels.KernelQueue | None = None) -> None:
        _check_thread_count(thread_count)
        if not native_available():
            raise RuntimeError(
                f"the native kernels cannot be loaded: {native_unavailable_reason()}; "
                'rebuild the package with a C++ compiler, or ask for kind="numpy"'
            )
        self._thread_count = thread_count
        self._queue = queue

    @property
    def thread_count(self) -> int:
        """Return on how many threads a call runs at most."""
        return self._thread_count

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
        self._call(kept, (param, grad), state, scalars, key)

    def _call(
        self,
        kept: Kept,
        operands: tuple[Array, Array],
        state: StateArrays,
        scalars: UpdateScalars,
        key: RoundingKey | None,
    ) -> int:
        """Run a kernel, or submit it to the queue, whose ticket is returned."""
        param, grad = operands
        moments = (state.exp_avg, state.exp_avg_sq)
        where = (self._thread_count, self._queue)
        match kept:
            case Kept.OWN:
                return _kernels.update_own(param, grad, *moments, scalars, *where)
            case Kept.EXACT:
                return _kernels.update_exact(param, state.residual, grad, *moments, scalars, *where)
            case Kept.MASTER:
                return _kernels.update_master(param, state.master, grad, *moments, scalars, *where)
            case Kept.BF16:
                return _kernels.update_bf16(
                    param, state.residual, grad, *moments, scalars, key, *where
                )
            case Kept.COMPACT:
                bases = (state.exp_avg_base, state.exp_avg_sq_base)
                return _kernels.update_compact(
                    param, state.residual, grad, *moments, *bases, scalars, key, *where
                )
            case _:
                assert_never(kept)

    def split_master(self, master: Fp32Array, param: Bf16Bits, residual: ResidualArray) -> None:
        """Write each master as a bf16 parameter and its residual, a NaN made quiet first."""
        check_arrays(
            written={"param": (param, np.uint16), "residual": (residual, np.int16)},
            read={"master": (master, np.float32)},
        )
        _kernels.split_master(master, param, residual, self._thread_count)

    def join_master(self, param: Bf16Bits, residual: ResidualArray, master: Fp32Array) -> None:
        """Write the masters that parameters and residuals are together."""
        check_arrays(
            written={"master": (master, np.float32)},
            read={"param": (param, np.uint16), "residual": (residual, np.int16)},
        )
        _kernels.join_master(param, residual, master, self._thread_count)

    def round_to_fp16(self, master: Fp32Array, out: Fp16Array) -> None:
        """Write each master as the fp16 nearest to it, a NaN as the quiet one with its sign."""
        check_arrays(written={"out": (out, np.float16)}, read={"master": (master, np.float32)})
        _kernels.round_to_fp16(master, out, self._thread_count)

    def sum_squares(self, values: FloatArray, first_index: int) -> float:
        """Return the fp64 sum of squares of logical elements `first_index` on of one parameter."""
        check_values(values, first_index)
        return _kernels.sum_squares(values, first_index, self._thread_count)


def native_available() -> bool:
    """Return whether the native module is loaded."""
    return _native_import_error is None


def native_unavailable_reason() -> str | None:
    """Return why the native module is not loaded, or None if it is."""
    return _native_import_error


def _native_is_required() -> bool:
    value = os.environ.get("TIERZERO_REQUIRE_NATIVE", "")
    return value.strip().lower() not in {"", "0", "false", "no", "off"}


def on_one_thread(kernels: Kernels) -> Kernels:
    """Return the same kernels for threads that call them side by side."""
    return NativeKernels() if isinstance(kernels, NativeKernels) else kernels


def load_kernels(kind: KernelKind = "auto", thread_count: int = 1) -> Kernels:
    """Return the kernels of a kind; auto takes the native ones, else numpy's with a warning.

    With TIERZERO_REQUIRE_NATIVE set, auto raises RuntimeError where the native ones are missing.
    The numpy kernels run on the calling thread alone, whatever `thread_count`.
    """
    from offload.kernels_numpy import NumpyKernels

    _check_thread_count(thread_count)
    match kind:
        case "native":
            return NativeKernels(thread_count)
        case "numpy":
            return NumpyKernels()
        case "auto":
            if native_available() or _native_is_required():
                return NativeKernels(thread_count)
            warnings.warn(
                f"the slower numpy kernels are used, the native ones cannot be loaded: "
                f"{native_unavailable_reason()}",
                RuntimeWarning,
                stacklevel=2,
            )
            return NumpyKernels()
        case _:
            raise ValueError(f'kind must be "auto", "native" or "numpy", got {kind!r}')
