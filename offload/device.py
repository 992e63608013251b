"""Where the model computes, and how bytes get there and back: host memory itself, or a GPU.

[Note: copies] The device works in one order, that of the calls which issue its work. A copy between
host and device memory runs beside it: it begins once the work issued before it is done, and its
fence says when it has ended.
1. Work that reads what a copy brings is issued after `Device.join` of its fence; the host waits for
   nothing then.
2. Host memory that a copy reads must not change, and what it writes must not be read, before the
   host has waited for its fence. Copies into the device are done in order, and so are those out of
   it; between both directions only a fence orders.
3. Device memory that a copy reads or writes is freed or overwritten by work that is issued after
   `Device.join` of its fence.
4. Other work may run beside the device's own order, too: what ranks exchange. It begins once the
   work issued before it is done, and a copy that it waits for; the three rules are its own as well.
5. Copies aside are another two directions: they begin after what was issued before `start_aside`,
   and wait for nothing issued since. Nothing issued since may write what they read, or use what
   they write, before it joins their fence.
A slot keeps the fence of the last copy that used it, and whoever takes it next waits.
"""

from __future__ import annotations

import abc
import contextlib
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aio_ops import HostArena, PinnedArena, Span
from estimators import ElementType
from offload.arrays import clear_bytes, copy_bytes, tensor_at, tensor_span, torch_dtype


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a device that is not the host, kept alive by their tensor, shape `[bytes]`."""

    bytes: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""
        return self.bytes.numel()

    def sub(self, offset_bytes: int, size_bytes: int) -> DeviceMemory:
        """Return a part of this memory, with the same owner."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {offset_bytes + size_bytes} are not inside"
                f" {self.size_bytes} bytes of device memory"
            )
        return DeviceMemory(self.bytes[offset_bytes : offset_bytes + size_bytes])


Memory: TypeAlias = Span | DeviceMemory
"""Where a section, a shard or a flat buffer lies."""

Pairs: TypeAlias = Sequence[tuple[Memory, Memory]]
"""Sources of copies, each with its target of as many bytes."""


def elements_at(memory: Memory, element: ElementType, numel: int) -> torch.Tensor:
    """View the first `numel` elements of host or device memory as a tensor, shape `[numel]`."""
    if isinstance(memory, Span):
        return tensor_at(memory, element, numel)
    return memory.bytes[: numel * element.size_bytes].view(torch_dtype(element))


def clear_memory(memory: Memory) -> None:
    """Set every byte to zero."""
    if isinstance(memory, Span):
        clear_bytes(memory)
    else:
        memory.bytes.zero_()


class Fence(abc.ABC):
    """When one copy, and all of its direction before it, have ended."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait, on the host, until the copy has ended."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Tell whether the copy has ended."""


class _Passed(Fence):
    """A copy that was over when it was asked for."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Tell that it is over."""
        return True


PASSED: Fence = _Passed()


def last_of(earlier: Fence, later: Fence) -> Fence:
    """Return the fence behind two copies of one direction, the later one perhaps no copy at all."""
    return earlier if later is PASSED else later


class Device(abc.ABC):
    """A place where models compute; see [Note: copies]."""

    torch_device: torch.device
    is_host: bool
    """Whether device memory is host memory: nothing is copied then."""
    identity: str = ""
    """What no other device of any node is called; the host has no name."""

    def __init__(self) -> None:
        self.copied_bytes = {"in": 0, "out": 0}
        """Bytes copied from host memory to the device, and back."""

    @abc.abstractmethod
    def copy(
        self, source: Memory, target: Memory, after: Fence = PASSED, *, aside: bool = False
    ) -> Fence:
        """Start to copy all of `source` to `target`, which has as many bytes.

        `after` is a copy of another direction that must have ended before.
        """

    def copy_all(self, pairs: Pairs, after: Fence = PASSED, *, aside: bool = False) -> Fence:
        """Start to copy several sources of one direction; the fence is behind the last.

        The host issues them as one, which costs it less than one after another.
        """
        fence = PASSED
        for source, target in pairs:
            fence = last_of(fence, self.copy(source, target, after, aside=aside))
        return fence

    @abc.abstractmethod
    def start_aside(self) -> None:
        """Let copies aside begin once what was issued up to here is done."""

    @abc.abstractmethod
    def join(self, fence: Fence) -> None:
        """Let the work that is issued from here on begin after a copy has ended."""

    @abc.abstractmethod
    def beside(
        self, work: Callable[[], object], memory: torch.Tensor, after: Fence = PASSED
    ) -> Fence:
        """Issue work that runs beside what is issued later; it reads and writes `memory` alone.

        It begins after a copy, and everything that was issued before.
        """

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to bring a tensor to host memory; the call returned waits for it.

        What was fetched is there in order: whoever waits for the last waits for all.
        """
        values = tensor.to("cpu")
        return lambda: values

    @abc.abstractmethod
    def settle(self) -> None:
        """Wait, on the host, until no copy is in flight."""

    @abc.abstractmethod
    def arena(self, size_bytes: int) -> HostArena:
        """Return host memory that copies are fast from and to."""

    def marking(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002  nobody looks
        """Name what a block does for profilers of the device."""
        return contextlib.nullcontext()

    def memory_of(self, tensor: torch.Tensor) -> Memory:
        """Return the memory of a contiguous tensor of this device."""
        if self.is_host:
            return tensor_span(tensor)
        if not tensor.is_contiguous() or tensor.device != self.torch_device:
            raise ValueError(
                f"a contiguous tensor on {self.torch_device} is needed, got {tensor.device} with"
                f" strides {tensor.stride()}"
            )
        return DeviceMemory(tensor.detach().reshape(-1).view(torch.uint8))

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the device, shape `[numel]`, with any values."""
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros on the device, shape `[numel]`."""
        return torch.zeros(numel, dtype=dtype, device=self.torch_device)


class SeparateDevice(Device):
    """A device with memory of its own: copies between it and the host go on beside its work."""

    is_host = False

    def copy(
        self, source: Memory, target: Memory, after: Fence = PASSED, *, aside: bool = False
    ) -> Fence:
        """Start to copy; within the device it is in the order of its work, on the host at once."""
        return self.copy_all(((source, target),), after, aside=aside)

    def copy_all(self, pairs: Pairs, after: Fence = PASSED, *, aside: bool = False) -> Fence:
        """Start to copy several; those between host and device must be of one direction."""
        crossing: dict[str, list[tuple[Memory, Memory]]] = {}
        for source, target in pairs:
            if source.size_bytes != target.size_bytes:
                raise ValueError(f"cannot copy {source.size_bytes} bytes to {target.size_bytes}")
            if not source.size_bytes:
                continue
            if isinstance(source, Span) and isinstance(target, Span):
                after.wait()
                copy_bytes(source, target, source.size_bytes)
            elif isinstance(source, DeviceMemory) and isinstance(target, DeviceMemory):
                self.join(after)
                target.bytes.copy_(source.bytes)
            else:
                way = "in" if isinstance(source, Span) else "out"
                crossing.setdefault(way, []).append((source, target))
        if len(crossing) > 1:
            raise ValueError("copies to the device and copies from it have fences of their own")
        if not crossing:
            return PASSED
        ((way, crossed),) = crossing.items()
        self.copied_bytes[way] += sum(source.size_bytes for source, _ in crossed)
        return self._start(f"{way} aside" if aside else way, crossed, after)

    @abc.abstractmethod
    def _start(self, way: str, pairs: Pairs, after: Fence) -> Fence:
        """Start copies between host and device, each of at least one byte.

        `way` is "in", "out", "in aside" or "out aside".
        """


class HostDevice(Device):
    """The processor: device memory is host memory, and a copy is over when it was made."""

    torch_device = torch.device("cpu")
    is_host = True

    def copy(
        self,
        source: Memory,
        target: Memory,
        after: Fence = PASSED,  # noqa: ARG002  nothing is in flight
        *,
        aside: bool = False,  # noqa: ARG002
    ) -> Fence:
        """Copy now."""
        if not isinstance(source, Span) or not isinstance(target, Span):
            raise TypeError("memory of another device was given to the processor")
        copy_bytes(source, target, source.size_bytes)
        return PASSED

    def start_aside(self) -> None:
        """Do nothing: what was issued is done."""

    def join(self, fence: Fence) -> None:
        """Do nothing: every copy has ended."""

    def beside(
        self,
        work: Callable[[], object],
        memory: torch.Tensor,  # noqa: ARG002  nothing is in flight
        after: Fence = PASSED,  # noqa: ARG002
    ) -> Fence:
        """Do the work now."""
        work()
        return PASSED

    def settle(self) -> None:
        """Do nothing: every copy has ended."""

    def arena(self, size_bytes: int) -> HostArena:
        """Return plain memory that forked children may read."""
        return HostArena(size_bytes, inherited=True)


class CudaDevice(SeparateDevice):
    """A GPU, with streams for copies in, copies out and exchanges beside that of its work."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.torch_device = torch.device("cuda", index)
        self.identity = _identity(index)
        self._index = index
        self._ways: dict[str, torch.cuda.Stream] = {}
        for way in ("in", "out", "in aside", "out aside"):
            self._ways[way] = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._beside = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def _start(self, way: str, pairs: Pairs, after: Fence) -> Fence:
        """Copy on the stream of the direction."""
        stream = self._ways[way]
        current = torch.cuda.current_stream(self._index)
        if way in ("in", "out"):
            stream.wait_stream(current)
        if isinstance(after, _CudaFence):
            stream.wait_event(after.event)
        with self._on(stream, current):
            for source, target in pairs:
                _bytes(target).copy_(_bytes(source), non_blocking=True)
        return self._fence_of(stream)

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream, current: torch.cuda.Stream) -> Iterator[None]:
        """Issue on a stream what is inside; torch's own context takes several times as long."""
        if torch.cuda.current_device() != self._index:
            with torch.cuda.stream(stream):
                yield
            return
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(current)

    def _fence_of(self, stream: torch.cuda.Stream) -> Fence:
        """Return the fence behind all that was issued on a stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return _CudaFence(event)

    def beside(
        self,
        work: Callable[[], object],
        memory: torch.Tensor,  # noqa: ARG002  its caller keeps it until the fence was joined
        after: Fence = PASSED,
    ) -> Fence:
        """Issue work on a stream of its own."""
        stream = self._beside
        current = torch.cuda.current_stream(self._index)
        stream.wait_stream(current)
        if isinstance(after, _CudaFence):
            stream.wait_event(after.event)
        with self._on(stream, current):
            work()
        return self._fence_of(stream)

    def start_aside(self) -> None:
        """Let both streams of copies aside wait for the current one."""
        for way in ("in aside", "out aside"):
            self._ways[way].wait_stream(torch.cuda.current_stream(self._index))

    def marking(self, what: str) -> AbstractContextManager[None]:
        """Put an NVTX range around a block."""
        marked: AbstractContextManager[None] = torch.cuda.nvtx.range(what)
        return marked

    def join(self, fence: Fence) -> None:
        """Let the current stream wait; the host does not."""
        if isinstance(fence, _CudaFence):
            torch.cuda.current_stream(self._index).wait_event(fence.event)

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy to pinned memory, in the order of the device's work."""
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        values.copy_(tensor, non_blocking=True)
        fence = self._fence_of(torch.cuda.current_stream(self._index))

        def finish() -> torch.Tensor:
            if not fence.done():
                fence.wait()
            return values

        return finish

    def settle(self) -> None:
        """Wait for the streams beside that of the device's own work."""
        for stream in (*self._ways.values(), self._beside):
            stream.synchronize()

    def arena(self, size_bytes: int) -> HostArena:
        """Return memory that is registered with CUDA, or plain memory and a warning."""
        try:
            return PinnedArena(size_bytes, device=self.torch_device.index)
        except OSError as error:
            warnings.warn(
                f"host memory is not pinned: {error.strerror}. Training goes on, with slower copies"
                " to the GPU",
                RuntimeWarning,
                stacklevel=2,
            )
            return HostArena(size_bytes)


class _CudaFence(Fence):
    """An event behind a copy."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


def _bytes(memory: Memory) -> torch.Tensor:
    if isinstance(memory, DeviceMemory):
        return memory.bytes
    return torch.frombuffer(memory.view(), dtype=torch.uint8)


def _identity(index: int) -> str:
    """Return what CUDA calls a GPU, wherever it is; an older torch knows only where it is."""
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else f"{platform.node()} cuda:{index}"


def open_cuda_device(index: int) -> Device:
    """Return a GPU to compute on."""
    return CudaDevice(index)
