"""Arrays that rest outside of any plan: in host memory, or in unnamed files of one directory.

For what there is before an engine is made, or beside it. Each array is freed with its last
reference; files are made a chunk at a time, their space is reserved, and they go when the last
array in them does.

Whatever `tiers.verify` says, what comes back from a file is checked against the checksums of what
was written: all of this is off the hot path.
"""

from __future__ import annotations

import abc
import errno
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import xxhash

from aio_ops import Engine, TransferFile
from offload.arrays import tensor_span
from offload.transfers import CorruptionError

CHUNK_BYTES = 64 << 20
"""Most bytes of one file, but an array that is larger gets a file of its own."""
FIRST_CHUNK_BYTES = 1 << 20
"""Bytes of the first file; each is as large as those before together, so little lies idle."""

_ALIGNMENT_BYTES = 4096
_BLOCK_NUMEL = 1 << 18
"""Elements under one checksum; a file is read and written in whole blocks."""


class SpooledArray(abc.ABC):
    """A flat array at rest."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel = numel
        self.dtype = dtype

    @abc.abstractmethod
    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return a private copy of elements `[start, stop)`."""

    @abc.abstractmethod
    def write(self, start: int, values: torch.Tensor) -> None:
        """Set elements from `start` on; `values` are flat, of the array's type."""


class _HostArray(SpooledArray):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values.numel(), values.dtype)
        self._values = values.clone()

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._values[start:stop].clone()

    def write(self, start: int, values: torch.Tensor) -> None:
        self._values[start : start + values.numel()] = values


class _Chunk:
    """One file, handed out from its start; its space comes back when all of it is unused."""

    def __init__(self, file: TransferFile) -> None:
        self.file = file
        self.end = 0
        self.user_count = 0


class _FileArray(SpooledArray):
    def __init__(
        self, spool: Spool, chunk: _Chunk, offset: int, values: torch.Tensor, name: str
    ) -> None:
        super().__init__(values.numel(), values.dtype)
        self._spool = spool
        self._file = chunk.file
        self._offset = offset
        self._name = name
        self._checksums = [0] * -(-self.numel // _BLOCK_NUMEL)
        self.write(0, values)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        stop = self.numel if stop is None else min(stop, self.numel)
        if start >= stop:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        low, high = self._blocks(start, stop)
        target = torch.empty(high - low, dtype=self.dtype, device="cpu")
        offset = self._offset + low * target.element_size()
        self._spool.engine.submit_read(self._file, offset, tensor_span(target)).wait()
        for index, found in self._digests(low, target):
            if found != self._checksums[index]:
                raise self._corruption(index, found)
        if (low, high) == (start, stop):
            return target
        return target[start - low : stop - low].clone()

    def write(self, start: int, values: torch.Tensor) -> None:
        stop = start + values.numel()
        if start == stop:
            return
        values = values.contiguous()
        low, high = self._blocks(start, stop)
        if (low, high) != (start, stop):
            whole = self.read(low, high)
            whole[start - low : stop - low] = values
            values = whole
        offset = self._offset + low * values.element_size()
        self._spool.engine.submit_write(self._file, offset, tensor_span(values)).wait()
        for index, found in self._digests(low, values):
            self._checksums[index] = found

    def _blocks(self, start: int, stop: int) -> tuple[int, int]:
        """Return the elements of the blocks that hold elements `[start, stop)`."""
        high = -(-stop // _BLOCK_NUMEL) * _BLOCK_NUMEL
        return start // _BLOCK_NUMEL * _BLOCK_NUMEL, min(high, self.numel)

    def _digests(self, low: int, values: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Yield index and checksum of each block of values that begin at a block."""
        for start in range(0, values.numel(), _BLOCK_NUMEL):
            block = tensor_span(values[start : start + _BLOCK_NUMEL])
            yield (low + start) // _BLOCK_NUMEL, xxhash.xxh3_64_intdigest(block.view())

    def _corruption(self, index: int, found: int) -> CorruptionError:
        start = index * _BLOCK_NUMEL
        stop = min(start + _BLOCK_NUMEL, self.numel)
        return CorruptionError(
            errno.EIO,
            f"{self._name}: elements {start} to {stop} of {self.numel} ({self.dtype}), at offset"
            f" {self._offset + start * self.dtype.itemsize} of {self._file.path}, were written with"
            f" the checksum {self._checksums[index]:016x} and read back with {found:016x}: bits"
            " changed on the drive or on the way; they were not used. Check the drive, and start"
            " again from the last checkpoint",
        )


class Spool:
    """Makes arrays at rest; keeps an engine open as long as one of them lives."""

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        directory: Path | None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.directory = directory
        self.chunk_bytes = min(_aligned(chunk_bytes), CHUNK_BYTES)
        self.resting_bytes = 0
        self._chunks: list[_Chunk] = []
        self._engine: Engine | None = None
        if directory is not None:
            self._engine = open_engine()
            weakref.finalize(self, self._engine.close)

    @property
    def engine(self) -> Engine:
        """The engine that moves what rests in files."""
        if self._engine is None:
            raise RuntimeError("this spool keeps its arrays in host memory")
        return self._engine

    def put(self, values: torch.Tensor, name: str = "an array at rest") -> SpooledArray:
        """Return a new array with the given flat values; `name` is for messages.

        Raises:
            OSError: if the directory has no room, or a write failed.
        """
        values = values.cpu().contiguous()
        size = values.numel() * values.element_size()
        array: SpooledArray
        if self.directory is None or not size:
            array = _HostArray(values)
            weakref.finalize(array, _forget, weakref.ref(self), None, size)
        else:
            chunk = self._chunk_for(size)
            offset, chunk.end = chunk.end, chunk.end + _aligned(size)
            chunk.user_count += 1
            array = _FileArray(self, chunk, offset, values, name)
            weakref.finalize(array, _forget, weakref.ref(self), chunk, size)
        self.resting_bytes += size
        return array

    def _chunk_for(self, size: int) -> _Chunk:
        for chunk in self._chunks:
            if chunk.file.size_bytes - chunk.end >= size:
                return chunk
        if self.directory is None:
            raise RuntimeError("this spool keeps its arrays in host memory")
        reserved = sum(chunk.file.size_bytes for chunk in self._chunks)
        wanted = min(self.chunk_bytes, max(reserved, FIRST_CHUNK_BYTES))
        file = self.engine.create_file(
            self.directory, max(wanted, _aligned(size)), any_alignment=True
        )
        self._chunks.append(_Chunk(file))
        return self._chunks[-1]

    def release(self, chunk: _Chunk | None, size: int) -> None:
        """Take back the space of an array that is gone."""
        self.resting_bytes -= size
        if chunk is None:
            return
        chunk.user_count -= 1
        if not chunk.user_count:
            self._chunks.remove(chunk)
            chunk.file.close()


def _forget(spool: weakref.ref[Spool], chunk: _Chunk | None, size: int) -> None:
    owner = spool()
    if owner is not None:
        owner.release(chunk, size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
