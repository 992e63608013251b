"""Read ranges of files in a known order, several reads ahead, in few large reads."""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from aio_ops import DataFile, Engine, HostArena, Span, Ticket
from estimators.layout import align_up

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Bytes of a file."""

    file: DataFile
    offset: int
    size_bytes: int
    key: Hashable
    """For whoever asked."""


@dataclass(slots=True)
class _Batch:
    """Requests that are neighbours in one file: one read."""

    requests: list[ReadRequest]
    unreleased: int = field(init=False)

    def __post_init__(self) -> None:
        self.unreleased = len(self.requests)

    @property
    def start(self) -> int:
        """Where the read begins: at a page, so that it can be direct."""
        return self.requests[0].offset // _PAGE_BYTES * _PAGE_BYTES

    @property
    def stop(self) -> int:
        """Where it ends: at a page, or with the file."""
        last = self.requests[-1]
        return min(align_up(last.offset + last.size_bytes, _PAGE_BYTES), last.file.size_bytes)


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """The bytes of a request, until they are released."""

    request: ReadRequest
    span: Span
    batch: object = field(repr=False)
    """What was read at once: bytes of one batch are neighbours in memory as in the file."""


class BlockReader:
    """Reads requests in order; any thread may hold bytes, and releases them."""

    def __init__(
        self,
        engine: Engine,
        requests: Iterable[ReadRequest],
        *,
        block_bytes: int,
        block_count: int,
    ) -> None:
        """Begin nothing yet.

        Args:
            engine: moves the bytes.
            requests: in the order in which they are wanted; each at most `block_bytes`.
            block_bytes: most bytes of one read.
            block_count: reads in flight, or held; two more than a caller holds.
        """
        self._engine = engine
        self._batches = _batches(requests, block_bytes)
        slot_bytes = align_up(block_bytes, _PAGE_BYTES) + 2 * _PAGE_BYTES
        self._arena = HostArena(slot_bytes * block_count)
        self._free = [self._arena.carve(slot_bytes) for _ in range(block_count)]
        self._changed = threading.Condition()
        """Guards `_free`, and what is unreleased of each batch."""
        self._slots: dict[int, Span] = {}
        self._all_asked = False
        self._ahead: collections.deque[tuple[_Batch, Span, Ticket]] = collections.deque()

    def read(self) -> Iterator[ReadBytes]:
        """Yield the bytes of each request; all are released in the end, and none much later.

        Raises:
            TransferError: if a read failed, or a file ended early.
        """
        while True:
            self._read_ahead()
            while not self._ahead:
                if self._all_asked:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._free)
                self._read_ahead()
            batch, slot, ticket = self._ahead.popleft()
            ticket.wait()
            self._slots[id(batch)] = slot
            for request in batch.requests:
                start = request.offset - batch.start
                yield ReadBytes(request, slot.sub(start, request.size_bytes), batch)

    def release(self, read: ReadBytes) -> None:
        """Say that nobody needs some bytes any more."""
        batch = read.batch
        if not isinstance(batch, _Batch):
            raise TypeError("these bytes come from another reader")
        with self._changed:
            batch.unreleased -= 1
            if not batch.unreleased:
                self._free.append(self._slots.pop(id(batch)))
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for what is in flight and give the memory up; nobody holds any."""
        if self._ahead:
            self._engine.drain()
        self._ahead.clear()
        self._arena.close()

    def _read_ahead(self) -> None:
        while self._free:  # only this thread takes from it
            batch = next(self._batches, None)
            if batch is None:
                self._all_asked = True
                return
            slot = self._free.pop()
            target = slot.sub(0, batch.stop - batch.start)
            ticket = self._engine.submit_read(batch.requests[0].file, batch.start, target)
            self._ahead.append((batch, slot, ticket))


def read_blocks(
    engine: Engine, requests: Iterable[ReadRequest], *, block_bytes: int, block_count: int
) -> Iterator[tuple[ReadRequest, Span]]:
    """Yield each request with its bytes, in order; the memory is used again after the next one.

    Raises:
        TransferError: if a read failed, or a file ended early.
    """
    reader = BlockReader(engine, requests, block_bytes=block_bytes, block_count=block_count)
    try:
        for read in reader.read():
            yield read.request, read.span
            reader.release(read)
    finally:
        reader.close()


def _batches(requests: Iterable[ReadRequest], block_bytes: int) -> Iterator[_Batch]:
    """Put neighbours together as long as they fit one read."""
    pending: list[ReadRequest] = []
    for request in requests:
        if pending:
            last = pending[-1]
            is_next = request.file is last.file and request.offset == last.offset + last.size_bytes
            fits = request.offset + request.size_bytes - pending[0].offset <= block_bytes
            if not (is_next and fits):
                yield _Batch(pending)
                pending = []
        pending.append(request)
    if pending:
        yield _Batch(pending)
