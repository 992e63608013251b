"""The native engines on the kernel's own queues: io_uring and Linux AIO."""

import errno
import os
import threading
import weakref
from typing import TYPE_CHECKING

from aio_ops.engine import Polling
from aio_ops.memory import Span
from aio_ops.native_engine import NativeEngine, load_native
from aio_ops.transfer import TransferFile

if TYPE_CHECKING:
    from aio_ops import _native

_NO_SLOT = -1

_IO_URING_REMEDIES = {
    errno.ENOSYS: "the kernel has none: it needs Linux 5.4, built with CONFIG_IO_URING",
    errno.EPERM: (
        "it is switched off: set `sysctl kernel.io_uring_disabled=0`, or allow io_uring_setup in "
        "the container's seccomp profile"
    ),
    errno.EACCES: "a security module forbids it",
    errno.ENOMEM: "raise `ulimit -l` (memory that may be locked), or lower queue_depth",
    errno.EOPNOTSUPP: "it needs Linux 5.4",
    errno.EMFILE: "raise `ulimit -n` (open files)",
}
_KERNEL_AIO_REMEDIES = {
    errno.ENOSYS: "the kernel has none (CONFIG_AIO), or a seccomp profile hides it",
    errno.EPERM: "allow io_setup in the container's seccomp profile",
    errno.EAGAIN: (
        "all contexts are in use: raise `sysctl fs.aio-max-nr`, end other users of it "
        "(fs.aio-nr counts), or lower queue_depth"
    ),
    errno.ENOMEM: "the kernel has no memory for its ring; lower queue_depth",
    errno.EMFILE: "raise `ulimit -n` (open files)",
}


def refusal(kind: str, error: OSError) -> OSError:
    """Return the error that says why the kernel has no such queue for us, and what helps."""
    number = error.errno or errno.EIO
    remedies = _IO_URING_REMEDIES if kind == "io_uring" else _KERNEL_AIO_REMEDIES
    remedy = remedies.get(number, "use the engine 'threads'")
    return OSError(number, f"{kind} is refused here: {error.strerror}; {remedy}")


class IoUringEngine(NativeEngine):
    """Keeps one io_uring full: up to `queue_depth` blocks are with the kernel at once.

    Files are registered with the ring at their first transfer, and `register` adds memory, where
    the kernel allows either (from 5.13 on); without, transfers only cost a little more.
    """

    name = "io_uring"

    def __init__(
        self,
        block_bytes: int,
        queue_depth: int,
        reason: str = "",
        polling: Polling = Polling.NONE,
    ) -> None:
        native = load_native()
        try:
            ring: _native.UringEngine = native.UringEngine(
                block_bytes, queue_depth, polling.submission, polling.completion
            )
        except OSError as error:
            raise refusal(self.name, error) from error
        super().__init__(ring, reason, queue_depth * block_bytes)
        self.polling = polling
        self._slots: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._slots_lock = threading.Lock()
        self._registered: dict[int, object] = {}  # the owners of registered memory, by address

    def register(self, span: Span) -> str | None:
        """Pin `span` for this engine and return None, or return why that cannot be.

        Transfers inside it then spare the kernel looking up its pages. The memory stays pinned,
        and counts as locked, until `unregister` or `close`.
        """
        self._require_usable()
        if span.address in self._registered:
            return None
        error_number = self._ring.add_memory(span.address, span.size_bytes)
        if not error_number:
            self._registered[span.address] = span.owner
            return None
        remedy = {
            errno.ENOMEM: "; raise `ulimit -l` (memory that may be locked)",
            errno.EOPNOTSUPP: "; it needs Linux 5.13",
        }.get(error_number, "")
        return (
            f"{span.size_bytes} bytes cannot be registered with io_uring: "
            f"{os.strerror(error_number)}{remedy}"
        )

    def unregister(self, span: Span) -> None:
        """Give the memory that `register` pinned back, once transfers in flight are done."""
        if self._in_other_process():
            return
        if self._registered.pop(span.address, None) is not None:
            self._ring.remove_memory(span.address)

    @property
    def _ring(self) -> "_native.UringEngine":
        return self._core  # type: ignore[return-value]

    def _slot_of(self, lease: object, file: TransferFile) -> int:
        try:
            with self._slots_lock:
                return self._known_slot_of(lease, file)
        except TypeError:  # a lease that cannot be watched: its file is not registered
            return _NO_SLOT

    def _known_slot_of(self, lease: object, file: TransferFile) -> int:
        slot = self._slots.get(lease)
        if slot is None:
            slot = max(self._ring.add_file(file.fileno()), _NO_SLOT)
            self._slots[lease] = slot
            if slot != _NO_SLOT:
                # A registered file would keep its space on disk: it goes with its descriptor.
                weakref.finalize(lease, _forget_file, weakref.ref(self), slot).atexit = False
        return slot

    def _stop(self) -> None:
        super()._stop()
        self._registered.clear()


def _forget_file(reference: "weakref.ref[IoUringEngine]", slot: int) -> None:
    engine = reference()
    if engine is not None:
        engine._ring.remove_file(slot)


class KernelAioEngine(NativeEngine):
    """Linux kernel AIO: asynchronous on direct files, and as slow as plain calls elsewhere."""

    name = "kernel_aio"

    def __init__(self, block_bytes: int, queue_depth: int, reason: str = "") -> None:
        native = load_native()
        try:
            core: _native.AioEngine = native.AioEngine(block_bytes, queue_depth)
        except OSError as error:
            raise refusal(self.name, error) from error
        super().__init__(core, reason, queue_depth * block_bytes)
