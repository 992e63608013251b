"""Fixtures and rules of all tests: seeds, a scratch directory that takes O_DIRECT, loud skips."""

import errno
import functools
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Sums of torch depend on how many threads make them; processes that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines differ in speed, and so does one from moment to moment: no test is about time.
settings.register_profile("tierzero", deadline=None)
settings.load_profile("tierzero")

pytest.register_assert_rewrite("tests.support")

ROOT = Path(__file__).resolve().parent.parent
PROBE_BYTES = 4096


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets what it starts in the background ignore Ctrl-C, which tests press.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Nothing is skipped silently: the summary names each skip and its reason.
    if "s" not in config.option.reportchars:
        config.option.reportchars += "s"


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ.get("TIERZERO_REQUIRE_NATIVE") == "1":
        missing = native_modules_missing()
        if missing:
            pytest.exit(f"TIERZERO_REQUIRE_NATIVE=1, but {missing}", returncode=4)


def native_modules_missing() -> str | None:
    """Return why a native module is not loaded, or None if all are."""
    import aio_ops
    import offload

    for package in (aio_ops, offload):
        if not package.native_available():
            reason = package.native_unavailable_reason()
            return f"the native module of {package.__name__} is not loaded: {reason}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {"gpu": no_gpu_reason, "nvme": no_direct_io_reason}
    for item in items:
        for marker, reason_of in needs.items():
            if item.get_closest_marker(marker) and (reason := reason_of()):
                item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def no_gpu_reason() -> str | None:
    """Return why GPU tests cannot run, or None."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"no CUDA device: torch {torch.__version__} finds none"


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start each test from the same random numbers, in whichever library it has imported."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Return an empty directory on a file system that takes O_DIRECT, removed afterwards."""
    yield from scratch_directory()


@pytest.fixture(scope="module")
def module_scratch() -> Iterator[Path]:
    """Return a directory like `scratch` that the tests of one file share."""
    yield from scratch_directory()


def scratch_directory() -> Iterator[Path]:
    parent, reason = direct_io_directory()
    if parent is None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="tierzero-test-", dir=parent))
    yield folder
    shutil.rmtree(folder)


@functools.cache
def direct_io_directory() -> tuple[Path | None, str]:
    """Return the first candidate that a direct transfer succeeds on, or None and all reasons."""
    build = ROOT / "build"
    refusals: list[str] = []
    for candidate in (Path(tempfile.gettempdir()), Path("/var/tmp"), build):
        if candidate == build:
            build.mkdir(exist_ok=True)
        try:
            probe_direct_io(candidate)
        except OSError as error:
            refusals.append(f"{candidate}: {error.strerror}")
        else:
            return candidate, ""
    return None, f"no directory takes O_DIRECT: {'; '.join(refusals)}"


def no_direct_io_reason() -> str | None:
    """Return why tests marked nvme cannot run, or None."""
    return direct_io_directory()[1] or None


def probe_direct_io(directory: Path) -> None:
    """Write and read back one aligned block with O_DIRECT, or raise OSError."""
    block = mmap.mmap(-1, 2 * PROBE_BYTES)  # page-aligned, as O_DIRECT wants its memory
    descriptor, name = tempfile.mkstemp(prefix="tierzero-probe-", dir=directory)
    try:
        direct = os.open(name, os.O_RDWR | os.O_DIRECT)
        try:
            block[:PROBE_BYTES] = os.urandom(PROBE_BYTES)
            with memoryview(block) as view:
                written = os.pwritev(direct, [view[:PROBE_BYTES]], 0)
                read = os.preadv(direct, [view[PROBE_BYTES:]], 0)
        finally:
            os.close(direct)
    finally:
        os.close(descriptor)
        Path(name).unlink()
    same = block[:PROBE_BYTES] == block[PROBE_BYTES:]
    block.close()
    if (written, read, same) != (PROBE_BYTES, PROBE_BYTES, True):
        raise OSError(errno.EIO, "a direct block did not come back as it was written")
