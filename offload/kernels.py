"""The arithmetic of the optimizer step on the host: AdamW on every exact format, and the norm.

[Note: same bits] Native and numpy kernels give equal bits. Each operator of the update
is one IEEE fp32 operation, in this order:

    g = fp32(grad) * grad_scale
    p = master * decay_factor
    m = exp_avg * beta1 + g * one_minus_beta1
    v = exp_avg_sq * beta2 + (g * g) * one_minus_beta2
    p = p - step_size * (m / (sqrt(v) / bias_correction2_sqrt + eps))

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

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

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
# The type of an element, or those that it may have; an array and what it must hold.
ElementTypes: TypeAlias = type[np.generic] | tuple[type[np.generic], ...]
ArrayAndTypes: TypeAlias = tuple[npt.NDArray[Any], ElementTypes]
FloatArray: TypeAlias = Fp32Array | Bf16Bits | Fp16Array

BLOCK_NUMEL = 4096
LANE_COUNT = 64


def round_to_fp32(value: float) -> float:
    """Return the fp32 value nearest to `value`, refusing a finite one beyond the fp32 range."""
    with np.errstate(all="ignore"):
        rounded = float(np.float32(value))
    if math.isinf(rounded) and not math.isinf(value):
        raise ValueError(f"{value} is beyond the fp32 range; use a magnitude below 3.4e38")
    return rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWScalars:
    """The scalars of one AdamW step, each a float that holds an fp32 value."""

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    decay_factor: float
    step_size: float
    bias_correction2_sqrt: float
    eps: float
    grad_scale: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isnan(value) and round_to_fp32(value) != value:
                raise ValueError(
                    f"{field.name} must hold an fp32 value, got {value!r}; "
                    f"the nearest is {round_to_fp32(value)!r} (use from_hyperparameters)"
                )

    @classmethod
    def from_hyperparameters(
        cls,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
        bias_correction: bool = True,
    ) -> "AdamWScalars":
        """Compute the scalars of step `step` (the first is 1) in fp64 and round each once."""
        beta1, beta2 = betas
        for name, beta in (("betas[0]", beta1), ("betas[1]", beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, got {beta}")
        if step < 1:
            raise ValueError(f"step counts from 1, got {step}; pass the number of this step")
        correction1 = 1.0 - beta1**step if bias_correction else 1.0
        correction2 = 1.0 - beta2**step if bias_correction else 1.0
        return cls(
            beta1=round_to_fp32(beta1),
            one_minus_beta1=round_to_fp32(1.0 - beta1),
            beta2=round_to_fp32(beta2),
            one_minus_beta2=round_to_fp32(1.0 - beta2),
            decay_factor=round_to_fp32(1.0 - lr * weight_decay),
            step_size=round_to_fp32(lr / correction1),
            bias_correction2_sqrt=round_to_fp32(math.sqrt(correction2)),
            eps=round_to_fp32(eps),
            grad_scale=round_to_fp32(grad_scale),
        )


class Kernels(Protocol):
    """Kernels on 1-D contiguous arrays; bf16 travels as uint16 bits, a residual as int16.

    Gradients of 16-bit parameters have the type of the parameters or are fp32. A wrong type raises
    TypeError; a wrong length, layout or overlap raises ValueError.
    """

    @property
    def name(self) -> str:
        """Return which implementation this is: "native" or "numpy"."""

    def adamw_fp32(
        self,
        param: Fp32Array,
        grad: Fp32Array,
        exp_avg: Fp32Array,
        exp_avg_sq: Fp32Array,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 parameters, which are their own master, and their moments in place."""

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

    def split_master(self, master: Fp32Array, param: Bf16Bits, residual: ResidualArray) -> None:
        """Write each master as a bf16 parameter and its residual, a NaN made quiet first."""

    def join_master(self, param: Bf16Bits, residual: ResidualArray, master: Fp32Array) -> None:
        """Write the masters that parameters and residuals are together."""

    def round_to_fp16(self, master: Fp32Array, out: Fp16Array) -> None:
        """Write each master as the fp16 nearest to it, a NaN as the quiet one with its sign."""

    def sum_squares(self, values: FloatArray, first_index: int) -> float:
        """Return the fp64 sum of squares of logical elements `first_index` on of one parameter."""


def _check_array(name: str, array: npt.NDArray[Any], elements: ElementTypes) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy array in host memory, got {type(array).__name__}")
    types = [np.dtype(each) for each in (elements if isinstance(elements, tuple) else (elements,))]
    if array.dtype not in types:
        raise TypeError(f"{name} must hold {' or '.join(map(str, types))}, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got shape {array.shape}; flatten it first")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"{name} must be contiguous and aligned; pass a contiguous view or copy")


def check_arrays(
    *, written: Mapping[str, ArrayAndTypes], read: Mapping[str, ArrayAndTypes]
) -> None:
    """Raise TypeError or ValueError unless a kernel may run on these named arrays.

    All must have one length, and those written must be writable and share no memory.
    """
    operands = {**written, **read}
    for name, (array, elements) in operands.items():
        _check_array(name, array, elements)
    if len({array.size for array, _ in operands.values()}) > 1:
        lengths = ", ".join(f"{name} {array.size}" for name, (array, _) in operands.items())
        raise ValueError(f"all arrays must have one length, got {lengths}")
    for name, (array, _) in written.items():
        if not array.flags.writeable:
            raise ValueError(f"{name} is written by this kernel, but the array is read-only")
        for other_name, (other, _) in operands.items():
            if other_name != name and np.may_share_memory(array, other):
                raise ValueError(f"{name} and {other_name} share memory; pass separate arrays")


def gradient_types(param: Bf16Bits | Fp16Array) -> tuple[type[np.generic], ...]:
    """Return the types that gradients of these 16-bit parameters may have."""
    is_fp16 = isinstance(param, np.ndarray) and param.dtype == np.dtype(np.float16)
    return (np.float16 if is_fp16 else np.uint16, np.float32)


def check_adamw(
    scalars: AdamWScalars,
    *,
    moments: tuple[Fp32Array, Fp32Array],
    grad: ArrayAndTypes,
    **weights: ArrayAndTypes,
) -> None:
    """Raise TypeError or ValueError unless an AdamW kernel may run on these operands."""
    if not isinstance(scalars, AdamWScalars):
        raise TypeError(f"scalars must be AdamWScalars, got {type(scalars).__name__}")
    exp_avg, exp_avg_sq = moments
    check_arrays(
        written={
            **weights,
            "exp_avg": (exp_avg, np.float32),
            "exp_avg_sq": (exp_avg_sq, np.float32),
        },
        read={"grad": grad},
    )


def check_values(values: FloatArray, first_index: int) -> None:
    """Raise TypeError or ValueError unless `sum_squares` may run on `values`."""
    check_arrays(written={}, read={"values": (values, (np.float32, np.uint16, np.float16))})
    if first_index < 0:
        raise ValueError(f"first_index counts elements of one parameter from 0, got {first_index}")


def _check_thread_count(thread_count: int) -> None:
    if thread_count < 1:
        raise ValueError(f"thread_count must be at least 1, got {thread_count}")


class NativeKernels:
    """The kernels of the native module, on up to `thread_count` threads a call."""

    name = "native"

    def __init__(self, thread_count: int = 1) -> None:
        _check_thread_count(thread_count)
        if not native_available():
            raise RuntimeError(
                f"the native kernels cannot be loaded: {native_unavailable_reason()}; "
                'rebuild the package with a C++ compiler, or ask for kind="numpy"'
            )
        self._thread_count = thread_count

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
        _kernels.adamw_fp32(param, grad, exp_avg, exp_avg_sq, scalars, self._thread_count)

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
        _kernels.adamw_exact(
            param, residual, grad, exp_avg, exp_avg_sq, scalars, self._thread_count
        )

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
        _kernels.adamw_master(param, master, grad, exp_avg, exp_avg_sq, scalars, self._thread_count)

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
