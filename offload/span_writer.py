"""Write a file of known size from pieces in any order, in large aligned blocks.

[Note: blocks] The file is a grid of blocks. What is given for a block is collected in memory, and a
block that is full goes to the drive in one direct write, while the next ones fill. Pieces that are
given in a few ascending streams so need as many blocks as there are streams, and one where two of
them meet. Should there be more, the oldest block that is not full is written as far as it is.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

from aio_ops import DataFile, Engine, HostArena, Span, Ticket
from estimators.layout import align_up

_PAGE_BYTES = 4096


@dataclass(slots=True)
class _Block:
    """One block that is being filled."""

    span: Span
    ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def filled_bytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def add(self, start: int, stop: int) -> None:
        """Note that bytes `[start, stop)` are filled."""
        if self.ranges and self.ranges[-1][1] == start:
            start = self.ranges.pop()[0]
        if self.ranges and self.ranges[0][0] == stop:
            stop = self.ranges.pop(0)[1]
        self.ranges.append((start, stop))


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

    def spans(self, offset: int, size_bytes: int) -> Iterator[Span]:
        """Yield memory for bytes of the file, part by part; fill each before asking for the next.

        Raises:
            TransferError: if a write failed.
        """
        while size_bytes:
            number, start = divmod(offset, self._block_bytes)
            block = self._block(number)
            part = min(size_bytes, self._block_bytes - start)
            yield block.span.sub(start, part)
            block.add(start, start + part)
            whole = min(self._block_bytes, self._file.exact_bytes - number * self._block_bytes)
            if block.filled_bytes + self._written.get(number, 0) == whole:
                self._send(number)
            offset, size_bytes = offset + part, size_bytes - part

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

    def _block(self, number: int) -> _Block:
        block = self._open.get(number)
        if block is None:
            block = self._open[number] = _Block(self._take())
        return block

    def _take(self) -> Span:
        if not self._free and not self._in_flight:
            self._send(next(iter(self._open)))
        if not self._free:
            self._reap()
        return self._free.pop()

    def _send(self, number: int) -> None:
        """Write a block as far as it is filled."""
        block = self._open.pop(number)
        base = number * self._block_bytes
        tickets = []
        for start, stop in block.ranges:
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
        tickets, span = self._in_flight.popleft()
        for ticket in tickets:
            ticket.wait()
        self._free.append(span)
