"""The kernels on a device: the calls of `offload.kernels.Kernels` on tensors, with the same bits.

[Note: device kernels] A call works in place, on the current stream of the tensors' device, and
waits for nothing. Tensors are 1-D and contiguous; bf16 and fp16 are torch's own types, a residual
is int16. Triton serves where it and CUDA are; elsewhere each operation is one torch operation,
whose results IEEE fixes: square roots are taken in fp64, which makes them correctly rounded in
fp32, and a divisor is a tensor, because torch multiplies by the reciprocal of a number.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.codes import RoundingKey
from offload.kernel_calls import Kept, Operands, check_base_count, update_operands
from offload.kernels import BLOCK_NUMEL
from offload.operands import StateArrays
from offload.rules import AdamWScalars, UpdateScalars
from offload.update_parts import GroupParts, UpdatePart

DeviceKernelKind: TypeAlias = Literal["auto", "triton", "torch"]

HALVES = (torch.bfloat16, torch.float16)

PartsAndGradients: TypeAlias = tuple[Sequence[UpdatePart], Sequence[Tensor] | None]
"""The parts of a sub-group and its gradients, or None for one gradient that is still to come."""


class DeviceKernels(Protocol):
    """Kernels on tensors of one device; see [Note: device kernels].

    A wrong type raises TypeError; a wrong length, layout, device or overlap raises ValueError.
    """

    @property
    def name(self) -> str:
        """Return which implementation this is: "triton" or "torch"."""

    def update(
        self,
        param: Tensor,
        grad: Tensor,
        state: StateArrays,
        scalars: UpdateScalars,
        key: RoundingKey | None = None,
    ) -> None:
        """Update parameters and their state in place by the rule of the scalars."""

    def prepare(
        self, groups: Sequence[PartsAndGradients], device: torch.device
    ) -> Sequence[GroupParts]:
        """Return the parts of sub-groups for `update_parts`, whose order may be any.

        What a device must know of them goes there now, for all at once and behind the work that
        was issued before. The gradients must stay where they are until the updates were issued.
        """

    def update_parts(
        self,
        param: Tensor,
        grads: Sequence[Tensor],
        state: StateArrays,
        scalars: UpdateScalars,
        prepared: GroupParts,
    ) -> None:
        """Update the parts of one sub-group in place by the rule of the scalars."""

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

    def block_sums_of(self, pieces: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Return the sums of blocks of several `(values, first index)`, one after another."""


def block_count(numel: int, first_index: int) -> int:
    """Return in how many of the norm's blocks elements from `first_index` on lie."""
    return -(-(first_index % BLOCK_NUMEL + numel) // BLOCK_NUMEL) if numel else 0


def add_block_sums(sums: npt.ArrayLike) -> float:
    """Add sums of blocks in their order, which gives what `Kernels.sum_squares` returns."""
    running = np.add.accumulate(np.asarray(sums, np.float64))  # one after another, never in pairs
    return float(running[-1]) if running.size else 0.0


def check_tensors(
    *,
    written: Mapping[str, tuple[Tensor, tuple[torch.dtype, ...]]],
    read: Mapping[str, tuple[Tensor, tuple[torch.dtype, ...]]],
) -> None:
    """Raise TypeError or ValueError unless a kernel may run on these named tensors."""
    operands = {**written, **read}
    check_types(operands)
    _check_alike(operands)
    check_apart({name: tensor for name, (tensor, _) in operands.items()}, len(written))


def check_types(operands: Mapping[str, tuple[Tensor, tuple[torch.dtype, ...]]]) -> None:
    """Raise TypeError or ValueError unless these are flat tensors of their types."""
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


def _check_alike(operands: Mapping[str, tuple[Tensor, tuple[torch.dtype, ...]]]) -> None:
    if len({tensor.numel() for tensor, _ in operands.values()}) > 1:
        lengths = ", ".join(f"{name} {tensor.numel()}" for name, (tensor, _) in operands.items())
        raise ValueError(f"all tensors must have one length, got {lengths}")
    _check_place({name: tensor for name, (tensor, _) in operands.items()})


def _check_place(tensors: Mapping[str, Tensor]) -> None:
    if len({tensor.device for tensor in tensors.values()}) > 1:
        devices = ", ".join(f"{name} {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"all tensors must be on one device, got {devices}")


def check_apart(tensors: Mapping[str, Tensor], written: int) -> None:
    """Raise if one of the tensors, of which the first `written` are written, overlaps another.

    They are gone through by address, so that each is compared with how far the earlier ones reach.
    """
    names = list(tensors)
    places = sorted(
        (tensor.data_ptr(), position, tensor.numel() * tensor.element_size())
        for position, tensor in enumerate(tensors.values())
        if tensor.numel()
    )
    end = end_of_written = 0
    last = last_written = 0
    for start, position, size_bytes in places:
        is_written = position < written
        reach, other = (end, last) if is_written else (end_of_written, last_written)
        if start < reach:
            first, second = sorted((position, other))
            raise ValueError(
                f"{names[first]} and {names[second]} share memory; pass separate tensors"
            )
        if start + size_bytes > end:
            end, last = start + size_bytes, position
        if is_written and start + size_bytes > end_of_written:
            end_of_written, last_written = start + size_bytes, position


_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
}


def _gradient_dtypes(kept: Kept, param: Tensor) -> tuple[torch.dtype, ...]:
    if kept is Kept.OWN:
        return (torch.float32,)
    is_fp16 = isinstance(param, Tensor) and param.dtype is torch.float16
    return (torch.float16 if is_fp16 and kept is Kept.MASTER else torch.bfloat16, torch.float32)


_Typed: TypeAlias = dict[str, tuple[Tensor, tuple[torch.dtype, ...]]]


def _typed(found: Operands) -> _Typed:
    return {
        name: (value, tuple(_DTYPES[kind] for kind in kinds))
        for name, (value, kinds) in found.items()
    }


def check_device_update(
    kept: Kept,
    operands: tuple[Tensor, Tensor],
    state: StateArrays,
    scalars: UpdateScalars,
    key: RoundingKey | None,
) -> None:
    """Raise TypeError or ValueError unless an update may run on parameter, gradient and state."""
    param, grad = operands
    written, bases = update_operands(kept, param, state, scalars, key)
    check_tensors(written=_typed(written), read={"grad": (grad, _gradient_dtypes(kept, param))})
    _check_bases(param, bases)


def check_device_parts(
    kept: Kept,
    operands: tuple[Tensor, Sequence[Tensor]],
    state: StateArrays,
    scalars: UpdateScalars,
    parts: Sequence[UpdatePart],
) -> None:
    """Raise TypeError or ValueError unless an update may run on the parts of a sub-group."""
    param, grads = operands
    written, bases = update_operands(kept, param, state, scalars, parts[0].key)
    check_tensors(written=_typed(written), read={})
    dtypes = _gradient_dtypes(kept, param)
    read = {f"gradient {at}": (each, dtypes) for at, each in enumerate(grads)}
    check_types(read)
    tensors = {name: each for name, (each, _) in (*written.items(), *read.items())}
    _check_place(tensors)
    check_apart(tensors, len(written))
    for part in parts:
        there = grads[part.piece].numel()
        if part.start + part.numel > param.numel() or part.offset + part.numel > there:
            raise ValueError(
                f"a part of {part.numel} elements from {part.start} on, or from {part.offset} on in"
                f" its gradient, lies beyond {param.numel()} parameters or {there} gradients"
            )
    _check_bases(param, bases)


def update_one_by_one(
    kernels: DeviceKernels,
    operands: tuple[Tensor, Sequence[Tensor]],
    state: StateArrays,
    scalars: UpdateScalars,
    parts: Sequence[UpdatePart],
) -> None:
    """Update the parts of a sub-group, parameters and gradients, with a call for each."""
    param, grads = operands
    for part in parts:
        there = state.part(part.inside)
        kernels.update(param[part.inside], part.gradient(grads), there, scalars, part.key)


def _check_bases(param: Tensor, bases: Operands) -> None:
    if bases:
        check_tensors(written=_typed(bases), read={})
        check_base_count(param.numel(), {name: each.numel() for name, (each, _) in bases.items()})


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
        from offload.kernels_torch import TorchDeviceKernels

        return TorchDeviceKernels()
    from offload.kernels_triton import TritonKernels

    return TritonKernels()
