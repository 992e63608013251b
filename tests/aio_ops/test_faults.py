"""Disks that are full, read-only, missing or cut short, for real: every failure is reported."""

import contextlib
import errno
import gc
import logging
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aio_ops
from aio_ops import Engine, HostArena, Span, SwapFile, TransferError, python_engine
from aio_ops.python_engine import Block, move_block
from aio_ops.swapfile import Descriptor
from aio_ops.transfer import Outcome
from tests.aio_ops.disks import free_bytes, mounted, mounted_ext4, storage_bytes
from tests.aio_ops.support import BLOCK_BYTES, SECTOR, contents, filled, make_engine, pattern, put


def failure(ticket: aio_ops.Ticket) -> TransferError:
    """Wait for a transfer that must fail, twice."""
    with pytest.raises(TransferError) as first:
        ticket.wait()
    with pytest.raises(TransferError) as second:
        ticket.wait()
    assert str(second.value) == str(first.value)
    assert ticket.done()
    return first.value


def check(
    error: TransferError,
    file: aio_ops.TransferFile,
    *,
    number: int,
    operation: str,
    offset: int,
    wanted_bytes: int,
    moved_bytes: int,
) -> None:
    """Every part is an attribute, in the message, and survives a pickle."""
    for seen in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(seen, OSError)
        assert seen.errno == number
        assert seen.operation == operation
        assert seen.path == file.path
        assert seen.offset == offset
        assert seen.wanted_bytes == wanted_bytes
        assert seen.moved_bytes == moved_bytes
        assert (
            f"{operation} of {wanted_bytes} bytes at offset {offset} of {file.path} moved "
            f"{moved_bytes} bytes: {os.strerror(number)}"
        ) in str(seen)


def unreserved_file(directory: Path, size_bytes: int, flags: int = os.O_RDWR) -> SwapFile:
    """Return a buffered file without space: the disk may fill up under it."""
    descriptor = Descriptor(os.open(directory, os.O_TMPFILE | flags, 0o600))
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor.number, size_bytes)
    path = directory / "<unreserved file>"
    return SwapFile(descriptor, path, size_bytes, alignment_bytes=SECTOR, direct=False)


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "tmpfs":
        with mounted(tmp_path / "tmpfs", "tmpfs", "size=1m") as directory:
            yield directory
    else:
        with mounted_ext4(tmp_path, 4 << 20) as directory:
            yield directory


# Creating a file.


def test_a_file_that_does_not_fit_is_refused_at_create(
    real_engine: Engine, small_disk: Path
) -> None:
    before = free_bytes(small_disk)
    listing = sorted(small_disk.iterdir())
    with pytest.raises(OSError, match=f"cannot reserve 8388608 bytes .* in {small_disk}") as caught:
        real_engine.create_file(small_disk, 8 << 20)
    assert caught.value.errno == errno.ENOSPC
    assert f"had {before} bytes free" in str(caught.value)
    assert free_bytes(small_disk) == before  # also while the error and its frames are alive
    assert sorted(small_disk.iterdir()) == listing
    real_engine.create_file(small_disk, before // 2 // SECTOR * SECTOR).close()


def test_reserved_space_cannot_be_taken_by_others(
    real_engine: Engine, small_disk: Path, arena: HostArena
) -> None:
    data = pattern(1, 128 * SECTOR)
    file = real_engine.create_file(small_disk, len(data))
    with (
        (small_disk / "other").open("wb", buffering=0) as other,
        pytest.raises(OSError, match="No space left"),
    ):
        while other.write(bytes(SECTOR)):
            pass
    real_engine.submit_write(file, 0, filled(arena, data)).wait()
    assert contents(file, 0, len(data)) == data
    file.close()
    assert free_bytes(small_disk) >= len(data)  # and closing gives it back


def test_the_limit_on_file_sizes_is_named(scratch: Path) -> None:
    with largest_file(1 << 20), pytest.raises(OSError, match=r"raise .* \(`ulimit -f`\)") as caught:
        SwapFile.create(scratch, 2 << 20)
    assert caught.value.errno == errno.EFBIG


def test_a_missing_directory_is_named(real_engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "missing")):
        real_engine.create_file(tmp_path / "missing", SECTOR)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
        real_engine.create_file(tmp_path / "file", SECTOR)


def test_a_read_only_directory_is_named(real_engine: Engine, tmp_path: Path) -> None:
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(PermissionError, match=str(tmp_path / "locked")):
            real_engine.create_file(tmp_path / "locked", SECTOR)
        return
    with mounted(tmp_path / "locked", "tmpfs", "ro") as directory:  # root may write to any other
        with pytest.raises(OSError, match=str(directory)) as caught:
            real_engine.create_file(directory, SECTOR)
        assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize("size_bytes", [0, -1, 1 << 63])
def test_a_senseless_size_is_refused(tmp_path: Path, size_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"cannot have {size_bytes} bytes"):
        SwapFile.create(tmp_path, size_bytes)


def test_a_killed_process_leaves_nothing(small_disk: Path) -> None:
    before = free_bytes(small_disk)
    code = """
import os, signal, sys
from pathlib import Path
import aio_ops
file = aio_ops.SwapFile.create(Path(sys.argv[1]), 1 << 18)
print(os.fstat(file.fileno()).st_blocks, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(aio_ops.__file__).parent.parent
    result = subprocess.run(
        [sys.executable, "-c", code, str(small_disk)],
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert int(result.stdout) * 512 >= 1 << 18  # it did hold the space
    assert [entry.name for entry in small_disk.iterdir() if entry.name != "lost+found"] == []
    assert free_bytes(small_disk) == before


def test_without_direct_io_the_file_is_buffered_with_one_warning(
    real_engine: Engine, tmp_path: Path, arena: HostArena
) -> None:
    with mounted(tmp_path / "ramfs", "ramfs") as directory:
        with pytest.warns(RuntimeWarning, match=f"{directory} takes no direct I/O") as warned:
            file = real_engine.create_file(directory, 5 * SECTOR)
        assert len(warned) == 1
        assert not file.direct
        data = pattern(2, 2 * BLOCK_BYTES + 77)  # and nothing needs to be aligned
        span = filled(arena, b"x" + data).sub(1, len(data))
        real_engine.submit_write(file, 3, span).wait()
        assert os.pread(file.fileno(), len(data) + 6, 0) == bytes(3) + data + bytes(3)
        target = arena.carve(len(data), alignment_bytes=1)
        real_engine.submit_read(file, 3, target).wait()
        assert bytes(target.view()) == data
        file.close()


def test_without_unnamed_files_the_name_is_removed_at_once(
    monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    really_open = os.open

    def open_named(path: str, flags: int, mode: int = 0o777, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return really_open(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", open_named)
    with SwapFile.create(scratch, SECTOR) as file:
        status = os.fstat(file.fileno())
        assert status.st_nlink == 0
        assert status.st_mode & 0o777 == 0o600
        assert status.st_blocks * 512 >= SECTOR
        assert file.direct
    assert list(scratch.iterdir()) == []


# Moving bytes.


@pytest.mark.parametrize("sectors_left", [0, 1, 2, 5])
def test_a_file_that_was_truncated_underneath_ends_early(
    real_engine: Engine, scratch: Path, arena: HostArena, sectors_left: int
) -> None:
    data = pattern(3, 6 * SECTOR)
    span = filled(arena, b"\x33" * 7 * SECTOR)
    with contextlib.closing(real_engine.create_file(scratch, 7 * SECTOR)) as file:
        put(file, SECTOR, data)
        os.ftruncate(file.fileno(), (1 + sectors_left) * SECTOR)
        before = storage_bytes()[0]
        error = failure(real_engine.submit_read(file, SECTOR, span.sub(0, 6 * SECTOR)))
        assert storage_bytes()[0] - before >= sectors_left * SECTOR
        check(
            error,
            file,
            number=errno.EIO,
            operation="read",
            offset=SECTOR,
            wanted_bytes=6 * SECTOR,
            moved_bytes=sectors_left * SECTOR,
        )
        assert "the file ended early" in str(error)
    # What is there has been read.
    assert span.view()[: sectors_left * SECTOR] == data[: sectors_left * SECTOR]


def test_a_file_that_ends_inside_a_sector_ends_early(
    real_engine: Engine, scratch: Path, arena: HostArena
) -> None:
    with contextlib.closing(real_engine.create_file(scratch, 4 * SECTOR)) as file:
        put(file, 0, pattern(3, 4 * SECTOR))
        os.ftruncate(file.fileno(), SECTOR + 1000)
        error = failure(real_engine.submit_read(file, 0, arena.carve(4 * SECTOR)))
        assert (error.errno, error.moved_bytes) == (errno.EIO, SECTOR + 1000)
        assert "the file ended early" in str(error)


def test_a_disk_that_fills_up_under_a_write(real_engine: Engine, tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "tmpfs", "tmpfs", "size=1m") as directory,
        HostArena(2 << 20) as arena,
        unreserved_file(directory, 2 << 20) as file,
    ):
        data = pattern(4, 2 << 20)
        error = failure(real_engine.submit_write(file, 0, filled(arena, data)))
        check(
            error,
            file,
            number=errno.ENOSPC,
            operation="write",
            offset=0,
            wanted_bytes=2 << 20,
            moved_bytes=1 << 20,
        )


def test_a_limit_on_file_sizes_under_a_write(
    real_engine: Engine, scratch: Path, arena: HostArena
) -> None:
    data = pattern(5, 6 * SECTOR)
    with contextlib.closing(real_engine.create_file(scratch, 8 * SECTOR)) as file:
        with largest_file(5 * SECTOR):
            error = failure(real_engine.submit_write(file, 2 * SECTOR, filled(arena, data)))
        check(
            error,
            file,
            number=errno.EFBIG,
            operation="write",
            offset=2 * SECTOR,
            wanted_bytes=6 * SECTOR,
            moved_bytes=3 * SECTOR,
        )
        assert contents(file, 0, 8 * SECTOR) == (
            bytes(2 * SECTOR) + data[: 3 * SECTOR] + bytes(3 * SECTOR)
        )


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_descriptor_that_was_closed_underneath(
    real_engine: Engine, scratch: Path, arena: HostArena, operation: str
) -> None:
    file = real_engine.create_file(scratch, 3 * BLOCK_BYTES)
    number = file.fileno()
    keeper = os.dup(number)
    os.close(number)
    verb = real_engine.submit_read if operation == "read" else real_engine.submit_write
    error = failure(verb(file, BLOCK_BYTES, arena.carve(2 * BLOCK_BYTES)))
    check(
        error,
        file,
        number=errno.EBADF,
        operation=operation,
        offset=BLOCK_BYTES,
        wanted_bytes=2 * BLOCK_BYTES,
        moved_bytes=0,
    )
    os.dup2(keeper, number)  # so that the file closes its own number, not someone else's
    os.close(keeper)
    file.close()


def test_a_descriptor_that_may_not_be_written(
    real_engine: Engine, tmp_path: Path, arena: HostArena
) -> None:
    (tmp_path / "file").write_bytes(bytes(SECTOR))
    descriptor = Descriptor(os.open(tmp_path / "file", os.O_RDONLY))
    path = tmp_path / "file"
    with SwapFile(descriptor, path, SECTOR, alignment_bytes=SECTOR, direct=False) as file:
        error = failure(real_engine.submit_write(file, 0, filled(arena, b"\x01" * SECTOR)))
        assert (error.errno, error.operation, error.moved_bytes) == (errno.EBADF, "write", 0)
        real_engine.submit_read(file, 0, arena.carve(SECTOR)).wait()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_memory_that_is_not_there(real_engine: Engine, scratch: Path, operation: str) -> None:
    nowhere = Span(SECTOR, SECTOR, None)  # the kernel never maps the first pages
    with contextlib.closing(real_engine.create_file(scratch, SECTOR)) as file:
        put(file, 0, pattern(1, SECTOR))
        verb = real_engine.submit_read if operation == "read" else real_engine.submit_write
        error = failure(verb(file, 0, nowhere))
        assert (error.errno, error.moved_bytes) == (errno.EFAULT, 0)
        assert contents(file, 0, SECTOR) == pattern(1, SECTOR)


def test_a_failure_stays_with_its_transfer(
    real_engine: Engine, scratch: Path, arena: HostArena
) -> None:
    nowhere = Span(SECTOR, SECTOR, None)
    with contextlib.closing(real_engine.create_file(scratch, 20 * SECTOR)) as file:
        tickets = [
            real_engine.submit_write(
                file,
                index * SECTOR,
                nowhere if index % 5 == 2 else filled(arena, pattern(index, SECTOR)),
            )
            for index in range(20)
        ]
        real_engine.drain()  # does not raise what belongs to the tickets
        for index, ticket in enumerate(tickets):
            if index % 5 == 2:
                assert failure(ticket).offset == index * SECTOR
            else:
                ticket.wait()
                assert contents(file, index * SECTOR, SECTOR) == pattern(index, SECTOR)
        real_engine.submit_write(file, 0, filled(arena, pattern(50, SECTOR))).wait()
        assert contents(file, 0, SECTOR) == pattern(50, SECTOR)


def test_a_failure_that_nobody_waits_for_is_logged(
    real_engine: Engine, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = Span(SECTOR, SECTOR, None)
    with contextlib.closing(real_engine.create_file(scratch, 3 * SECTOR)) as file:
        failure(real_engine.submit_write(file, 0, nowhere))
        kept = real_engine.submit_write(file, SECTOR, nowhere)
        real_engine.submit_write(file, 2 * SECTOR, nowhere)  # dropped in flight
        real_engine.drain()
        real_engine.close()
        gc.collect()
        offsets = [record.getMessage().split(" of ")[1] for record in caplog.records]
        assert offsets == ["4096 bytes at offset 8192"]
        assert caplog.records[0].levelno == logging.ERROR
        assert "nobody waited for it" in caplog.records[0].getMessage()
        del kept
        gc.collect()
        assert "at offset 4096" in caplog.records[1].getMessage()


def test_what_a_python_call_raises_reaches_the_ticket(
    monkeypatch: pytest.MonkeyPatch, scratch: Path, arena: HostArena
) -> None:
    def break_down(descriptor: int, view: memoryview, offset: int) -> int:
        raise ZeroDivisionError("not an errno")

    monkeypatch.setattr(python_engine, "_write_once", break_down)
    with (
        make_engine("python") as engine,
        contextlib.closing(engine.create_file(scratch, SECTOR)) as file,
    ):
        error = failure(engine.submit_write(file, 0, arena.carve(SECTOR)))
        assert error.errno == errno.EIO
        assert "ZeroDivisionError('not an errno')" in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)


# The loop of the Python engine, on calls that misbehave; the native one has the same in C++.

Answer = int | OSError


def scripted(answers: list[Answer]) -> tuple[Callable[[int, memoryview, int], int], list[int]]:
    """Return a call that gives these answers in turn, and the list of the offsets it was asked."""
    offsets: list[int] = []

    def move_once(descriptor: int, view: memoryview, offset: int) -> int:
        offsets.append(offset)
        answer = answers[min(len(offsets), len(answers)) - 1]
        if isinstance(answer, OSError):
            raise answer
        return min(answer, len(view))

    return move_once, offsets


AGAIN = BlockingIOError(errno.EAGAIN, "again")


@pytest.mark.parametrize(
    ("alignment_bytes", "answers", "outcome", "asked"),
    [
        (1, [9999], Outcome(2 * SECTOR), [0]),
        (1, [1, 7, 9999], Outcome(2 * SECTOR), [0, 1, 8]),
        (SECTOR, [SECTOR + 1000, 9999], Outcome(2 * SECTOR), [0, SECTOR]),
        (SECTOR, [AGAIN, SECTOR, AGAIN, 9999], Outcome(2 * SECTOR), [0, 0, SECTOR, SECTOR]),
        (1, [100, 0], Outcome(100, errno.EIO, "the file ended early"), [0, 100]),
        (SECTOR, [100], Outcome(100, errno.EIO, "the file ended early"), [0]),
        (1, [100, OSError(errno.ENOSPC, "full")], Outcome(100, errno.ENOSPC), [0, 100]),
        (1, [AGAIN], Outcome(0, errno.EAGAIN), [0] * 1001),
    ],
)
def test_a_block_moves_whole_or_says_what_failed(
    alignment_bytes: int, answers: list[Answer], outcome: Outcome, asked: list[int]
) -> None:
    move_once, offsets = scripted(answers)
    block = Block(-1, 0, memoryview(bytearray(2 * SECTOR)), alignment_bytes)
    assert move_block(block, move_once) == outcome
    assert offsets == asked
