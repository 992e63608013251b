"""`pin_handle`: the field's allocator of locked host tensors, without any I/O."""

from typing import Any

from aio_ops.handles.aio import LockedTensors
from aio_ops.handles.locked import LOCKED


class PinHandle(LockedTensors):
    """Makes and frees tensors on locked pages; what it knows is shared with every other handle."""

    def free_cpu_locked_tensor(self, locked_tensor: Any) -> bool:
        """Take the lock of a locked tensor away; False when it is not the start of one."""
        return super().free_cpu_locked_tensor(locked_tensor)

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Take the lock of the tensor away that starts at `address`; False when none does."""
        return LOCKED.free(address)
