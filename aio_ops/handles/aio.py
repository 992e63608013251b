"""`aio_handle`: the ZeRO field's asynchronous file handle on our engines, with real errors."""

import os
import weakref
from types import TracebackType
from typing import Any, Self

from aio_ops.handles.core import HandleCore, HandleSettings
from aio_ops.handles.files import Place
from aio_ops.handles.locked import LOCKED
from aio_ops.handles.tensors import (
    HostBytes,
    array_over,
    copy_bytes,
    element_bytes,
    host_range,
    source_bytes,
    target_bytes,
)

_FIELD_ALIGNMENT_BYTES = 512


class SettingsView:
    """The getters of every handle: they say what it was made with."""

    def __init__(self, settings: HandleSettings) -> None:
        for name in ("block_size", "queue_depth", "intra_op_parallelism"):
            value = getattr(settings, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
        self._settings = settings

    def get_block_size(self) -> int:
        """Return the bytes that one request to the kernel moves."""
        return self._settings.block_size

    def get_queue_depth(self) -> int:
        """Return how many requests may be with the kernel at once."""
        return self._settings.queue_depth

    def get_single_submit(self) -> bool:
        """Return what was asked for; it has no effect here."""
        return self._settings.single_submit

    def get_overlap_events(self) -> bool:
        """Return what was asked for; here the queue is always kept full."""
        return self._settings.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return what was asked for; it is the least number of threads of a thread engine."""
        return self._settings.intra_op_parallelism

    def get_alignment(self) -> int:
        """Return what the field asks its users to round sizes to; nothing here needs it."""
        return self._settings.intra_op_parallelism * _FIELD_ALIGNMENT_BYTES


class LockedTensors:
    """The calls for tensors on locked pages; all handles share what they know."""

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor: Any = None, *, example_tenosr: Any = None
    ) -> Any:
        """Return a tensor of `num_elem` zeros on locked pages, of the example's library and type.

        Its memory is exactly that large, on huge pages where the kernel allows, and lives as long
        as any view of it. A forked child must not touch it. The last keyword is as the field
        spells it.
        """
        example = example_tenosr if example_tensor is None else example_tensor
        if num_elem < 1:
            raise ValueError(f"a locked tensor needs at least one element, got {num_elem}")
        return array_over(LOCKED.allocate(num_elem * element_bytes(example)), example)

    def free_cpu_locked_tensor(self, tensor: Any) -> bool:
        """Take the lock of a locked tensor away; False when `tensor` is not the start of one.

        The memory goes with the last view, so no view is ever left dangling.
        """
        place = host_range(tensor)
        return place is not None and LOCKED.free(place[0])

    def is_pinned(self, buffer: Any) -> bool:
        """Return whether all of a tensor is in locked memory, its framework's own included."""
        place = host_range(buffer)
        if place is not None and LOCKED.covers(*place):
            return True
        own = getattr(buffer, "is_pinned", None)
        return own is not None and bool(own())


class AioHandle(SettingsView, LockedTensors):
    """Reads files into tensors and writes tensors to files, synchronously or not.

    Any size, offset, address and layout works, and what fails raises. A file keeps its length when
    a shorter tensor is written into it. The tensor of a pending operation must not be changed
    (write) or looked at (read) before `wait`; it may be dropped.
    """

    def __init__(
        self,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool | None = None,
        overlap_events: bool | None = None,
        intra_op_parallelism: int | None = None,
        *,
        engine: str = "auto",
    ) -> None:
        super().__init__(
            HandleSettings(
                1 << 20 if block_size is None else block_size,
                128 if queue_depth is None else queue_depth,
                bool(single_submit),
                bool(overlap_events),
                1 if intra_op_parallelism is None else intra_op_parallelism,
            )
        )
        self._core = HandleCore(self._settings, engine)
        self._finish_at_end = weakref.finalize(self, HandleCore.end, self._core)

    @property
    def engine_name(self) -> str:
        """The engine that moves the bytes."""
        return self._core.engine.name

    def read(self, buffer: Any, filename: Place, validate: bool, file_offset: int = 0) -> int:
        """Fill a tensor with all of a file from `file_offset` on, which must be just as long."""
        return self._core.run_alone(
            self._core.read_job(buffer, filename, file_offset, validate=validate, whole=True)
        )

    def write(self, buffer: Any, filename: Place, validate: bool, file_offset: int = 0) -> int:
        """Write a tensor into a file at `file_offset`; the rest of the file stays."""
        return self._core.run_alone(
            self._core.write_job(buffer, filename, file_offset, validate=validate)
        )

    def pread(
        self,
        buffer: Any,
        filename: Place,
        validate: bool,
        asynchronous: bool | None = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Fill a tensor from a file; the field calls the fourth argument `async`.

        Synchronous: wait for all that is pending, and return how many operations are over.
        Asynchronous: return 0 at once.
        """
        later = _asynchronous(asynchronous, keywords)
        job = self._core.read_job(buffer, filename, file_offset, validate=validate, later=later)
        return self._core.run(job, later=later)

    def pwrite(
        self,
        buffer: Any,
        filename: Place,
        validate: bool,
        asynchronous: bool | None = None,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Write a tensor to a file; see `pread` for the arguments and what is returned."""
        later = _asynchronous(asynchronous, keywords)
        job = self._core.write_job(buffer, filename, file_offset, validate=validate, later=later)
        return self._core.run(job, later=later)

    def sync_pread(self, buffer: Any, filename: Place, file_offset: int = 0) -> int:
        """Fill a tensor; wait for all that is pending and return how many operations are over."""
        return self._core.run(self._core.read_job(buffer, filename, file_offset), later=False)

    def sync_pwrite(self, buffer: Any, filename: Place, file_offset: int = 0) -> int:
        """Write a tensor; wait for all that is pending and return how many operations are over."""
        return self._core.run(self._core.write_job(buffer, filename, file_offset), later=False)

    def async_pread(self, buffer: Any, filename: Place, file_offset: int = 0) -> int:
        """Start to fill a tensor from a file, or from a descriptor, and return 0."""
        job = self._core.read_job(buffer, filename, file_offset, later=True)
        return self._core.run(job, later=True)

    def async_pwrite(
        self,
        buffer: Any,
        filename: Place | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Start to write a tensor to a file, or to a descriptor of the caller's, and return 0.

        A descriptor may be closed as soon as the call returns; the handle never closes it.
        """
        place = filename if fd is None else fd
        if place is None:
            raise TypeError("async_pwrite needs a file name or a descriptor")
        job = self._core.write_job(buffer, place, file_offset, later=True)
        return self._core.run(job, later=True)

    def wait(self) -> int:
        """Wait for all that is pending and return how many operations that was, 0 for none."""
        return self._core.drain([])

    def close(self) -> None:
        """Finish what is pending, raising what failed, and give the engine up."""
        try:
            self._core.drain([])
        finally:
            self._finish_at_end.detach()
            self._core.closed = True
            self._core.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def aio_read(
    buffer: Any,
    filename: Place,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Fill a tensor with a whole file, which must be just as long, and return 0."""
    with AioHandle(block_size, queue_depth, single_submit, overlap_events) as handle:
        return handle.read(buffer, filename, validate)


def aio_write(
    buffer: Any,
    filename: Place,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """Make a tensor the whole contents of a file, and return 0; a longer file is cut."""
    with AioHandle(block_size, queue_depth, single_submit, overlap_events) as handle:
        handle.write(buffer, filename, validate)
    size_bytes = source_bytes(buffer).size_bytes
    if os.stat(filename).st_size > size_bytes:  # noqa: PTH116  a descriptor is welcome, too
        os.truncate(filename, size_bytes)
    return 0


def deepspeed_memcpy(dest: Any, src: Any) -> int:
    """Copy one host tensor to another of the same number of bytes, and return 0."""
    target, source = target_bytes(dest), source_bytes(src)
    if not isinstance(target.memory, HostBytes) or not isinstance(source, HostBytes):
        raise ValueError("both tensors must be in host memory")
    if target.memory.size_bytes != source.size_bytes:
        raise ValueError(
            f"dest has {target.memory.size_bytes} bytes and src {source.size_bytes}: they must be "
            "the same"
        )
    copy_bytes(source.span, target.memory.span)
    if target.settle is not None:
        target.settle()
    return 0


def _asynchronous(given: bool | None, keywords: dict[str, bool]) -> bool:
    """Return the argument that the field calls `async`, which Python reserves."""
    later = keywords.pop("async", given)
    if keywords:
        raise TypeError(f"unexpected keyword argument {next(iter(keywords))!r}")
    if later is None:
        raise TypeError("say with the fourth argument whether to be asynchronous: True or False")
    return bool(later)
