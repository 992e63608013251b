"""The native engine on a pool of threads: it needs nothing of the kernel but reads and writes."""

from aio_ops.native_engine import (
    NativeEngine,
    load_native,
    native_available,
    native_unavailable_reason,
)

__all__ = ["ThreadsEngine", "native_available", "native_unavailable_reason"]


class ThreadsEngine(NativeEngine):
    """Moves one block a thread at a time."""

    name = "threads"

    def __init__(
        self, thread_count: int, block_bytes: int, queue_depth: int, reason: str = ""
    ) -> None:
        core = load_native().ThreadEngine(thread_count, block_bytes, queue_depth)
        super().__init__(core, reason, thread_count * block_bytes)
