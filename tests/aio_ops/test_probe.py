"""What a probe finds out, what "auto" makes of it, and what a refused engine says."""

import contextlib
import ctypes
import errno
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import aio_ops
from aio_ops import Engine, HostArena, kernel_engines, open_engine, probe
from aio_ops.kernel_engines import IoUringEngine
from tests.aio_ops.disks import mounted
from tests.aio_ops.support import SECTOR, contents, filled, make_engine, pattern


@pytest.fixture(autouse=True)
def native() -> None:
    make_engine("threads").close()  # or skip, saying why


def refuse(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Make the probe find that some engines do not work."""
    really_try = probe.try_engine

    def try_engine(kind: str, file: aio_ops.TransferFile) -> str | None:
        return f"{kind} is simulated to be off" if kind in kinds else really_try(kind, file)

    monkeypatch.setattr(probe, "try_engine", try_engine)


def test_a_report_says_what_the_machine_says(scratch: Path) -> None:
    make_engine("io_uring").close()
    make_engine("kernel_aio").close()
    found = probe.report(scratch)
    assert found.kernel == os.uname().release
    assert found.aio_max == int(Path("/proc/sys/fs/aio-max-nr").read_text())
    assert found.direct
    assert found.free_bytes > 0
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(scratch)], capture_output=True, text=True, check=True
    ).stdout
    assert found.file_system is not None
    assert kind.startswith(found.file_system[:3])
    assert found.refusals == {}
    assert found.best == "io_uring"
    assert str(scratch) in found.reason
    assert list(scratch.iterdir()) == []
    text = "\n".join(found.lines())
    for part in (str(scratch), found.kernel, found.file_system, "io_uring: works", "rotational"):
        assert part in text


def test_auto_takes_the_best_engine_that_works_in_the_directory(
    monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    """And opens no other: each takes a wait for the kernel to close."""
    make_engine("io_uring").close()
    tried: list[str] = []
    really_try = probe.try_engine

    def try_engine(kind: str, file: aio_ops.TransferFile) -> str | None:
        tried.append(kind)
        return really_try(kind, file)

    monkeypatch.setattr(probe, "try_engine", try_engine)
    with open_engine(directory=scratch) as engine:
        assert engine.name == "io_uring"
        assert str(scratch) in engine.reason
    assert tried == ["io_uring"]


@pytest.mark.parametrize(
    ("refused", "taken"),
    [
        (["io_uring"], "kernel_aio"),
        (["io_uring", "kernel_aio"], "threads"),
        (["io_uring", "kernel_aio", "threads"], "python"),
    ],
)
def test_auto_goes_down_and_says_what_was_refused(
    monkeypatch: pytest.MonkeyPatch,
    scratch: Path,
    arena: HostArena,
    refused: list[str],
    taken: str,
) -> None:
    make_engine("kernel_aio").close()
    refuse(monkeypatch, *refused)
    assert list(probe.report(scratch).refusals) == refused
    with open_engine(directory=scratch) as engine:
        assert engine.name == taken
        for kind in refused:
            assert f"{kind} was refused: {kind} is simulated to be off" in engine.reason
        with contextlib.closing(engine.create_file(scratch, SECTOR)) as file:
            engine.submit_write(file, 0, filled(arena, pattern(1, SECTOR))).wait()
            assert contents(file, 0, SECTOR) == pattern(1, SECTOR)


def test_kernel_aio_is_refused_where_it_would_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refuse(monkeypatch, "io_uring")
    with mounted(tmp_path / "ramfs", "ramfs") as directory:
        with open_engine(directory=directory) as engine:
            assert engine.name == "threads"
            assert "takes no direct I/O" in engine.reason
        found = probe.report(directory)
        assert found.file_system == "ramfs"
        assert not found.direct


def test_an_engine_that_only_fails_at_full_size_gives_way(
    monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    def refuse_full_size(
        self: Engine, block_bytes: int, queue_depth: int, reason: str = ""
    ) -> None:
        raise OSError(errno.ENOMEM, "no room for a ring of this size")

    refuse(monkeypatch, "kernel_aio")
    monkeypatch.setattr(probe, "try_engine", lambda kind, file: None)
    monkeypatch.setattr(IoUringEngine, "__init__", refuse_full_size)
    with open_engine(directory=scratch) as engine:
        assert engine.name == "threads"
        assert "io_uring was refused: [Errno 12] no room for a ring" in engine.reason


def test_a_directory_that_cannot_be_probed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        open_engine(directory=tmp_path / "missing")


@contextlib.contextmanager
def all_contexts_taken() -> Iterator[None]:
    """Take every event of kernel AIO that the machine has left, in few contexts."""
    setup, destroy = {"x86_64": (206, 207), "aarch64": (0, 1)}.get(platform.machine(), (-1, -1))
    if setup < 0:
        pytest.skip(f"the number of io_setup on {platform.machine()} is not known here")
    call = ctypes.CDLL(None, use_errno=True).syscall
    held = []
    size = int(Path("/proc/sys/fs/aio-max-nr").read_text(encoding="ascii"))
    try:
        while size:
            context = ctypes.c_ulong(0)
            if call(setup, ctypes.c_uint(size), ctypes.byref(context)):
                assert ctypes.get_errno() in (errno.EAGAIN, errno.ENOMEM)
                size //= 2
            else:
                held.append(context)
        yield
    finally:
        for context in held:
            call(destroy, context)


def test_contexts_that_run_out_are_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    make_engine("kernel_aio").close()
    refuse(monkeypatch, "io_uring")
    with all_contexts_taken():
        with pytest.raises(OSError, match=r"raise `sysctl fs\.aio-max-nr`") as caught:
            open_engine("kernel_aio")
        assert caught.value.errno == errno.EAGAIN
        with open_engine(directory=scratch) as engine:
            assert engine.name == "threads"
            assert "raise `sysctl fs.aio-max-nr`" in engine.reason
    make_engine("kernel_aio").close()  # and those who took them gave them back


def _run_python(code: str, *arguments: str) -> list[str]:
    root = Path(aio_ops.__file__).parent.parent
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_seccomp_filter_is_seen_and_named(scratch: Path) -> None:
    make_engine("io_uring").close()
    make_engine("kernel_aio").close()
    code = """
import ctypes, struct, sys
from pathlib import Path
from aio_ops import open_engine, probe
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
rules = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in code))
program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(rules))
prctl = ctypes.CDLL(None).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, ctypes.c_char_p(program)):
    print("no seccomp here")
    raise SystemExit
found = probe.report(Path(sys.argv[1]))
print(found.seccomp, found.best, found.refusals["io_uring"])
print(open_engine(directory=Path(sys.argv[1])).name)
try:
    open_engine("io_uring")
except PermissionError as error:
    print(error)
"""
    lines = _run_python(code, str(scratch))
    if lines == ["no seccomp here"]:
        pytest.skip("no seccomp filter can be set here")
    assert lines[0].startswith("True kernel_aio ")
    assert "allow io_uring_setup in the container's seccomp profile" in lines[0]
    assert lines[1] == "kernel_aio"
    assert "io_uring is refused here" in lines[2]


def test_little_lockable_memory_is_reported_and_transfers_go_on(scratch: Path) -> None:
    make_engine("io_uring").close()
    code = """
import os, resource, sys
from pathlib import Path
from aio_ops import HostArena, SwapFile, _native, open_engine
file = SwapFile.create(Path(sys.argv[1]), 1 << 20)
with open_engine("io_uring", queue_depth=4) as engine, HostArena(1 << 20) as arena:
    engine.register(arena.carve(1 << 20))  # load all modules: another user may not read them
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
if os.getuid() == 0:
    os.setuid(65534)  # root may lock as much as it likes
with open_engine("io_uring", queue_depth=4) as engine, HostArena(1 << 20) as arena:
    span = arena.carve(1 << 20)
    print(engine.register(span))
    span.view()[:] = bytes([7]) * (1 << 20)
    engine.submit_write(file, 0, span).wait()
    span.view()[:] = bytes(1 << 20)
    engine.submit_read(file, 0, span).wait()
    print(set(span.view()))
"""
    refusal, seen = _run_python(code, str(scratch))
    assert "1048576 bytes cannot be registered" in refusal
    assert "raise `ulimit -l`" in refusal or "Linux 5.13" in refusal
    assert seen == "{7}"


def test_every_errno_of_a_refusal_has_a_remedy() -> None:
    error = OSError(errno.EIO, "odd")
    assert "use the engine 'threads'" in str(kernel_engines.refusal("io_uring", error))
    for number in (errno.EPERM, errno.ENOSYS, errno.ENOMEM):
        for kind in ("io_uring", "kernel_aio"):
            named = kernel_engines.refusal(kind, OSError(number, os.strerror(number)))
            assert named.errno == number
            assert "use the engine" not in str(named)


@pytest.mark.parametrize(
    "seconds", [0.5, pytest.param(10, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
def test_a_storm_of_signals_changes_nothing(
    real_engine: Engine, scratch: Path, arena: HostArena, seconds: float
) -> None:
    hits = 0

    def count(number: int, frame: object) -> None:
        nonlocal hits
        hits += 1

    size_bytes = 16 * SECTOR
    spans = [arena.carve(size_bytes) for _ in range(2)]
    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        with contextlib.closing(real_engine.create_file(scratch, size_bytes)) as file:
            stop = time.monotonic() + seconds
            step = 0
            while step < 5 or time.monotonic() < stop:
                step += 1
                spans[0].view()[:] = pattern(step, size_bytes)
                real_engine.submit_write(file, 0, spans[0]).wait()
                real_engine.submit_read(file, 0, spans[1]).wait()
                assert spans[1].view() == spans[0].view()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits > 0
