"""The tuner where something is bad: the directory, the disk, the options, its end."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aio_ops.tune.gpu import refusal as no_gpu
from aio_ops.tune.settings import Workload
from aio_ops.tune.tuner import Request, tune
from tests.aio_ops.disks import free_bytes, mounted

SCRIPT = Path(__file__).parents[3] / "scripts" / "nvme_tune.py"
MIB = 1 << 20
BRIEF = ["--seconds", "0.2", "--io_size", "16M"]

Run = Callable[..., tuple[int, str, str]]


@contextlib.contextmanager
def filled(directory: Path, leave_bytes: int) -> Iterator[None]:
    """Leave so many bytes free on a file system."""
    filler = directory / "filler"
    try:
        with filler.open("wb") as file:
            fill(file.fileno(), directory, leave_bytes)
        yield
    finally:
        filler.unlink()


def fill(descriptor: int, directory: Path, leave_bytes: int) -> None:
    """Take space in ever smaller pieces: the file system itself needs some of what it states."""
    piece_bytes, end_bytes = free_bytes(directory) - leave_bytes, 0
    while piece_bytes >= 4096:
        try:
            os.posix_fallocate(descriptor, end_bytes, piece_bytes)
            end_bytes += piece_bytes
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece_bytes //= 2
        piece_bytes = min(piece_bytes, free_bytes(directory) - leave_bytes)


def assert_refused(outcome: tuple[int, str, str], *reasons: str) -> None:
    """Assert one line on stderr that names each reason, and nothing measured."""
    code, out, err = outcome
    assert code == 1, err
    assert err.startswith("tierzero-nvme-tune: ")
    assert err.count("\n") == 1
    assert "ahead is" not in out
    for reason in reasons:
        assert reason in err


def test_a_missing_directory(run: Run, tmp_path: Path) -> None:
    assert_refused(run(tmp_path / "no", *BRIEF), "no does not exist", "mkdir -p")


def test_a_file_for_a_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused(run(tmp_path / "file", *BRIEF), "is not a directory")


def test_a_directory_given_twice_is_measured_once(run: Run, disk: Path) -> None:
    link = disk / "link"
    target = disk / "real"
    target.mkdir()
    link.symlink_to(target)
    code, out, _ = run(target, link, "--nvme_dir", target, *BRIEF, "--no_write")
    assert code == 0
    assert out.count("is the same directory as") == 2
    assert "the fastest of them" not in out


def test_a_read_only_file_system(run: Run, tmp_path: Path) -> None:
    with mounted(tmp_path / "ro", "tmpfs", "ro", "size=1g") as directory:
        assert_refused(
            run(directory, *BRIEF), "cannot be measured", os.strerror(errno.EROFS), "name another"
        )


def test_a_directory_that_this_user_may_not_write(run: Run) -> None:
    parent = Path(tempfile.mkdtemp(dir="/var/tmp"))  # where any user may look
    directory = parent / "theirs"
    directory.mkdir(mode=0o555)
    parent.chmod(0o755)
    user = os.geteuid()
    run(parent / "no", *BRIEF)  # another user may not import what is not loaded yet
    try:
        if user == 0:  # root may write everywhere
            os.seteuid(65534)
        assert_refused(run(directory, *BRIEF), "Permission denied", "give this user the right")
    finally:
        os.seteuid(user)
        shutil.rmtree(parent)


def test_a_full_disk(run: Run, small: Path) -> None:
    with filled(small, 0):
        assert_refused(run(small, *BRIEF), "has 0 bytes free", "free some space")


def test_one_megabyte_free(run: Run, small: Path) -> None:
    with filled(small, MIB):
        assert_refused(run(small, *BRIEF), "bytes free, and measuring takes at least", "67108864")
    assert free_bytes(small) > 100 * MIB


def test_little_space_makes_a_small_scratch_file(run: Run, small: Path) -> None:
    before = free_bytes(small)
    code, out, _ = run(small, "--seconds", "0.2", "--max-write", "500M")
    assert code == 0
    assert "little space is free: the scratch file has" in out
    assert free_bytes(small) == before


def test_a_disk_that_another_fills_meanwhile(small: Path) -> None:
    """Space is reserved at the start, so that whoever fills the disk later disturbs nothing."""
    filler = small / "filler"

    def fill_it(directory: Path, phase: str, standing: object) -> None:
        if not filler.exists():
            with filler.open("wb") as file:
                fill(file.fileno(), small, 0)
            assert free_bytes(small) < 4096

    try:
        result = tune(Request((small,), 0.2, 10**9, 16 * MIB, (Workload.WRITE,)), fill_it)
        assert free_bytes(small) > 30 * MIB  # what the scratch file held
    finally:
        filler.unlink()
    assert result.directories[0].chosen is not None


def test_memory_is_no_disk(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text("{}")
    with mounted(tmp_path / "memory", "tmpfs", "size=256m") as directory:
        code, out, _ = run(directory, *BRIEF, "--no_write")
        assert code == 0
        assert "which is memory" in out
        refused = run(directory, *BRIEF, "--apply", config)
        assert_refused(refused, "--apply is refused", "which is memory")
    assert config.read_text() == "{}"


def test_two_at_once_finish_and_say_so(disk: Path) -> None:
    both = threading.Barrier(2, timeout=60)

    def meet(directory: Path, phase: str, standing: object) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            if phase.startswith("writing"):
                both.wait()

    only_reads = (Workload.READ,)
    request = Request((disk,), seconds=0.2, half_bytes=16 * MIB, workloads=only_reads)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(tune(request, meet))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for result in results:
        assert any("another tuner is measuring" in line for line in result.directories[0].notices)
    alone = tune(request, lambda directory, phase, standing: None)
    assert alone.directories[0].notices == []


def test_killed_midway_leaves_nothing(small: Path) -> None:
    before = free_bytes(small)
    command = [sys.executable, "-u", str(SCRIPT), str(small), "--seconds", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "ahead is" in line:
                break
        assert free_bytes(small) < before - 32 * MIB
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in small.iterdir()] == ["lost+found"]
    pause, tries = threading.Event(), 600
    while free_bytes(small) != before and tries:  # the kernel ends what was with the disk
        pause.wait(0.05)
        tries -= 1
    assert free_bytes(small) == before


def test_interrupted_says_so_in_one_line(small: Path) -> None:
    command = [sys.executable, "-u", str(SCRIPT), str(small), "--seconds", "5"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "ahead is" in line:
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err == "tierzero-nvme-tune: interrupted; nothing was left behind\n"


@pytest.mark.skipif(no_gpu() is None, reason="there is a GPU here")
def test_gpu_without_one_is_refused(run: Run, disk: Path) -> None:
    assert_refused(run(disk, *BRIEF, "--gpu"), "--gpu: there is no GPU", "leave --gpu out")


@pytest.mark.gpu
def test_the_path_to_a_gpu(run: Run, disk: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    code, out, err = run(disk, "--seconds", "4", "--gpu", "--json", found)
    assert code == 0, err
    (directory,) = json.loads(found.read_text())["directories"]
    assert directory["gpu"]["mix"]["rate"]["median"] > 0
    assert "mix by way of the GPU" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name a directory"),
        (["{dir}", "--no_read", "--no_write"], "leave nothing to measure"),
        (["{dir}", "--io_size", "12Q"], "write one such as 400M"),
        (["{dir}", "--max-write", "infGB"], "write one such as 400M (binary), 20GB"),
        (["{dir}", "--seconds", "0"], "cannot be used"),
        (["{dir}", "--report", "x.pdf"], "must end in .png or .html"),
        (["{dir}", "--loops", "0"], "at least one round"),
    ],
)
def test_wrong_options(arguments: list[str], reason: str, run: Run, tmp_path: Path) -> None:
    code, _, err = run(*(argument.format(dir=tmp_path) for argument in arguments))
    assert code == 2
    assert reason in err


def test_what_cannot_be_written_is_said_first(run: Run, tmp_path: Path) -> None:
    there = tmp_path / "no" / "x.json"
    assert_refused(run(tmp_path, *BRIEF, "--json", there), "is no directory")
    assert_refused(run(tmp_path, *BRIEF, "--apply", there), "cannot be read")
    bad = tmp_path / "bad.json"
    bad.write_text('{"aio": 5}')
    assert_refused(run(tmp_path, *BRIEF, "--apply", bad), "aio is 5, not an object")
    assert bad.read_text() == '{"aio": 5}'
