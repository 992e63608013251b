"""io_uring with polling: it works, or says by name why it cannot be had."""

import contextlib
import errno
from pathlib import Path

import pytest

from aio_ops import HostArena, open_engine
from aio_ops.engine import Polling
from aio_ops.kernel_engines import IoUringEngine
from aio_ops.probe import polling_refusal
from tests.aio_ops.disks import mounted, storage_bytes
from tests.aio_ops.support import KERNEL_KINDS, SECTOR, contents, filled, make_engine, pattern

POLLINGS = [polling for polling in Polling if polling is not Polling.NONE]


def polling_engine(polling: Polling, directory: Path) -> IoUringEngine:
    make_engine("io_uring").close()  # skips where there is none
    try:
        engine = open_engine("io_uring", polling=polling, directory=directory, block_bytes=SECTOR)
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP
        assert polling.value in str(error)
        assert "nvme.poll_queues" in str(error)
        assert polling.completion, "submission polling needs nothing of the device"
        pytest.skip(str(error))
    assert isinstance(engine, IoUringEngine)
    assert engine.polling is polling
    return engine


def kernel_thread_sleeps() -> bool:
    """Return whether the thread that looks for requests has given up for now."""
    states = []
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            name, _, rest = (path / "stat").read_text(encoding="ascii").partition(") ")
            if "iou-sqp" in name:
                states.append(rest[0])
    assert states  # that of the probe before may take a moment to go
    return states == ["S"]


@pytest.mark.parametrize("polling", POLLINGS)
def test_polling_moves_the_same_bytes(scratch: Path, arena: HostArena, polling: Polling) -> None:
    data = pattern(1, 40 * SECTOR)
    with (
        polling_engine(polling, scratch) as engine,
        contextlib.closing(engine.create_file(scratch, len(data), any_alignment=True)) as file,
    ):
        before = storage_bytes()
        source = filled(arena, data)
        for start in range(0, len(data), 4 * SECTOR):
            engine.submit_write(file, start, source.sub(start, 4 * SECTOR))
        engine.drain()
        assert contents(file, 0, len(data)) == data
        while polling.submission and not kernel_thread_sleeps():
            pass  # it is woken by what comes next; the time limit of the suite bounds this
        target = arena.carve(len(data))
        engine.submit_read(file, 0, target).wait()
        assert bytes(target.view()) == data
        assert storage_bytes()[0] - before[0] >= len(data)
        assert storage_bytes()[1] - before[1] >= len(data)
        edges = arena.carve(3 * SECTOR)
        engine.submit_read(file, 100, edges.sub(100, 2 * SECTOR)).wait()
        assert bytes(edges.view()[100 : 100 + 2 * SECTOR]) == data[100 : 100 + 2 * SECTOR]


def test_completion_polling_moves_what_is_not_direct_by_plain_calls(
    scratch: Path, arena: HostArena
) -> None:
    make_engine("io_uring").close()
    data = pattern(2, 300)
    with (
        open_engine("io_uring", polling="completion") as engine,
        contextlib.closing(engine.create_file(scratch, SECTOR, any_alignment=True)) as file,
    ):
        engine.submit_write(file, 7, filled(arena, data)).wait()
        target = arena.carve(300)
        engine.submit_read(file, 7, target).wait()
        assert bytes(target.view()) == data


def test_completion_polling_is_refused_without_direct_io(tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "ramfs") as directory:
        refusal = polling_refusal(directory, "completion")
        assert refusal is not None
        assert "direct I/O" in refusal
        with pytest.raises(OSError, match="completion polling does not work in"):
            open_engine("io_uring", polling="completion", directory=directory)


def test_only_io_uring_polls() -> None:
    for kind in ("auto", "threads", "python", *KERNEL_KINDS[1:]):
        with pytest.raises(ValueError, match="only the engine 'io_uring' can poll"):
            open_engine(kind, polling="submission")
    with pytest.raises(ValueError, match="there is no polling 'often'"):
        open_engine("io_uring", polling="often")
