"""Transfers between files and the memory of a GPU, through pinned bounce slots."""

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from aio_ops.engine import check_request
from aio_ops.memory import DeviceSpan
from aio_ops.native_engine import NativeEngine, load_native
from aio_ops.pinned import PinnedArena, open_cuda
from aio_ops.striped_file import StripedFile, start_striped
from aio_ops.transfer import Operation, Outcome, Ticket, Transfer, TransferFile

if TYPE_CHECKING:
    from types import TracebackType

    from aio_ops import _native


class DeviceMover:
    """Reads files into a CUDA device's memory and writes it to files, without Python in between.

    Reads and writes have `slot_count` slots of `slot_bytes` each, in pinned host memory that is
    registered with the device. A transfer goes through them in chunks: the copy of one chunk runs
    while the drive works on others, and both directions at once. Transfers of one direction start
    in the order of submission. Close it before its engine.
    """

    def __init__(
        self,
        engine: NativeEngine,
        device: int,
        *,
        slot_bytes: int = 4 << 20,
        slot_count: int = 8,
    ) -> None:
        if slot_bytes <= 0 or slot_bytes % 4096 or slot_count < 2:
            raise ValueError(
                f"bounce slots must be at least two, of a multiple of 4096 bytes, got {slot_count} "
                f"of {slot_bytes}"
            )
        cuda, refusal = open_cuda(device)
        if cuda is None:
            raise OSError(f"CUDA device {device} cannot be used: {refusal}")
        self.device = device
        self._process_id = os.getpid()
        self._closed = False
        self.arena = PinnedArena(2 * slot_count * slot_bytes, device=device)
        memory = self.arena.whole()
        self.arena.register_with(engine)  # where it is refused, transfers only cost a little more
        self._core: _native.DeviceMover = load_native().DeviceMover(
            engine.core,
            cuda,
            memory_owner=memory.owner,
            memory=memory.address,
            slot_bytes=slot_bytes,
            slots_each=slot_count,
        )

    def submit_read(
        self, file: TransferFile, offset: int, span: DeviceSpan, *, after: int = 0
    ) -> Ticket:
        """Start to fill device memory from a file.

        `after` is a CUDA event (`torch.cuda.Event.cuda_event`) to wait for, on the device, before
        the memory is overwritten; the caller keeps it until the ticket is done.
        """
        return self._submit(Operation.READ, file, offset, span, after)

    def submit_write(
        self, file: TransferFile, offset: int, span: DeviceSpan, *, after: int = 0
    ) -> Ticket:
        """Start to write device memory to a file once the event `after` is done."""
        return self._submit(Operation.WRITE, file, offset, span, after)

    def drain(self) -> None:
        """Wait until nothing is in flight; failures stay with their tickets."""
        self._require_same_process()
        self._core.drain()
        self._collect()

    def close(self) -> None:
        """Finish what is in flight and end the threads; tickets stay readable."""
        if self._closed or os.getpid() != self._process_id:
            return
        self._closed = True
        self._core.close()
        self._collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: "TracebackType | None",
    ) -> None:
        self.close()

    def _submit(
        self, operation: Operation, file: TransferFile, offset: int, span: DeviceSpan, after: int
    ) -> Ticket:
        self._require_same_process()
        if self._closed:
            raise RuntimeError("the device mover is closed")
        if span.device != self.device:
            raise ValueError(
                f"memory of device {span.device} was given to a mover of device {self.device}"
            )
        check_request(file, offset, span.size_bytes)
        self._collect()
        start = functools.partial(self._start, after=after)
        if isinstance(file, StripedFile):
            return start_striped(operation, file, [(offset, span)], start, self.drain)[0]
        transfer = Transfer(operation, file, offset, span, file.lease())
        return start([transfer], file, [(offset, span)])[0]

    def _start(
        self,
        transfers: list[Transfer],
        file: TransferFile,
        pieces: Sequence[tuple[int, DeviceSpan]],
        *,
        after: int,
    ) -> list[Ticket]:
        tickets = []
        for transfer, (offset, span) in zip(transfers, pieces, strict=True):
            record = self._core.submit(
                transfer,
                (offset, span.address, span.size_bytes),
                writes=transfer.operation is Operation.WRITE,
                descriptor=file.fileno(),
                alignment_bytes=file.alignment_bytes if file.direct else 1,
                edge_descriptor=file.edge_fileno(),
                after=after,
            )
            tickets.append(Ticket(transfer, functools.partial(self._advance, record)))
        return tickets

    def _advance(self, record: "_native.DeviceTransfer", timeout_s: float | None) -> None:
        self._require_same_process()
        self._core.wait(record, timeout_s)
        self._collect()

    def _collect(self) -> None:
        for transfer, result, detail in self._core.take_finished():
            said = detail or ("the file ended early" if result.ended_early else "")
            transfer.finish(Outcome(result.moved_bytes, result.error_number, said))

    def _require_same_process(self) -> None:
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"this device mover belongs to process {self._process_id}, and its threads do not "
                f"exist in the forked process {os.getpid()}"
            )
