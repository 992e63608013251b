"""Threads that share a handle, the interpreter lock, interrupts, forks, handles that go early."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aio_ops.handles import AioHandle, aio_handle
from tests.aio_ops.disks import frozen
from tests.aio_ops.handles.support import MIB, bytes_of, file_of, in_child, locked, unlocked
from tests.aio_ops.handles.test_no_silence import sealed_file
from tests.aio_ops.support import pattern


@pytest.mark.parametrize("call", ["sync_pwrite", "pwrite", "write", "wait"])
@pytest.mark.parametrize("kind", ["locked", "unlocked"])
def test_other_threads_run_while_a_transfer_is_stuck(ext4: Path, call: str, kind: str) -> None:
    handle = aio_handle()
    data = pattern(1, MIB)
    path = ext4 / "file"
    path.write_bytes(bytes(MIB))
    source = locked(handle, data) if kind == "locked" else unlocked(data)
    with frozen(ext4) as thaw:
        counted = 0

        def count() -> None:
            nonlocal counted
            for _ in range(100_000):
                counted += 1
            thaw()  # only now can the transfer end: a lock that is held would hang here

        counter = threading.Thread(target=count)
        counter.start()
        if call == "sync_pwrite":
            returned = handle.sync_pwrite(source, path)
            assert returned == 1
        elif call == "pwrite":
            returned = handle.pwrite(source, path, False, False)
            assert returned == 1
        elif call == "write":
            returned = handle.write(source, path, False)
            assert returned == 0
        else:
            returned = handle.async_pwrite(source, path)
            assert returned == 0
            returned = handle.wait()
            assert returned == 1
        assert counted == 100_000
        counter.join()
    assert path.read_bytes() == data


def test_threads_share_one_handle(scratch: Path) -> None:
    handle = aio_handle(65536, 8, False, True, 2)
    files = [file_of(scratch, seed, MIB // 2) for seed in range(4)]
    counts: list[int] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        path, data = files[number % 4]
        make = locked(handle, bytes(len(data))) if number % 2 else unlocked(bytes(len(data)))
        start.wait()
        for _ in range(8):
            make.zero_()
            counts.append(handle.sync_pread(make, path))
            assert bytes_of(make) == data
            counts.append(handle.sync_pwrite(make, scratch / f"own-{number}"))
            assert (scratch / f"own-{number}").read_bytes() == data

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()
    assert sum(counts) == 8 * 16
    returned = handle.wait()
    assert returned == 0


def test_every_operation_is_counted_once_by_threads_that_wait(scratch: Path) -> None:
    handle = aio_handle(65536, 64)
    path, data = file_of(scratch, 5, 65536)
    targets = [locked(handle, bytes(len(data))) for _ in range(64)]
    counts: list[int] = []

    def work(number: int) -> None:
        for target in targets[number::4]:
            handle.async_pread(target, path)
            counts.append(handle.wait())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sum(counts) == 64
    assert all(bytes_of(target) == data for target in targets)


def test_locked_memory_is_shared_by_threads() -> None:
    def work(number: int) -> None:
        handle = aio_handle()
        for size in range(1, 40):
            tensor = locked(handle, bytes([number]) * size * 512)
            assert handle.is_pinned(tensor[size:])
            assert set(bytes_of(tensor)) == {number}
            returned = handle.free_cpu_locked_tensor(tensor)
            assert returned is True
            assert not handle.is_pinned(tensor)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))


@pytest.mark.parametrize("kind", ["locked", "unlocked"])
def test_a_handle_that_goes_finishes_what_is_pending(scratch: Path, kind: str) -> None:
    path, data = file_of(scratch, 6, 24 * MIB)
    handle = aio_handle()
    target = locked(handle, bytes(len(data))) if kind == "locked" else unlocked(bytes(len(data)))
    handle.async_pread(target, path)
    handle.async_pwrite(unlocked(data), scratch / "copy")
    del handle
    gc.collect()
    assert bytes_of(target) == data
    assert (scratch / "copy").read_bytes() == data


def test_a_failure_that_no_one_waited_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    handle = aio_handle()
    descriptor = sealed_file(MIB)
    handle.async_pwrite(unlocked(bytes(MIB)), descriptor)
    os.close(descriptor)
    with caplog.at_level(logging.ERROR):
        del handle
        gc.collect()
    assert "a handle was dropped before wait(), and: " in caplog.text
    assert "Operation not permitted" in caplog.text


def test_a_process_that_ends_finishes_what_is_pending(scratch: Path) -> None:
    data = pattern(7, 16 * MIB)
    (scratch / "source").write_bytes(data)
    program = (
        "import sys, numpy as np\n"
        "from aio_ops.handles import aio_handle\n"
        "handle = aio_handle()\n"
        "handle.async_pwrite(np.fromfile(sys.argv[1], np.uint8), sys.argv[2])\n"
    )
    command = [sys.executable, "-c", program, str(scratch / "source"), str(scratch / "copy")]
    subprocess.run(command, check=True)
    assert (scratch / "copy").read_bytes() == data


def test_a_closed_handle_has_finished_and_says_so(scratch: Path) -> None:
    data = pattern(8, MIB)
    with aio_handle() as handle:
        handle.async_pwrite(unlocked(data), scratch / "new")
    assert (scratch / "new").read_bytes() == data
    handle.close()
    with pytest.raises(RuntimeError, match="the handle is closed"):
        handle.sync_pread(unlocked(data), scratch / "new")
    failing = aio_handle()
    descriptor = sealed_file(MIB)
    failing.async_pwrite(unlocked(data), descriptor)
    os.close(descriptor)
    with pytest.raises(OSError, match="Operation not permitted"):
        failing.close()
    failing.close()


@pytest.mark.parametrize("kind", ["locked", "unlocked"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupted_wait_can_be_waited_for_again(
    ext4: Path, kind: str, error: type[BaseException]
) -> None:
    handle = aio_handle()
    data = pattern(9, MIB)
    path = ext4 / "interrupted"
    path.write_bytes(bytes(MIB))
    source = locked(handle, data) if kind == "locked" else unlocked(data)

    def stop(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with frozen(ext4) as thaw:
            returned = handle.async_pwrite(source, path)
            assert returned == 0
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(error):
                handle.wait()
            thaw()
            returned = handle.wait()
            assert returned == 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert path.read_bytes() == data


def test_a_forked_child_cannot_use_a_handle_nor_harm_it(handle: AioHandle, scratch: Path) -> None:
    path, data = file_of(scratch, 10, 4 * MIB)
    target = locked(handle, bytes(len(data)))
    handle.async_pread(target, path)
    said = in_child(lambda: handle.sync_pread(unlocked(bytes(4096)), path))
    assert "make one in the forked process" in said
    returned = handle.wait()
    assert returned == 1
    assert bytes_of(target) == data
