"""Typed views of raw memory, as numpy arrays and as torch tensors; no copy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from aio_ops import Span
from estimators import ElementType

_DTYPES: dict[ElementType, tuple[type[np.generic], torch.dtype]] = {
    ElementType.FP32: (np.float32, torch.float32),
    ElementType.BF16: (np.uint16, torch.bfloat16),
    ElementType.FP16: (np.float16, torch.float16),
    ElementType.INT16: (np.int16, torch.int16),
    ElementType.INT8: (np.int8, torch.int8),
    ElementType.UINT8: (np.uint8, torch.uint8),
    ElementType.UINT16: (np.uint16, torch.uint16),
}


def numpy_dtype(element: ElementType) -> np.dtype[Any]:
    """Return the numpy type that carries `element`; bf16 travels as its bits, uint16."""
    return np.dtype(_DTYPES[element][0])


def torch_dtype(element: ElementType) -> torch.dtype:
    """Return the torch type of `element`."""
    return _DTYPES[element][1]


def array_at(span: Span, element: ElementType, numel: int) -> np.ndarray[Any, Any]:
    """View the first `numel` elements of a span as an array, shape `[numel]`."""
    dtype = numpy_dtype(element)
    if not numel:
        return np.empty(0, dtype)
    return np.frombuffer(span.view(), dtype=dtype, count=numel)


def tensor_at(span: Span, element: ElementType, numel: int) -> torch.Tensor:
    """View the first `numel` elements of a span as a tensor, shape `[numel]`."""
    dtype = torch_dtype(element)
    if not numel:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(span.view(), dtype=dtype, count=numel)


def tensor_span(tensor: torch.Tensor) -> Span:
    """Return the memory of a contiguous CPU tensor, kept alive by the span.

    Raises:
        ValueError: if the tensor is not contiguous or not on the CPU.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"a contiguous CPU tensor is needed, got {tensor.device} with strides {tensor.stride()}"
        )
    return Span(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


def copy_bytes(source: Span, target: Span, size_bytes: int) -> None:
    """Copy bytes between two spans that do not overlap, without the interpreter's lock."""
    if size_bytes > source.size_bytes or size_bytes > target.size_bytes:
        raise ValueError(
            f"cannot copy {size_bytes} bytes from {source.size_bytes} to {target.size_bytes}"
        )
    if size_bytes:
        ctypes.memmove(target.address, source.address, size_bytes)


def clear_bytes(span: Span) -> None:
    """Set every byte of a span to zero."""
    if span.size_bytes:
        ctypes.memset(span.address, 0, span.size_bytes)
