"""`gds_handle`: the field's handle for tensors on a GPU, on bounce slots in host memory.

GPUDirect Storage is not used, and the handle says so: once in the log, and always by `gds_in_use`.
"""

import bisect
import functools
import logging
import threading
from typing import Any

from aio_ops.handles.aio import AioHandle
from aio_ops.handles.tensors import framework_of

_log = logging.getLogger(__name__)

_REASON = "transfers of device tensors go through bounce slots in host memory"


class _DeviceRanges:
    """The device memory that callers have pinned, as ranges that do not overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: list[tuple[str, int, int]] = []  # device, start, stop; sorted

    def add(self, device: str, start: int, size_bytes: int) -> None:
        with self._lock:
            bisect.insort(self._ranges, (device, start, start + size_bytes))

    def remove(self, device: str, start: int, size_bytes: int) -> bool:
        with self._lock:
            try:
                self._ranges.remove((device, start, start + size_bytes))
            except ValueError:
                return False
        return True

    def covers(self, device: str, start: int, size_bytes: int) -> bool:
        with self._lock:
            index = bisect.bisect_right(self._ranges, (device, start, 1 << 64)) - 1
            if index < 0:
                return False
            of_device, _, stop = self._ranges[index]
        return of_device == device and start + size_bytes <= stop


class GdsHandle(AioHandle):
    """An `aio_handle` whose users keep tensors on a device.

    Pinning device memory needs nothing here; it is remembered, so that what the field refuses
    (freeing what was never pinned) is refused.
    """

    gds_in_use = False
    gds_reason = _REASON

    def __init__(
        self,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool | None = None,
        overlap_events: bool | None = None,
        intra_op_parallelism: int | None = None,
        *,
        engine: str = "auto",
    ) -> None:
        super().__init__(
            block_size,
            queue_depth,
            single_submit,
            overlap_events,
            intra_op_parallelism,
            engine=engine,
        )
        self._pinned = _DeviceRanges()
        _say_once()

    def get_alignment(self) -> int:
        """Return 512 whatever the parallelism, as in the field."""
        return 512

    def new_pinned_device_tensor(self, num_elem: int, example_tensor: Any) -> Any:
        """Return an uninitialised tensor of the example's type on the current CUDA device."""
        framework = framework_of(example_tensor)
        if not hasattr(framework, "cuda") or not framework.cuda.is_available():
            raise RuntimeError(
                f"{framework.__name__} finds no CUDA device for a pinned device tensor; use "
                "new_cpu_locked_tensor"
            )
        tensor = framework.empty(num_elem, dtype=example_tensor.dtype, device="cuda")
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: Any) -> bool:
        """Forget that a device tensor is pinned; its memory goes with its last view."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: Any) -> bool:
        """Remember a device tensor as pinned and return True."""
        self._pinned.add(*_device_range(tensor))
        return True

    def unpin_device_tensor(self, tensor: Any) -> bool:
        """Forget a device tensor that was pinned and return True; ValueError if it was not."""
        device, start, size_bytes = _device_range(tensor)
        if not self._pinned.remove(device, start, size_bytes):
            raise ValueError(
                f"the tensor of {size_bytes} bytes at {start:#x} on {device} was not pinned with "
                "this handle; give the very tensor that was pinned"
            )
        return True

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether all of a tensor is in locked host memory or in pinned device memory."""
        if getattr(getattr(buffer, "device", None), "type", "cpu") == "cpu":
            return super().is_pinned(buffer)
        return self._pinned.covers(*_device_range(buffer))


def _device_range(tensor: Any) -> tuple[str, int, int]:
    device = getattr(tensor, "device", None)
    if getattr(device, "type", "cpu") == "cpu":
        raise ValueError("the tensor is not on a device; pin host memory by new_cpu_locked_tensor")
    return str(device), tensor.data_ptr(), tensor.numel() * tensor.element_size()


@functools.cache
def _say_once() -> None:
    _log.warning("GPUDirect Storage is not in use: %s", _REASON)
