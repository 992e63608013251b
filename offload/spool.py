"""Arrays that rest outside of any plan: in host memory, or in unnamed files of one directory.

For what there is before an engine is made, or beside it. Each array is freed with its last
reference; files are made a chunk at a time, their space is reserved, and they go when the last
array in them does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from aio_ops import Engine, TransferFile
from offload.arrays import tensor_span

CHUNK_BYTES = 64 << 20
"""Most bytes of one file, but an array that is larger gets a file of its own."""

_ALIGNMENT_BYTES = 4096


class SpooledArray:
    """A flat array at rest."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.numel = numel
        self.dtype = dtype

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return a private copy of elements `[start, stop)`."""
        raise NotImplementedError

    def write(self, start: int, values: torch.Tensor) -> None:
        """Set elements from `start` on; `values` are flat, of the array's type."""
        raise NotImplementedError


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
    def __init__(self, spool: Spool, chunk: _Chunk, offset: int, values: torch.Tensor) -> None:
        super().__init__(values.numel(), values.dtype)
        self._spool = spool
        self._file = chunk.file
        self._offset = offset
        self.write(0, values)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        stop = self.numel if stop is None else stop
        target = torch.empty(stop - start, dtype=self.dtype)
        if target.numel():
            offset = self._offset + start * target.element_size()
            self._spool.engine.submit_read(self._file, offset, tensor_span(target)).wait()
        return target

    def write(self, start: int, values: torch.Tensor) -> None:
        if values.numel():
            values = values.contiguous()
            offset = self._offset + start * values.element_size()
            self._spool.engine.submit_write(self._file, offset, tensor_span(values)).wait()


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

    def put(self, values: torch.Tensor) -> SpooledArray:
        """Return a new array with the given flat values.

        Raises:
            OSError: if the directory has no room, or a write failed.
        """
        values = values.contiguous()
        size = values.numel() * values.element_size()
        array: SpooledArray
        if self.directory is None or not size:
            array = _HostArray(values)
            weakref.finalize(array, _forget, weakref.ref(self), None, size)
        else:
            chunk = self._chunk_for(size)
            offset, chunk.end = chunk.end, chunk.end + _aligned(size)
            chunk.user_count += 1
            array = _FileArray(self, chunk, offset, values)
            weakref.finalize(array, _forget, weakref.ref(self), chunk, size)
        self.resting_bytes += size
        return array

    def _chunk_for(self, size: int) -> _Chunk:
        for chunk in self._chunks:
            if chunk.file.size_bytes - chunk.end >= size:
                return chunk
        if self.directory is None:
            raise RuntimeError("this spool keeps its arrays in host memory")
        file = self.engine.create_file(
            self.directory, max(self.chunk_bytes, _aligned(size)), any_alignment=True
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
