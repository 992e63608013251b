import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import aio_ops
from aio_ops import Engine, HostArena
from tests.aio_ops.disks import mounted_ext4
from tests.aio_ops.support import make_engine


@pytest.fixture(params=["io_uring", "kernel_aio", "threads", "python", "simulated"])
def engine_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["io_uring", "kernel_aio", "threads", "python"])
def real_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(engine_kind: str) -> Iterator[Engine]:
    with make_engine(engine_kind) as engine:
        yield engine


@pytest.fixture
def real_engine(real_kind: str) -> Iterator[Engine]:
    with make_engine(real_kind) as engine:
        yield engine


@pytest.fixture
def arena() -> Iterator[HostArena]:
    with HostArena(4 << 20) as arena:
        yield arena


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A directory whose file system really takes direct I/O."""
    with contextlib.closing(_probe(tmp_path)) as file:
        if not file.direct:
            pytest.skip(f"{tmp_path} takes no direct I/O; set --basetemp to a disk")
    return tmp_path


def _probe(directory: Path) -> aio_ops.SwapFile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return aio_ops.SwapFile.create(directory, 4096)


@pytest.fixture(scope="module")
def ext4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small ext4 file system of our own, which may be filled or frozen."""
    with mounted_ext4(tmp_path_factory.mktemp("disk"), 24 << 20) as directory:
        yield directory
