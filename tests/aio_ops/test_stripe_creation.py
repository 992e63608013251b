"""Making a striped file: all of its space or none, and shares by weights that are measured."""

import contextlib
import errno
import os
import warnings
from pathlib import Path

import pytest

from aio_ops import Engine, measure_weights
from aio_ops.schedule_measurement import Traffic
from tests.aio_ops.disks import free_bytes, mounted, mounted_ext4
from tests.aio_ops.stripes import SIZE, places, striped
from tests.aio_ops.support import SECTOR, make_engine


def open_files_in(directory: Path) -> int:
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            count += str(link.readlink()).startswith(f"{directory}/")
    return count


def test_a_member_that_is_full_is_found_first_and_nothing_is_left(
    real_engine: Engine, scratch: Path, tmp_path: Path
) -> None:
    with mounted(tmp_path / "small", "tmpfs", "size=1m") as small:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pytest.raises(OSError, match="cannot hold its share of 2097152 of the") as caught:
                real_engine.create_striped_file([scratch, small], 4 << 20, weights=[1, 1])
        assert caught.value.errno == errno.ENOSPC
        assert str(small) in str(caught.value)
        assert open_files_in(scratch) == 0
        assert free_bytes(small) == 1 << 20
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            file = real_engine.create_striped_file(
                [scratch, small], 4 << 20, weights=[1, 1], capacities=[None, 1 << 19]
            )
        with contextlib.closing(file):
            assert file.layout.member_bytes == (7 << 19, 1 << 19)
            assert free_bytes(small) == 1 << 19
        with pytest.raises(FileNotFoundError, match="missing"):
            real_engine.create_striped_file([scratch, small / "missing"], 4 << 20, weights=[1, 1])
        assert open_files_in(scratch) == 0


def test_space_is_given_back_when_the_file_is_closed(scratch: Path) -> None:
    with make_engine("threads") as engine:
        file = striped(engine, places(scratch))
        assert open_files_in(scratch) == 3
        for member, own in zip(file.members, file.layout.member_bytes, strict=True):
            assert os.fstat(member.fileno()).st_blocks * 512 >= own
        file.close()
        assert open_files_in(scratch) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"directories": []}, "at least one directory, and none"),
        ({"again": True}, "are the same directory"),
        ({"weights": [1, -1]}, "weight of member 1 must be a positive number, got -1"),
        ({"weights": [1]}, "1 weights were given for 2 directories"),
        ({"weights": "fast"}, "numbers or 'auto', got 'fast'"),
        ({"capacities": [5]}, "1 capacities were given for 2 directories"),
        ({"capacities": [4096, 4096]}, "does not fit in members with capacities"),
        ({"unit_bytes": 100}, "multiple of the members' alignment"),
        ({"size_bytes": -1}, "cannot have -1 bytes"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lie on the same device:RuntimeWarning")
def test_what_makes_no_sense_is_refused(
    changes: dict[str, object], said: str, scratch: Path
) -> None:
    first, second = places(scratch, 2)
    settings = {"directories": [first, second], "size_bytes": SIZE, "weights": [1, 1], **changes}
    if settings.pop("again", False):
        (scratch / "link").symlink_to(first)
        settings["directories"] = [first, scratch / "link"]
    with make_engine("python") as engine:
        with pytest.raises(ValueError, match=said):
            engine.create_striped_file(**settings)
        assert open_files_in(scratch) == 0


def test_two_directories_of_one_device_are_warned_of(scratch: Path, tmp_path: Path) -> None:
    first, second = places(scratch, 2)
    with make_engine("python") as engine:
        with pytest.warns(RuntimeWarning, match="same device: striping over them brings nothing"):
            engine.create_striped_file([first, second], SIZE, weights=[1, 1]).close()
        with mounted_ext4(tmp_path, 24 << 20) as other, warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.create_striped_file([first, other], SIZE, weights=[1, 1]).close()


def test_what_the_engine_moves_at_once_lies_on_every_member(scratch: Path) -> None:
    directories = places(scratch, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for kind, settings, unit_bytes in (
            ("threads", {"thread_count": 4, "block_bytes": 1 << 20}, 1 << 20),
            ("io_uring", {"queue_depth": 32, "block_bytes": 1 << 20}, 4 << 20),
        ):
            with make_engine(kind, **settings) as engine:
                file = engine.create_striped_file(directories, 32 << 20, weights=[1, 1])
                assert file.layout.unit_bytes == unit_bytes
                file.close()


# Weights


@pytest.mark.filterwarnings("ignore:.*lie on the same device:RuntimeWarning")
def test_weights_are_measured_unless_they_are_given(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = places(scratch)
    # Three rounds over three drives; the last drive is disturbed once.
    rates = iter([3e8, 1e8, 2e8, 3e8, 1e8, 9e8, 3e8, 1e8, 2e8] * 2)
    asked = []

    def told(traffic: Traffic, seconds: float) -> float:
        asked.append(seconds)
        return next(rates)

    monkeypatch.setattr(Traffic, "go", told)  # the noise of a real drive must not decide a test
    with make_engine("threads") as engine:
        assert measure_weights(engine, directories, seconds=0.75) == [3e8, 1e8, 2e8]
        assert asked == [0.25] * 9
        file = engine.create_striped_file(directories, 600 * SECTOR, unit_bytes=SECTOR)
        with contextlib.closing(file):
            assert file.layout.member_bytes == (300 * SECTOR, 100 * SECTOR, 200 * SECTOR)
        assert len(asked) == 18


@pytest.mark.parametrize("most", [None, 1 << 20, 1])
def test_measuring_moves_bytes_in_every_directory_and_leaves_nothing(
    real_engine: Engine, scratch: Path, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = places(scratch, 2)
    sizes = []
    create = type(real_engine).create_file

    def watched(engine: Engine, directory: Path, size_bytes: int) -> object:
        sizes.append((directory, size_bytes))
        return create(engine, directory, size_bytes)

    monkeypatch.setattr(type(real_engine), "create_file", watched)
    rates = measure_weights(real_engine, directories, seconds=0.05, most_bytes=[most, 1 << 20])
    assert all(rate > 1e5 for rate in rates)
    assert sizes[1::2] == [
        (directories[0], {None: 64 << 20, 1 << 20: 1 << 20, 1: 64 * SECTOR}[most]),
        (directories[1], 1 << 20),
    ]
    assert open_files_in(scratch) == 0
    assert real_engine.in_flight == 0


def test_measuring_without_time_or_sizes_is_refused(scratch: Path) -> None:
    with make_engine("python") as engine:
        with pytest.raises(ValueError, match="positive number of seconds, got 0"):
            measure_weights(engine, [scratch], seconds=0)
        with pytest.raises(ValueError, match="2 sizes were given for 1"):
            measure_weights(engine, [scratch], most_bytes=[1, 2])
