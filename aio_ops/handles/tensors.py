"""The bytes of a tensor of any framework, without importing one.

Arrays come in through DLPack. Tensors that have torch's own verbs are asked by those instead: they
say more (lazy conjugation, a storage that can be held) and they can copy between devices. Arrays go
out through DLPack, to the framework of an example. numpy is the carrier, because its release of an
exported array is safe at any time, even after the interpreter has ended.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from aio_ops.memory import Span

_HOST_DEVICES = frozenset({1, 3, 11})  # DLPack: CPU, and host memory pinned for CUDA and ROCm
_CAPSULE_NAME = b"dltensor"


class TensorBytes(Protocol):
    """The bytes of a tensor in the order of its elements, row by row."""

    @property
    def size_bytes(self) -> int:
        """How many there are."""

    @property
    def device(self) -> int | None:
        """The CUDA device that they are on, or None."""

    def load(self, start: int, target: Span) -> None:
        """Copy the bytes from `start` on to host memory, as many as it holds."""

    def store(self, start: int, source: Span) -> None:
        """Copy host memory to the bytes from `start` on."""


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Bytes in one piece of host memory."""

    span: Span

    @property
    def size_bytes(self) -> int:
        """How many there are."""
        return self.span.size_bytes

    @property
    def device(self) -> int | None:
        """None: they are in host memory."""
        return None

    def load(self, start: int, target: Span) -> None:
        """Copy the bytes from `start` on to `target`."""
        copy_bytes(self.span.sub(start, target.size_bytes), target)

    def store(self, start: int, source: Span) -> None:
        """Copy `source` to the bytes from `start` on."""
        copy_bytes(source, self.span.sub(start, source.size_bytes))


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes that only the framework reaches: `flat` is one-dimensional and of single bytes."""

    flat: Any
    framework: ModuleType

    @property
    def size_bytes(self) -> int:
        """How many there are."""
        return int(self.flat.numel())

    @property
    def device(self) -> int | None:
        """The CUDA device that they are on, or None on another kind of device."""
        place = self.flat.device
        return int(place.index or 0) if place.type == "cuda" else None

    def load(self, start: int, target: Span) -> None:
        """Copy the bytes from `start` on to `target`, and wait until they are there."""
        part = self.flat[start : start + target.size_bytes]
        bytes_array(target, self.framework).copy_(part)

    def store(self, start: int, source: Span) -> None:
        """Copy `source` to the bytes from `start` on, and wait until it may be reused."""
        part = self.flat[start : start + source.size_bytes]
        part.copy_(bytes_array(source, self.framework))


class Target(NamedTuple):
    """What a read fills, and what to call once it is full."""

    memory: TensorBytes
    settle: Callable[[], object] | None = None


def source_bytes(tensor: Any) -> TensorBytes:
    """Return the bytes of a tensor to write, of a copy where they are not in one piece."""
    if not hasattr(tensor, "untyped_storage"):
        return HostBytes(_dlpack_span(tensor))
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return _torch_bytes(tensor.contiguous())


def target_bytes(tensor: Any) -> Target:
    """Return the bytes of a tensor to read into.

    What is not in one piece is filled from a tensor of the same shape that is.
    """
    if not hasattr(tensor, "untyped_storage"):
        return Target(HostBytes(_dlpack_span(tensor)))
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "a lazily conjugated or negated tensor cannot be read into; read into "
            "the tensor that it was made of"
        )
    if tensor.is_contiguous():
        return Target(_torch_bytes(tensor))
    if any(not step and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} cannot "
            "be read into: several of its elements are one in memory; read into a tensor that is "
            "not expanded"
        )
    whole = tensor.contiguous()
    return Target(_torch_bytes(whole), lambda: tensor.copy_(whole))


def host_range(tensor: Any) -> tuple[int, int] | None:
    """Return address and size of a tensor in one piece of host memory, or None for another."""
    if not hasattr(tensor, "untyped_storage"):
        span = _dlpack_span(tensor)
        return span.address, span.size_bytes
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def framework_of(example: Any) -> ModuleType:
    """Return the library that an array comes from: it has `from_dlpack`."""
    for kind in type(example).__mro__:
        module = sys.modules.get(kind.__module__.partition(".")[0])
        if module is not None and hasattr(module, "from_dlpack"):
            return module
    raise ValueError(
        f"an example of type {type(example).__name__} does not say which arrays are wanted: its "
        "library has no from_dlpack; give a tensor of torch or an array of numpy"
    )


def array_over(span: Span, example: Any) -> Any:
    """Return a one-dimensional array over a span, of the example's library and element type."""
    return bytes_array(span, framework_of(example)).view(example.dtype)


def element_bytes(example: Any) -> int:
    """Return the size of an element of an array, or raise ValueError if it is none."""
    framework_of(example)
    size = getattr(example, "itemsize", None)
    return int(example.element_size()) if size is None else int(size)


def bytes_array(span: Span, framework: ModuleType) -> Any:
    """Return the bytes of a span as an array of a library, which keeps their owner alive."""
    import numpy as np

    array = np.frombuffer(span.view(), dtype=np.uint8)
    return array if framework is np else framework.from_dlpack(array)


def copy_bytes(source: Span, target: Span) -> None:
    """Copy between two pieces of host memory of one size, without the interpreter lock."""
    _memmove()(target.address, source.address, source.size_bytes)


def _memmove() -> Callable[[int, int, int], object]:
    from aio_ops.linux import libc

    function = libc().memmove
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return function


def _torch_bytes(tensor: Any) -> TensorBytes:
    """Return the bytes of a contiguous tensor."""
    size_bytes = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" and size_bytes:
        framework = framework_of(tensor)
        return DeviceBytes(tensor.reshape(-1).view(framework.uint8), framework)
    # The storage, too: assigning to `.data` gives the tensor another one.
    return HostBytes(Span(tensor.data_ptr(), size_bytes, (tensor, tensor.untyped_storage())))


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _ElementType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """The array that a DLPack capsule starts with."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("element", _ElementType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _dlpack_span(array: Any) -> Span:
    """Return the memory of an array that speaks DLPack; the span keeps it exported."""
    export = getattr(array, "__dlpack__", None)
    if export is None:
        raise TypeError(f"a {type(array).__name__} is no tensor: it has no __dlpack__")
    try:
        capsule = export()
    except BufferError as error:
        raise ValueError(
            f"this {type(array).__name__} gives its memory to no one: {error}"
        ) from error
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    tensor = _Tensor.from_address(pointer(capsule, _CAPSULE_NAME))
    if tensor.device.kind not in _HOST_DEVICES:
        raise ValueError(
            f"an array on device {tensor.device.kind} of DLPack is not in host memory; give it as "
            "a torch tensor"
        )
    shape = [tensor.shape[index] for index in range(tensor.dimensions)]
    bits = tensor.element.bits * tensor.element.lanes
    if bits % 8:
        raise ValueError(f"elements of {bits} bits cannot be moved; give whole bytes")
    size_bytes = bits // 8
    for size in shape:
        size_bytes *= size
    if size_bytes and tensor.strides and not _in_one_piece(tensor, shape):
        raise ValueError(
            f"an array of shape {tuple(shape)} is not in one piece of memory; make it contiguous"
        )
    # A capsule that nobody takes gives the array back when it is let go.
    return Span((tensor.data or 0) + tensor.byte_offset, size_bytes, (array, capsule))


def _in_one_piece(tensor: _Tensor, shape: list[int]) -> bool:
    wanted = 1
    for index in reversed(range(len(shape))):
        if shape[index] > 1 and tensor.strides[index] != wanted:
            return False
        wanted *= shape[index]
    return True
