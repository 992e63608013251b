"""What the engines of the native module share: none of their threads takes the interpreter lock."""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from aio_ops.engine import Engine
from aio_ops.memory import Span
from aio_ops.schedule import Schedule
from aio_ops.transfer import Operation, Outcome, Ticket, Transfer, TransferFile
from aio_ops.watchdog import STALL_WARNING_S, warn_of_stall

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


def load_native() -> ModuleType:
    """Return the native module, or raise RuntimeError with the remedy."""
    try:
        from aio_ops import _native
    except ImportError as error:
        raise RuntimeError(
            f"the native engine does not load ({error}); reinstall tierzero with a C++20 "
            "compiler, or use the engine 'python'"
        ) from error
    return _native


def _outcome(result: "_native.Result") -> Outcome:
    detail = "the file ended early" if result.ended_early else ""
    return Outcome(result.moved_bytes, result.error_number, detail)


class NativeEngine(Engine):
    """Wraps a native core, which owns each transfer's record until its bytes have moved."""

    def __init__(self, core: "_native.Engine", reason: str, bytes_at_once: int) -> None:
        super().__init__(bytes_at_once)
        self.reason = reason
        self._core = core
        self.watch(STALL_WARNING_S)

    @property
    def core(self) -> "_native.Engine":
        """The native part, for those in this package that add to it."""
        return self._core

    def watch(self, stall_s: float) -> None:
        """Warn those who wait whenever nothing has completed for `stall_s` seconds."""
        self._core.watch(stall_s, functools.partial(warn_of_stall, self.name))

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

    def set_schedule(self, schedule: Schedule) -> None:
        """Send reads and writes to the kernel in another order from here on."""
        super().set_schedule(schedule)
        self._core.set_schedule(
            read_window_bytes=schedule.window_bytes(Operation.READ),
            write_window_bytes=schedule.window_bytes(Operation.WRITE),
            burst_bytes=schedule.burst_bytes or 0,
        )

    def _start(
        self, transfers: list[Transfer], file: TransferFile, pieces: Sequence[tuple[int, Span]]
    ) -> list[Ticket]:
        self._collect()
        records = self._core.submit(
            transfers,
            [(offset, span.address, span.size_bytes) for offset, span in pieces],
            writes=transfers[0].operation is Operation.WRITE,
            descriptor=file.fileno(),
            alignment_bytes=file.alignment_bytes if file.direct else 1,
            file_slot=self._slot_of(transfers[0].lease, file),
            edge_descriptor=file.edge_fileno(),
            further=transfers[0].further,
        )
        return [
            Ticket(transfer, functools.partial(self._advance, transfer, record))
            for transfer, record in zip(transfers, records, strict=True)
        ]

    def _slot_of(self, lease: object, file: TransferFile) -> int:  # noqa: ARG002  for subclasses
        """Return where the kernel has the file registered, or -1."""
        return -1

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
