"""The ZeRO field's I/O handles on our engines, so that its scripts only change an import.

    from aio_ops.handles import aio_handle            # or
    from aio_ops.handles import AsyncIOBuilder        # AsyncIOBuilder().load().aio_handle(...)

Names, arguments, defaults and what is returned are the field's. What it aborts on, prints, or
reports as done although it failed raises OSError or ValueError here.
"""

from aio_ops.handles.aio import AioHandle, aio_read, aio_write, deepspeed_memcpy
from aio_ops.handles.builders import AsyncIOBuilder, GDSBuilder, PinMemoryBuilder
from aio_ops.handles.gds import GdsHandle
from aio_ops.handles.pin import PinHandle

aio_handle = AioHandle
gds_handle = GdsHandle
pin_handle = PinHandle

__all__ = [
    "AioHandle",
    "AsyncIOBuilder",
    "GDSBuilder",
    "GdsHandle",
    "PinHandle",
    "PinMemoryBuilder",
    "aio_handle",
    "aio_read",
    "aio_write",
    "deepspeed_memcpy",
    "gds_handle",
    "pin_handle",
]
