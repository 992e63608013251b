"""Pinned memory to the page, as the kernel counts it, and that all of it is given back."""

import gc
import mmap
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from aio_ops import HostArena, PinnedArena, open_engine
from aio_ops.kernel_engines import IoUringEngine
from aio_ops.pinned import open_cuda
from tests.aio_ops.support import SECTOR, contents, make_engine, pattern

PAGE_BYTES = mmap.PAGESIZE
MIB = 1 << 20


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"the kernel does not state {name}")


def mapped(address: int, size_bytes: int) -> dict[str, int]:
    """Return the sums that the kernel states of the mappings that lie in a range of addresses."""
    sums = {"Size": 0, "Rss": 0, "Locked": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            start, stop = (int(bound, 16) for bound in name.split(" ")[0].split("-"))
            inside = address <= start and stop <= address + size_bytes
        elif inside and name in sums:
            sums[name] += int(rest.split()[0]) << 10
    return sums


@pytest.mark.parametrize("hugepages", [True, False])
@pytest.mark.parametrize("size_bytes", [1, PAGE_BYTES, 3 * MIB + 5, 64 * MIB])
def test_the_kernel_counts_what_was_asked_for(size_bytes: int, *, hugepages: bool) -> None:
    gc.collect()
    exact_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    locked, resident = status_bytes("VmLck"), status_bytes("VmRSS")
    with PinnedArena(size_bytes, hugepages=hugepages) as arena:
        assert arena.size_bytes == exact_bytes
        assert status_bytes("VmLck") - locked == exact_bytes
        address = arena.whole().address
        assert mapped(address, exact_bytes) == {
            "Size": exact_bytes,
            "Rss": exact_bytes,
            "Locked": exact_bytes,
        }
        grown = status_bytes("VmRSS") - resident
        assert exact_bytes - MIB <= grown <= exact_bytes + 8 * MIB
    gc.collect()
    assert status_bytes("VmLck") == locked


def test_an_odd_size_is_not_rounded_up() -> None:
    size_bytes = 9 << 28  # 2.25 GiB, which a power of two would make 4
    locked = status_bytes("VmLck")
    with PinnedArena(size_bytes) as arena:
        whole = arena.whole()
        assert status_bytes("VmLck") - locked == size_bytes
        assert mapped(whole.address, whole.size_bytes)["Rss"] == size_bytes
        assert status_bytes("VmRSS") >= size_bytes
        del whole
    gc.collect()
    assert status_bytes("VmLck") == locked


def test_an_arena_that_is_not_pinned_locks_nothing() -> None:
    locked = status_bytes("VmLck")
    with HostArena(8 * MIB) as arena:
        arena.whole().view()[:] = bytes(8 * MIB)
        assert status_bytes("VmLck") == locked


def test_a_hundred_lives_leave_no_trace(scratch: Path) -> None:
    def live() -> None:
        with make_engine("io_uring") as engine, PinnedArena(4 * MIB) as arena:
            assert isinstance(engine, IoUringEngine)
            span = arena.whole()
            assert engine.register(span) is None
            with engine.create_file(scratch, 4 * MIB) as file:
                engine.submit_write(file, 0, span).wait()

    for _ in range(5):
        live()
    gc.collect()
    names = ("VmLck", "VmPin", "VmRSS")
    before = {name: status_bytes(name) for name in names}
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a count of /proc itself
    mappings = len(Path("/proc/self/maps").read_text(encoding="ascii").splitlines())
    for _ in range(100):
        live()
    gc.collect()
    after = {name: status_bytes(name) for name in names}
    assert after["VmLck"] == before["VmLck"]
    assert after["VmPin"] == before["VmPin"]
    assert after["VmRSS"] <= before["VmRSS"] + 4 * MIB
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
    assert len(Path("/proc/self/maps").read_text(encoding="ascii").splitlines()) <= mappings + 8


LIMITED = """
import os, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
from aio_ops import HostArena, PinnedArena
if os.geteuid() == 0:
    os.setuid(65534)  # root may lock as much as it likes
HostArena(1 << 20).close()
PinnedArena(1 << 15).close()
try:
    PinnedArena(1 << 20)
except OSError as error:
    print(error)
"""


def test_what_may_not_be_locked_is_refused_with_the_remedy() -> None:
    if os.geteuid() == 0 and not os.access(Path(__file__), os.R_OK):
        pytest.skip("the package cannot be read by another user")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "Permission" in result.stderr:
        pytest.skip("the package cannot be read by another user")
    assert result.returncode == 0, result.stderr
    for part in ("cannot lock 1048576 bytes", "may lock 65536 bytes", "ulimit -l", "pin_memory"):
        assert part in result.stdout


def test_without_the_device_the_arena_is_pageable_and_says_so_once() -> None:
    if open_cuda(0)[0] is not None:
        pytest.skip("there is a CUDA device here")
    locked = status_bytes("VmLck")
    with pytest.warns(RuntimeWarning, match="not registered with CUDA device 0") as record:
        arena = PinnedArena(MIB, device=0)
    assert len(record) == 1
    assert not arena.cuda_registered
    assert arena.cuda_refusal == "there is no CUDA driver here (libcuda.so.1)"
    assert status_bytes("VmLck") - locked == MIB
    arena.close()


def test_a_forked_child_has_nothing_and_gives_nothing_back() -> None:
    with PinnedArena(MIB) as arena:
        arena.whole().view()[:4] = b"data"
        locked = status_bytes("VmLck")
        child = os.fork()
        if child == 0:
            code = 0 if status_bytes("VmLck") == 0 else 1
            arena.close()
            gc.collect()
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert status_bytes("VmLck") == locked
        assert bytes(arena.whole().view()[:4]) == b"data"


WORKERS = """
import os, sys, warnings
from pathlib import Path
import torch
from aio_ops import PinnedArena, open_engine
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.full((256,), index)

MIB = 1 << 20
with open_engine(sys.argv[1], queue_depth=64) as engine, PinnedArena(24 * MIB) as arena:
    file = engine.create_file(Path(sys.argv[2]), 24 * MIB)
    spans = [arena.carve(MIB) for _ in range(24)]
    for index, span in enumerate(spans):
        span.view()[:] = bytes([index + 1]) * MIB
    rounds = 0
    for epoch in range(2):
        loader = DataLoader(Numbers(), batch_size=16, num_workers=4, multiprocessing_context="fork")
        for batch in loader:  # the workers fork while transfers are in flight
            pieces = [(index * MIB, span) for index, span in enumerate(spans)]
            writes = engine.submit_writes(file, pieces)
            assert batch.shape == (16, 256) and (batch == batch[:, :1]).all()
            for ticket in writes:
                ticket.wait()
            for span in spans:
                span.view()[:] = bytes(MIB)
            reads = engine.submit_reads(file, pieces)
            iter(loader) if rounds == 1 else None  # four more, with reads in flight
            for index, (ticket, span) in enumerate(zip(reads, spans)):
                ticket.wait()
                assert bytes(span.view()) == bytes([index + 1]) * MIB
            rounds += 1
    assert rounds == 32
print("right")
"""


@pytest.mark.parametrize("kind", ["io_uring", pytest.param("threads", marks=pytest.mark.full)])
def test_the_data_stay_right_while_workers_fork(kind: str, scratch: Path) -> None:
    make_engine(kind).close()
    result = subprocess.run(
        [sys.executable, "-c", WORKERS, kind, str(scratch)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (result.returncode, result.stdout) == (0, "right\n"), result.stderr


def test_an_engine_moves_pinned_memory(scratch: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_engine("auto", directory=scratch) as engine, PinnedArena(MIB) as arena:
            data = pattern(1, SECTOR)
            span = arena.carve(SECTOR)
            span.view()[:] = data
            with engine.create_file(scratch, SECTOR) as file:
                engine.submit_write(file, 0, span).wait()
                assert contents(file, 0, SECTOR) == data
