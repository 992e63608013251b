"""The tuner's command in this process, and disks for it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aio_ops.tune.command import main
from tests.aio_ops.disks import mounted_ext4

MIB = 1 << 20
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command here: exit code, stdout, stderr."""

    def run_it(*arguments: str | Path) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(str(end.code))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_it


@pytest.fixture
def disk(scratch: Path) -> Path:
    """An empty directory on a disk that takes direct I/O."""
    directory = scratch / "disk"
    directory.mkdir()
    return directory


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small ext4 file system of our own."""
    with mounted_ext4(tmp_path_factory.mktemp("small"), 160 * MIB) as directory:
        yield directory
