"""The path between a disk and the memory of a GPU, measured without torch."""

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from aio_ops.device import DeviceMover
from aio_ops.memory import DeviceSpan
from aio_ops.native_engine import NativeEngine
from aio_ops.pinned import open_cuda
from aio_ops.tune.bench import Bench, Sample, open_setting
from aio_ops.tune.settings import Setting, Workload, size_text

_DEVICE = 0
_SPAN_BYTES = 4 << 20
_SPANS = 16  # as much in flight as on the way to the host


@dataclass(frozen=True, slots=True, order=True)
class Slots:
    """The bounce slots that bytes go through, for each direction."""

    slot_bytes: int
    count: int

    def describe(self) -> str:
        """Return them in words."""
        return f"{self.count} slots of {size_text(self.slot_bytes)}"


CHOICES = tuple(Slots(size << 20, count) for size, count in ((1, 8), (2, 8), (4, 4), (4, 8)))
"""Few enough to go straight to the final rounds: what they differ by is small."""


def refusal() -> str | None:
    """Return why there is no GPU to measure, or None."""
    cuda, reason = open_cuda(_DEVICE)
    return None if cuda is not None else reason


class DeviceMemory:
    """Memory of a CUDA device in its primary context, given back at the end."""

    def __init__(self, device: int, size_bytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._device = ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(device))
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._context = context
        address = ctypes.c_uint64()
        self.address = 0
        try:
            with self._current():
                self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
                self.address = address.value
                self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(7), ctypes.c_size_t(size_bytes))
                self._call("cuCtxSynchronize")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back."""
        if self.address:
            with self._current():
                self._call("cuMemFree_v2", ctypes.c_uint64(self.address))
            self.address = 0
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            raise OSError(f"the CUDA driver answered {error} to {name}")


class GpuBench:
    """Moves bytes between the scratch file of a bench and device memory."""

    def __init__(self, bench: Bench, setting: Setting) -> None:
        self._bench = bench
        self._setting = setting
        self._movers: dict[Slots, DeviceMover] = {}  # pinning their slots takes long
        self._closing = contextlib.ExitStack()
        self._memory = DeviceMemory(_DEVICE, _SPANS * _SPAN_BYTES)
        self._closing.callback(self._memory.close)

    def measure(self, slots: Slots, workload: Workload, seconds: float) -> Sample:
        """Move bytes for so long through such slots."""
        if workload.writes:
            self._bench.allowance.require(_SPANS * _SPAN_BYTES)
        spans = [
            DeviceSpan(_DEVICE, self._memory.address + index * _SPAN_BYTES, _SPAN_BYTES, self)
            for index in range(_SPANS)
        ]
        return self._bench.run(self._mover(slots), spans, workload, seconds)

    def _mover(self, slots: Slots) -> DeviceMover:
        if slots not in self._movers:
            engine = self._closing.enter_context(open_setting(self._setting))
            if not isinstance(engine, NativeEngine):
                raise OSError(f"only native engines move device memory, and this is {engine.name}")
            self._movers[slots] = self._closing.enter_context(
                DeviceMover(engine, _DEVICE, slot_bytes=slots.slot_bytes, slot_count=slots.count)
            )
        return self._movers[slots]

    def close(self) -> None:
        """Give everything back."""
        self._closing.close()
