"""The native engine: blocks on a pool of C++ threads that never take the interpreter lock."""

import functools
from typing import TYPE_CHECKING

from aio_ops.engine import Engine
from aio_ops.memory import Span
from aio_ops.transfer import Operation, Outcome, Ticket, Transfer, TransferFile

if TYPE_CHECKING:
    from aio_ops import _native


def native_unavailable_reason() -> str | None:
    """Return why the native module does not load, or None when it does."""
    try:
        from aio_ops import _native  # noqa: F401
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None


def native_available() -> bool:
    """Return whether the native module loads."""
    return native_unavailable_reason() is None


def _outcome(result: "_native.Result") -> Outcome:
    detail = "the file ended early" if result.ended_early else ""
    return Outcome(result.moved_bytes, result.error_number, detail)


class ThreadsEngine(Engine):
    """Wraps the native core, which owns each transfer's record until its bytes have moved."""

    name = "threads"

    def __init__(
        self, thread_count: int, block_bytes: int, queue_depth: int, reason: str = ""
    ) -> None:
        super().__init__()
        try:
            from aio_ops import _native
        except ImportError as error:
            raise RuntimeError(
                f"the native engine does not load ({error}); reinstall tierzero with a C++20 "
                "compiler, or use the engine 'python'"
            ) from error
        self.reason = reason
        self._core = _native.ThreadEngine(thread_count, block_bytes, queue_depth)

    @property
    def in_flight(self) -> int:
        """The number of transfers that are not done."""
        self._require_same_process()
        return self._core.in_flight

    def drain(self) -> None:
        """Wait until nothing is in flight; failures stay with their tickets."""
        self._require_same_process()
        self._core.drain()
        self._collect()

    def _start(self, transfer: Transfer, file: TransferFile, span: Span) -> Ticket:
        self._collect()
        record = self._core.submit(
            owner=transfer,
            writes=transfer.operation is Operation.WRITE,
            descriptor=file.fileno(),
            offset=transfer.offset,
            address=span.address,
            size_bytes=span.size_bytes,
            alignment_bytes=file.alignment_bytes if file.direct else 1,
        )
        return Ticket(transfer, functools.partial(self._advance, transfer, record))

    def _advance(
        self, transfer: Transfer, record: "_native.Transfer", timeout_s: float | None
    ) -> None:
        self._require_same_process()
        result = self._core.wait(record, timeout_s)
        # Not left to the collection: another thread may hold this transfer in its own.
        if result is not None:
            transfer.finish(_outcome(result))
        self._collect()

    def _collect(self) -> None:
        """Tell every transfer that is over what came of it, also those without a ticket."""
        for transfer, result in self._core.take_finished():
            transfer.finish(_outcome(result))

    def _stop(self) -> None:
        self._core.close()
        self._collect()
