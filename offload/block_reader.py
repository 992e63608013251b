"""Read ranges of files in a known order, several reads ahead, in few large reads."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests that are neighbours in one file: one read."""

    requests: list[ReadRequest]

    @property
    def start(self) -> int:
        """Where the read begins: at a page, so that it can be direct."""
        return self.requests[0].offset // _PAGE_BYTES * _PAGE_BYTES

    @property
    def stop(self) -> int:
        """Where it ends: at a page, or with the file."""
        last = self.requests[-1]
        return min(align_up(last.offset + last.size_bytes, _PAGE_BYTES), last.file.size_bytes)


def read_blocks(
    engine: Engine, requests: Iterable[ReadRequest], *, block_bytes: int, block_count: int
) -> Iterator[tuple[ReadRequest, Span]]:
    """Yield each request with its bytes, in order; the memory is used again after the next one.

    Args:
        engine: moves the bytes.
        requests: in the order in which they are wanted; each at most `block_bytes`.
        block_bytes: most bytes of one read.
        block_count: reads in flight, one of which is being used.

    Raises:
        TransferError: if a read failed, or a file ended early.
    """
    slot_bytes = align_up(block_bytes, _PAGE_BYTES) + 2 * _PAGE_BYTES
    arena = HostArena(slot_bytes * block_count)
    free = [arena.carve(slot_bytes) for _ in range(block_count)]
    batches = _batches(requests, block_bytes)
    ahead: collections.deque[tuple[_Batch, Span, Ticket]] = collections.deque()
    try:
        while True:
            while free:
                batch = next(batches, None)
                if batch is None:
                    break
                span = free.pop()
                target = span.sub(0, batch.stop - batch.start)
                ticket = engine.submit_read(batch.requests[0].file, batch.start, target)
                ahead.append((batch, span, ticket))
            if not ahead:
                return
            batch, span, ticket = ahead.popleft()
            ticket.wait()
            for request in batch.requests:
                yield request, span.sub(request.offset - batch.start, request.size_bytes)
            free.append(span)
    finally:
        if ahead:
            engine.drain()
        arena.close()


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
