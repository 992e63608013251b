"""The kernels on a device: the calls of `offload.kernels.Kernels` on tensors, with the same bits.

[Note: device kernels] A call works in place, on the current stream of the tensors' device, and
waits for nothing. Tensors are 1-D and contiguous; bf16 and fp16 are torch's own types, a residual
is int16. Triton serves where it and CUDA are; elsewhere each operation is one torch operation,
whose results IEEE fixes: square roots are taken in fp64, which makes them correctly rounded in
fp32, and a divisor is a tensor, because torch multiplies by the reciprocal of a number.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from offload.kernels import BLOCK_NUMEL, LANE_COUNT, AdamWScalars

DeviceKernelKind: TypeAlias = Literal["auto", "triton", "torch"]

_CHUNK_NUMEL = 1 << 22
_SIGN_BIT = -0x8000_0000
_MAGNITUDE_BITS = 0x7FFF_FFFF
_INFINITY_BITS = 0x7F80_0000
_QUIET_NAN_BITS = 0x7FC0_0000
_FP16_QUIET_NAN = 0x7E00
_FP16_SIGN_BIT = -0x8000

HALVES = (torch.bfloat16, torch.float16)


class DeviceKernels(Protocol):
    """Kernels on tensors of one device; see [Note: device kernels].

    A wrong type raises TypeError; a wrong length, layout, device or overlap raises ValueError.
    """

    @property
    def name(self) -> str:
        """Return which implementation this is: "triton" or "torch"."""

    def adamw_fp32(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 parameters, which are their own master, and their moments in place."""

    def adamw_exact(
        self,
        param: Tensor,
        residual: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """Update bf16 parameters, the residuals that complete them to fp32, and the moments."""

    def adamw_master(
        self,
        param: Tensor,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 masters and their moments, and write the 16-bit parameters from them."""

    def split_master(self, master: Tensor, param: Tensor, residual: Tensor) -> None:
        """Write each master as a bf16 parameter and its residual, a NaN made quiet first."""

    def join_master(self, param: Tensor, residual: Tensor, master: Tensor) -> None:
        """Write the masters that parameters and residuals are together."""

    def round_to_fp16(self, master: Tensor, out: Tensor) -> None:
        """Write each master as the fp16 nearest to it, a NaN as the quiet one with its sign."""

    def block_sums(self, values: Tensor, first_index: int) -> Tensor:
        """Return the fp64 sums of squares of the norm's blocks, shape [block], on the device."""


def add_block_sums(sums: Iterable[float]) -> float:
    """Add sums of blocks in their order, which gives what `Kernels.sum_squares` returns."""
    total = 0.0
    for each in sums:
        total += each
    return total


def check_tensors(
    *,
    written: Mapping[str, tuple[Tensor, tuple[torch.dtype, ...]]],
    read: Mapping[str, tuple[Tensor, tuple[torch.dtype, ...]]],
) -> None:
    """Raise TypeError or ValueError unless a kernel may run on these named tensors."""
    operands = {**written, **read}
    for name, (tensor, dtypes) in operands.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in dtypes:
            names = " or ".join(str(dtype) for dtype in dtypes)
            raise TypeError(f"{name} must hold {names}, got {tensor.dtype}")
        if tensor.ndim != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous with 1 dimension, got shape {tuple(tensor.shape)} with"
                f" strides {tensor.stride()}; pass a contiguous flat view"
            )
    _check_alike(operands)
    for name, (tensor, _) in written.items():
        for other_name, (other, _) in operands.items():
            if other_name != name and _overlap(tensor, other):
                raise ValueError(f"{name} and {other_name} share memory; pass separate tensors")


def _check_alike(operands: Mapping[str, tuple[Tensor, tuple[torch.dtype, ...]]]) -> None:
    if len({tensor.numel() for tensor, _ in operands.values()}) > 1:
        lengths = ", ".join(f"{name} {tensor.numel()}" for name, (tensor, _) in operands.items())
        raise ValueError(f"all tensors must have one length, got {lengths}")
    if len({tensor.device for tensor, _ in operands.values()}) > 1:
        devices = ", ".join(f"{name} {tensor.device}" for name, (tensor, _) in operands.items())
        raise ValueError(f"all tensors must be on one device, got {devices}")


def _overlap(one: Tensor, other: Tensor) -> bool:
    start, other_start = one.data_ptr(), other.data_ptr()
    return (
        start < other_start + other.numel() * other.element_size()
        and other_start < start + one.numel() * one.element_size()
    )


def gradient_dtypes(param: Tensor) -> tuple[torch.dtype, ...]:
    """Return the types that gradients of these 16-bit parameters may have."""
    half = param.dtype if isinstance(param, Tensor) and param.dtype in HALVES else torch.bfloat16
    return (half, torch.float32)


def check_adamw(
    scalars: AdamWScalars,
    *,
    moments: tuple[Tensor, Tensor],
    grad: tuple[Tensor, tuple[torch.dtype, ...]],
    **weights: tuple[Tensor, tuple[torch.dtype, ...]],
) -> None:
    """Raise TypeError or ValueError unless an AdamW kernel may run on these operands."""
    if not isinstance(scalars, AdamWScalars):
        raise TypeError(f"scalars must be AdamWScalars, got {type(scalars).__name__}")
    fp32 = (torch.float32,)
    written = {**weights, "exp_avg": (moments[0], fp32), "exp_avg_sq": (moments[1], fp32)}
    check_tensors(written=written, read={"grad": grad})


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _CHUNK_NUMEL):
        yield slice(start, min(start + _CHUNK_NUMEL, numel))


def _divided(values: Tensor, divisor: float) -> Tensor:
    return values / torch.full((), divisor, dtype=torch.float32, device=values.device)


def _root(values: Tensor) -> Tensor:
    return values.double().sqrt_().float()


def _put(target: Tensor, values: Tensor) -> None:
    """Store results, each NaN as the one pattern that all kernels store."""
    bits = torch.where(torch.isnan(values), _QUIET_NAN_BITS, values.view(torch.int32))
    target.view(torch.int32).copy_(bits)


def _quiet_bits(master: Tensor) -> Tensor:
    bits = master.view(torch.int32)
    is_nan = (bits & _MAGNITUDE_BITS) > _INFINITY_BITS
    return torch.where(is_nan, (bits & _SIGN_BIT) | _QUIET_NAN_BITS, bits)


def _split(bits: Tensor, param: Tensor, residual: Tensor) -> None:
    param.view(torch.int16).copy_((bits + 0x8000) >> 16)
    residual.copy_((bits << 16) >> 16)


def _joined(param: Tensor, residual: Tensor) -> Tensor:
    bits = (param.view(torch.int16).int() << 16) + residual.int()
    return bits.view(torch.float32)


def _round_to_fp16(master: Tensor, out: Tensor) -> None:
    """Round as IEEE does; what a device makes of a NaN differs, so that is written as bits."""
    sign = (master.view(torch.int32) >> 16) & _FP16_SIGN_BIT
    quiet_nan = (sign | _FP16_QUIET_NAN).to(torch.int16)
    rounded = master.to(torch.float16).view(torch.int16)
    out.view(torch.int16).copy_(torch.where(torch.isnan(master), quiet_nan, rounded))


def _update(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: AdamWScalars
) -> None:
    """Update fp32 masters and moments in place, one operation of the formula a torch operation."""
    g = grad.float() * scalars.grad_scale
    p = master * scalars.decay_factor
    m = exp_avg * scalars.beta1 + g * scalars.one_minus_beta1
    v = exp_avg_sq * scalars.beta2 + (g * g) * scalars.one_minus_beta2
    denominator = _divided(_root(v), scalars.bias_correction2_sqrt) + scalars.eps
    _put(master, p - (m / denominator) * scalars.step_size)
    _put(exp_avg, m)
    _put(exp_avg_sq, v)


class TorchDeviceKernels:
    """The kernels in torch operations, on whatever device the tensors are."""

    name = "torch"

    def adamw_fp32(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 parameters, which are their own master, and their moments in place."""
        fp32 = (torch.float32,)
        check_adamw(scalars, moments=(exp_avg, exp_avg_sq), grad=(grad, fp32), param=(param, fp32))
        for chunk in _chunks(param.numel()):
            _update(param[chunk], grad[chunk], exp_avg[chunk], exp_avg_sq[chunk], scalars)

    def adamw_exact(
        self,
        param: Tensor,
        residual: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """Update bf16 parameters, the residuals that complete them to fp32, and the moments."""
        check_adamw(
            scalars,
            moments=(exp_avg, exp_avg_sq),
            grad=(grad, gradient_dtypes(param)),
            param=(param, (torch.bfloat16,)),
            residual=(residual, (torch.int16,)),
        )
        for chunk in _chunks(param.numel()):
            master = _joined(param[chunk], residual[chunk])
            _update(master, grad[chunk], exp_avg[chunk], exp_avg_sq[chunk], scalars)
            _split(master.view(torch.int32), param[chunk], residual[chunk])

    def adamw_master(
        self,
        param: Tensor,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 masters and their moments, and write the 16-bit parameters from them."""
        check_adamw(
            scalars,
            moments=(exp_avg, exp_avg_sq),
            grad=(grad, gradient_dtypes(param)),
            param=(param, HALVES),
            master=(master, (torch.float32,)),
        )
        for chunk in _chunks(param.numel()):
            _update(master[chunk], grad[chunk], exp_avg[chunk], exp_avg_sq[chunk], scalars)
            if param.dtype is torch.float16:
                _round_to_fp16(master[chunk], param[chunk])
            else:
                bits = master[chunk].view(torch.int32)
                param[chunk].view(torch.int16).copy_((bits + 0x8000) >> 16)

    def split_master(self, master: Tensor, param: Tensor, residual: Tensor) -> None:
        """Write each master as a bf16 parameter and its residual, a NaN made quiet first."""
        check_split(master, param, residual)
        for chunk in _chunks(master.numel()):
            _split(_quiet_bits(master[chunk]), param[chunk], residual[chunk])

    def join_master(self, param: Tensor, residual: Tensor, master: Tensor) -> None:
        """Write the masters that parameters and residuals are together."""
        check_join(param, residual, master)
        for chunk in _chunks(master.numel()):
            bits = _joined(param[chunk], residual[chunk]).view(torch.int32)
            master[chunk].view(torch.int32).copy_(bits)

    def round_to_fp16(self, master: Tensor, out: Tensor) -> None:
        """Write each master as the fp16 nearest to it, a NaN as the quiet one with its sign."""
        check_fp16(master, out)
        for chunk in _chunks(master.numel()):
            _round_to_fp16(master[chunk], out[chunk])

    def block_sums(self, values: Tensor, first_index: int) -> Tensor:
        """Return the fp64 sums of squares of the norm's blocks, shape [block], on the device."""
        check_norm(values, first_index)
        sums = [
            _block_sums(values[start:stop], (first_index + start) % BLOCK_NUMEL)
            for start, stop in _block_ranges(values.numel(), first_index)
        ]
        return torch.cat(sums) if sums else values.new_zeros(0, dtype=torch.float64)


def _block_ranges(numel: int, first_index: int) -> Iterator[tuple[int, int]]:
    """Cut values into chunks that end where a block of the norm ends."""
    start = 0
    while start < numel:
        stop = min(start + _CHUNK_NUMEL - (first_index + start) % BLOCK_NUMEL, numel)
        yield start, stop
        start = stop


def _block_sums(values: Tensor, lead: int) -> Tensor:
    """Sum the squares of values of which `lead` elements of the first block come before."""
    block_count = -(-(lead + values.numel()) // BLOCK_NUMEL)
    squares = values.new_zeros(block_count * BLOCK_NUMEL, dtype=torch.float64)
    squares[lead : lead + values.numel()] = values
    rows = (squares * squares).view(block_count, BLOCK_NUMEL // LANE_COUNT, LANE_COUNT)
    lanes = torch.zeros_like(rows[:, 0])
    for row in range(rows.shape[1]):
        lanes += rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def check_split(master: Tensor, param: Tensor, residual: Tensor) -> None:
    """Raise TypeError or ValueError unless `split_master` may run on these tensors."""
    check_tensors(
        written={"param": (param, (torch.bfloat16,)), "residual": (residual, (torch.int16,))},
        read={"master": (master, (torch.float32,))},
    )


def check_join(param: Tensor, residual: Tensor, master: Tensor) -> None:
    """Raise TypeError or ValueError unless `join_master` may run on these tensors."""
    check_tensors(
        written={"master": (master, (torch.float32,))},
        read={"param": (param, (torch.bfloat16,)), "residual": (residual, (torch.int16,))},
    )


def check_fp16(master: Tensor, out: Tensor) -> None:
    """Raise TypeError or ValueError unless `round_to_fp16` may run on these tensors."""
    check_tensors(
        written={"out": (out, (torch.float16,))}, read={"master": (master, (torch.float32,))}
    )


def check_norm(values: Tensor, first_index: int) -> None:
    """Raise TypeError or ValueError unless `block_sums` may run on `values`."""
    check_tensors(written={}, read={"values": (values, (torch.float32, *HALVES))})
    if first_index < 0:
        raise ValueError(f"first_index counts elements of one parameter from 0, got {first_index}")


def triton_unavailable_reason(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on a device, or None if they can."""
    if device.type != "cuda":
        return f"they need a CUDA device, the tensors are on {device}"
    if torch.version.hip is not None:
        return "their bits are only known on NVIDIA devices, this torch is built for ROCm"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def load_device_kernels(device: torch.device, kind: DeviceKernelKind = "auto") -> DeviceKernels:
    """Return the kernels for tensors of a device; auto takes Triton's where they can run.

    Raises:
        RuntimeError: if Triton's are asked for and cannot run.
        ValueError: if there is no such kind.
    """
    if kind not in ("auto", "triton", "torch"):
        raise ValueError(f'kind must be "auto", "triton" or "torch", got {kind!r}')
    reason = triton_unavailable_reason(device)
    if kind == "triton" and reason is not None:
        raise RuntimeError(f'the Triton kernels cannot run: {reason}; ask for kind="torch"')
    if kind == "torch" or reason is not None:
        return TorchDeviceKernels()
    from offload.kernels_triton import TritonKernels

    return TritonKernels()
