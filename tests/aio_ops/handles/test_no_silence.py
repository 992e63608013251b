"""What the field's handle aborts on, prints, or reports as done although it failed."""

import errno
import fcntl
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aio_ops import TransferError
from aio_ops.handles import AioHandle, aio_handle
from tests.aio_ops.disks import free_bytes, mounted, mounted_ext4
from tests.aio_ops.handles.support import (
    BYTES,
    MIB,
    bytes_of,
    file_of,
    in_child,
    locked,
    moved_at_least,
    unlocked,
)
from tests.aio_ops.support import pattern
from tests.aio_ops.test_faults import largest_file


@pytest.mark.parametrize("later", [False, True])
def test_a_write_past_the_limit_on_file_sizes(
    handle: AioHandle, scratch: Path, later: bool
) -> None:
    source = locked(handle, bytes(4 * MIB))
    path = scratch / "limited"
    write = handle.async_pwrite if later else handle.sync_pwrite
    with largest_file(MIB), pytest.raises(OSError, match="raise the limit on file sizes") as caught:
        write(source, str(path))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert path.stat().st_size == 0
    returned = handle.wait()
    assert returned == 0


def test_a_read_past_the_end(handle: AioHandle, scratch: Path) -> None:
    path, data = file_of(scratch, 1, MIB)
    target = locked(handle, b"\x07" * (4 * MIB))
    calls: list[Callable[[], int]] = [
        lambda: handle.sync_pread(target, str(path)),
        lambda: handle.async_pread(target, str(path)),
        lambda: handle.read(target, str(path), False),
        lambda: handle.pread(target, str(path), False, False),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="it has 1048576 bytes; read into a tensor of at most"):
            call()
    assert set(bytes_of(target)) == {7}
    returned = handle.sync_pread(target[:MIB], str(path))
    assert returned == 1
    with pytest.raises(ValueError, match="of at most 4096 bytes"):
        handle.sync_pread(target[:8192], str(path), MIB - 4096)
    assert bytes_of(target[:MIB]) == data


def test_a_missing_file_and_a_missing_directory(handle: AioHandle, scratch: Path) -> None:
    tensor = locked(handle, bytes(4096))
    for call in (handle.sync_pread, handle.async_pread):
        with pytest.raises(FileNotFoundError, match="nope"):
            call(tensor, str(scratch / "nope"))
    for call in (handle.sync_pwrite, handle.async_pwrite):
        with pytest.raises(FileNotFoundError, match="such"):
            call(tensor, str(scratch / "no" / "such" / "file"))
    with pytest.raises(IsADirectoryError):
        handle.sync_pread(tensor, str(scratch))
    with pytest.raises(IsADirectoryError):
        handle.sync_pwrite(tensor, str(scratch))
    returned = handle.wait()
    assert returned == 0


@pytest.mark.parametrize("size_bytes", [1, 1000, 5096, 1000003])
@pytest.mark.parametrize("threads", [1, 3, 4])
def test_sizes_that_are_no_multiple_of_anything(
    scratch: Path, size_bytes: int, threads: int
) -> None:
    handle = aio_handle(MIB, 32, False, True, threads)
    data = pattern(size_bytes, size_bytes)
    path = scratch / "odd"
    with moved_at_least(written=size_bytes // 4096 * 4096):
        returned = handle.sync_pwrite(locked(handle, data), str(path))
        assert returned == 1
    assert path.read_bytes() == data
    target = locked(handle, bytes(size_bytes))
    returned = handle.sync_pread(target, str(path))
    assert returned == 1
    assert bytes_of(target) == data


@pytest.mark.parametrize("size_bytes", [1024, 4096, MIB])
def test_a_size_that_the_threads_cannot_share_equally(scratch: Path, size_bytes: int) -> None:
    handle = aio_handle(MIB, 32, False, True, 3)
    data = pattern(2, size_bytes)
    returned = handle.sync_pwrite(locked(handle, data), str(scratch / "new"))
    assert returned == 1
    assert (scratch / "new").read_bytes() == data


@pytest.mark.parametrize("offset", [1, 100, 512, 4095])
def test_offsets_and_addresses_that_are_not_aligned(
    handle: AioHandle, scratch: Path, offset: int
) -> None:
    path, data = file_of(scratch, 3, 2 * MIB)
    for size_bytes in (4096, MIB):
        room = locked(handle, b"\x55" * (size_bytes + 200))
        target = room[100 : 100 + size_bytes]
        returned = handle.sync_pread(target, str(path), offset)
        assert returned == 1
        assert bytes_of(target) == data[offset : offset + size_bytes]
        assert set(bytes_of(room[:100]) + bytes_of(room[-100:])) == {0x55}
        fresh = pattern(offset, size_bytes)
        target.copy_(unlocked(fresh))
        returned = handle.sync_pwrite(target, str(path), offset)
        assert returned == 1
        data = data[:offset] + fresh + data[offset + size_bytes :]
        assert path.read_bytes() == data


def test_waiting_for_nothing(handle: AioHandle) -> None:
    returned = handle.wait()
    assert returned == 0
    returned = handle.wait()
    assert returned == 0


def test_a_descriptor_that_cannot_be_written_to(handle: AioHandle, scratch: Path) -> None:
    path, data = file_of(scratch, 4, MIB)
    source = locked(handle, bytes(MIB))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with pytest.raises(OSError, match="cannot be written to: open it with O_WRONLY or O_RDWR"):
        handle.async_pwrite(source, descriptor)
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        handle.async_pwrite(source, descriptor)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    with pytest.raises(ValueError, match="opened with O_APPEND"):
        handle.async_pwrite(source, descriptor)
    os.close(descriptor)
    descriptor = os.open(path, os.O_WRONLY)
    with pytest.raises(OSError, match="cannot be read from"):
        handle.async_pread(source, descriptor)
    os.close(descriptor)
    returned = handle.wait()
    assert returned == 0
    assert path.read_bytes() == data


def test_a_depth_that_no_kernel_queue_has(scratch: Path) -> None:
    handle = aio_handle(MIB, 65536, False, True, 1)
    data = pattern(5, MIB)
    returned = handle.sync_pwrite(locked(handle, data), str(scratch / "deep"))
    assert returned == 1
    assert (scratch / "deep").read_bytes() == data


def test_many_handles(scratch: Path) -> None:
    handles = [aio_handle(MIB, 1024, False, True, 1) for _ in range(70)]
    data = pattern(6, MIB)
    assert handles[-1].sync_pwrite(locked(handles[0], data), str(scratch / "many")) == 1
    assert (scratch / "many").read_bytes() == data
    for handle in handles:
        handle.close()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk(handle: AioHandle, tmp_path: Path, kind: str) -> None:
    disk = (
        mounted(tmp_path / "tmpfs", "tmpfs", "size=2m")
        if kind == "tmpfs"
        else mounted_ext4(tmp_path, 8 * MIB)
    )
    with disk as directory:
        before = free_bytes(directory)
        for write in (handle.sync_pwrite, handle.async_pwrite):
            with pytest.raises(OSError, match="free some space, or write elsewhere") as caught:
                write(locked(handle, bytes(16 * MIB)), str(directory / "large"))
            assert caught.value.errno == errno.ENOSPC
        returned = handle.wait()
        assert returned == 0
        assert free_bytes(directory) >= before - 64 * 1024  # what did not fit takes no space
        data = pattern(7, MIB)
        handle.sync_pwrite(unlocked(data), str(directory / "small"))
        assert (directory / "small").read_bytes() == data


def test_a_file_system_without_direct_io(handle: AioHandle, tmp_path: Path) -> None:
    with mounted(tmp_path / "ramfs", "ramfs") as directory:
        path = directory / "file"
        with pytest.raises(OSError, match="Invalid argument"):
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        data = pattern(11, MIB + 7)
        returned = handle.sync_pwrite(unlocked(data), str(path))
        assert returned == 1
        assert path.read_bytes() == data
        target = locked(handle, bytes(len(data)))
        returned = handle.sync_pread(target, str(path))
        assert returned == 1
        assert bytes_of(target) == data


def test_no_descriptor_is_left_open_by_success_or_failure(handle: AioHandle, scratch: Path) -> None:
    path, data = file_of(scratch, 12, 3 * 4096)
    tensor = locked(handle, data)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    sealed = sealed_file(MIB)
    kept: list[BaseException] = []  # errors keep their frames alive
    for offset in range(0, 40, 10):
        handle.async_pread(tensor[:4096], path, offset)
        handle.pwrite(tensor[:4096], path, True, False, offset)
        for call, place, at in (
            (handle.sync_pread, path, 10000),
            (handle.sync_pread, scratch / "nope", 0),
            (handle.sync_pread, scratch, 0),
            (handle.sync_pwrite, sealed, 0),
            (handle.sync_pwrite, sealed, 4096),
            (handle.sync_pwrite, "/dev/null", 0),
        ):
            with pytest.raises((OSError, ValueError)) as caught:
                call(tensor, place, at)
            kept.append(caught.value)
        with largest_file(4096), pytest.raises(OSError, match="ulimit -f") as caught:
            handle.async_pwrite(tensor, scratch / "large")
        kept.append(caught.value)
    os.close(sealed)
    assert len(kept) == 28
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_engines_that_are_refused_are_gone_without_and_named() -> None:
    def ask() -> object:
        free = os.dup(1)  # the lowest number that is free
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
        said: list[str] = []
        log = logging.getLogger("aio_ops.handles.core")
        log.addFilter(lambda record: said.append(record.getMessage()) is None)
        names = [aio_handle().engine_name for _ in range(2)]
        return names, said

    said = in_child(ask)
    assert said.startswith("(['threads', 'threads'], ['aio_handle goes without the engine io_uring")
    assert said.count("aio_handle goes without the engine") == 2  # once each
    assert said.count("raise `ulimit -n`") == 2


def sealed_file(size_bytes: int) -> int:
    """Return a descriptor to whose file the kernel refuses every write."""
    descriptor = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    return descriptor


def test_what_the_kernel_answers_later_is_raised_by_wait(handle: AioHandle, scratch: Path) -> None:
    data = pattern(8, MIB)
    source = locked(handle, data)
    first, second = sealed_file(MIB), sealed_file(MIB)
    returned = handle.async_pwrite(source, first)
    assert returned == 0
    returned = handle.async_pwrite(source, str(scratch / "good"))
    assert returned == 0
    returned = handle.async_pwrite(unlocked(data), second)
    assert returned == 0
    with pytest.raises(TransferError, match=r"at offset 0 of .*Operation not permitted") as caught:
        handle.wait()
    assert len(caught.value.__notes__) == 1
    assert "another operation of the same wait failed: " in caught.value.__notes__[0]
    returned = handle.wait()
    assert returned == 0  # every operation is told of once
    assert (scratch / "good").read_bytes() == data  # and none is left half done
    with pytest.raises(TransferError):
        handle.sync_pwrite(source, first)
    for descriptor in (first, second):
        os.close(descriptor)


def test_strided_tensors_are_filled_and_written_in_their_order(
    handle: AioHandle, scratch: Path
) -> None:
    path, _ = file_of(scratch, 9, 4 * 64 * 48)
    wanted = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int32).reshape(64, 48)
    base = handle.new_cpu_locked_tensor(64 * 96, torch.empty(0, dtype=torch.int32))
    base.fill_(-1)
    view = base.reshape(64, 96)[:, ::2]
    assert not view.is_contiguous()
    for read in (handle.sync_pread, handle.async_pread):
        view.zero_()
        read(view, str(path))
        handle.wait()
        assert torch.equal(view, wanted)
        assert bool((base.reshape(64, 96)[:, 1::2] == -1).all())
    handle.sync_pwrite(view.t(), str(scratch / "turned"))
    turned = bytearray((scratch / "turned").read_bytes())
    assert torch.equal(torch.frombuffer(turned, dtype=torch.int32).reshape(48, 64), wanted.t())
    with pytest.raises(ValueError, match="several of its elements are one in memory"):
        handle.sync_pread(torch.zeros(1).expand(4), str(path))


@pytest.mark.parametrize("kind", ["locked", "unlocked"])
def test_validation_raises_where_file_and_tensor_differ(
    handle: AioHandle, scratch: Path, kind: str
) -> None:
    path, data = file_of(scratch, 10, 3 * MIB)
    target = locked(handle, bytes(len(data))) if kind == "locked" else unlocked(bytes(len(data)))
    returned = handle.pread(target, str(path), True, True)
    assert returned == 0
    returned = handle.wait()
    assert returned == 1
    returned = handle.pwrite(target, str(path), True, True)
    assert returned == 0
    with path.open("r+b") as other:  # another writer, before the comparison
        handle._core.engine.drain()
        other.seek(2 * MIB + 17)
        other.write(bytes([data[2 * MIB + 17] ^ 1]))
    with pytest.raises(OSError, match=f"differ from byte {2 * MIB + 17} of the transfer on"):
        handle.wait()
    returned = handle.wait()
    assert returned == 0
    assert bytes_of(target) == data


def test_memory_that_may_not_be_locked_is_an_error_with_the_remedy() -> None:
    def ask() -> object:
        handle = aio_handle()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, MIB))
        os.setresuid(65534, 65534, 65534)  # who may lock without limit may do so still
        tensor = handle.new_cpu_locked_tensor(MIB // 2, BYTES)
        try:
            handle.new_cpu_locked_tensor(4 * MIB, BYTES)
        except OSError as error:
            return error.errno, str(error), handle.is_pinned(tensor)
        return "no error"

    if os.getuid() != 0:
        pytest.skip("only root can become a user without the right to lock memory")
    said = in_child(ask)
    assert "cannot lock 4194304 bytes of host memory" in said
    assert f"this process may lock {MIB} bytes and has locked {MIB // 2}" in said
    assert "ulimit -l" in said
    assert said.startswith(f"({errno.ENOMEM},")
    assert said.endswith("True)")
