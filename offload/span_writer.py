"""Write a file of known size from pieces in any order, in large aligned blocks.

[Note: blocks] The file is a grid of blocks. What is given for a block is collected in memory, and a
block that is full goes to the drive in one direct write, while the next ones fill. Several threads
may fill parts of one block, or of several; nobody holds a block while waiting for another. Pieces
that are given in a few ascending streams need as many blocks as there are streams, one where two of
them meet, and one a thread. Should there be more, the oldest block that is not full is written as
far as it is.
"""

from __future__ import annotations

import collections
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from aio_ops import DataFile, Engine, HostArena, Span, Ticket
from estimators.layout import align_up

_PAGE_BYTES = 4096


@dataclass(slots=True)
class _Block:
    """One block that is being filled."""

    span: Span
    parts: list[tuple[int, int]] = field(default_factory=list)
    users: int = 0
    """Threads that are filling a part of it."""

    @property
    def filled_bytes(self) -> int:
        return sum(stop - start for start, stop in self.parts)

    def ranges(self) -> list[tuple[int, int]]:
        """Return what is filled, in order, neighbours joined."""
        found: list[tuple[int, int]] = []
        for start, stop in sorted(self.parts):
            if found and found[-1][1] == start:
                start = found.pop()[0]  # noqa: PLW2901
            found.append((start, stop))
        return found


class SpanWriter:
    """Fills one file; the memory is `block_count` blocks of `block_bytes`."""

    def __init__(
        self, engine: Engine, file: DataFile, *, block_bytes: int, block_count: int
    ) -> None:
        self._engine = engine
        self._file = file
        self._block_bytes = align_up(block_bytes, max(file.alignment_bytes, _PAGE_BYTES))
        self._arena = HostArena(self._block_bytes * block_count)
        self._free = [self._arena.carve(self._block_bytes) for _ in range(block_count)]
        self._open: dict[int, _Block] = {}
        self._written: dict[int, int] = {}
        """Bytes of blocks that went to the drive before they were full."""
        self._in_flight: collections.deque[tuple[list[Ticket], Span]] = collections.deque()
        self._reaping = 0
        """Threads that wait for a block in flight."""
        self._changed = threading.Condition()  # guards everything above
        self._error: BaseException | None = None

    def spans(self, offset: int, size_bytes: int) -> Iterator[Span]:
        """Yield memory for bytes of the file, part by part; fill each before asking for the next.

        Raises:
            TransferError: if a write failed.
        """
        while size_bytes:
            number, start = divmod(offset, self._block_bytes)
            part = min(size_bytes, self._block_bytes - start)
            block = self._borrow(number)
            yield block.span.sub(start, part)
            self._filled(number, block, (start, start + part))
            offset, size_bytes = offset + part, size_bytes - part

    def fail(self, error: BaseException) -> None:
        """Let all threads that fill blocks give up: a part will never be filled."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def write(self, offset: int, data: bytes) -> None:
        """Give bytes of the file.

        Raises:
            TransferError: if a write failed.
        """
        taken = 0
        for span in self.spans(offset, len(data)):
            span.view()[:] = data[taken : taken + span.size_bytes]
            taken += span.size_bytes

    def flush(self) -> None:
        """Write what was given and wait for it.

        Raises:
            TransferError: if a write failed.
        """
        with self._changed:
            for number in list(self._open):
                self._send(number)
            while self._in_flight:
                self._reap()

    def close(self) -> None:
        """Wait for what is in flight, whatever came of it, and give the memory up."""
        self._engine.drain()
        self._in_flight.clear()
        self._open.clear()
        self._free.clear()
        self._arena.close()

    def _borrow(self, number: int) -> _Block:
        """Return a block to fill a part of, once there is memory for it."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                block = self._open.get(number)
                if block is None and self._free:
                    block = self._open[number] = _Block(self._free.pop())
                if block is not None:
                    block.users += 1
                    return block
                if self._in_flight:
                    self._reap()
                elif self._reaping or any(each.users for each in self._open.values()):
                    self._changed.wait()
                else:
                    self._send(next(iter(self._open)))

    def _filled(self, number: int, block: _Block, part: tuple[int, int]) -> None:
        with self._changed:
            block.users -= 1
            block.parts.append(part)
            whole = min(self._block_bytes, self._file.exact_bytes - number * self._block_bytes)
            if block.filled_bytes + self._written.get(number, 0) == whole:
                self._send(number)
            self._changed.notify_all()

    def _send(self, number: int) -> None:
        """Write a block as far as it is filled; nobody is filling it, and the lock is held."""
        block = self._open.pop(number)
        base = number * self._block_bytes
        tickets = []
        for start, stop in block.ranges():
            if base + stop == self._file.exact_bytes:
                end = self._file.size_bytes - base  # up to the alignment; cut off at the end
                ctypes.memset(block.span.address + stop, 0, end - stop)
                stop = end  # noqa: PLW2901
            tickets.append(
                self._engine.submit_write(
                    self._file, base + start, block.span.sub(start, stop - start)
                )
            )
        self._written[number] = self._written.get(number, 0) + block.filled_bytes
        self._in_flight.append((tickets, block.span))

    def _reap(self) -> None:
        """Wait for the oldest block in flight; the lock is held, but not meanwhile."""
        tickets, span = self._in_flight.popleft()
        self._reaping += 1
        self._changed.release()
        try:
            for ticket in tickets:
                ticket.wait()
        finally:
            self._changed.acquire()
            self._reaping -= 1
            self._free.append(span)
            self._changed.notify_all()
