"""The tuner as a user meets it: on a real disk, briefly, and on disks that are in some way bad."""

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
from typing import Any

import pytest

from aio_ops.tune import report
from aio_ops.tune.command import main
from aio_ops.tune.gpu import refusal as no_gpu
from aio_ops.tune.settings import Workload
from aio_ops.tune.tuner import Request, tune
from tests.aio_ops.disks import free_bytes, mounted, mounted_ext4, storage_bytes

SCRIPT = Path(__file__).parents[3] / "scripts" / "nvme_tune.py"
MIB = 1 << 20
BRIEF = ["--seconds", "0.2", "--io_size", "16M"]

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


# What it does.


def test_a_brief_run_says_everything(run: Run, disk: Path, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text('{"train_batch_size": 1}')
    found = tmp_path / "found.json"
    page = tmp_path / "tune.html"
    before = storage_bytes()
    code, out, err = run(
        disk, *BRIEF, "--json", found, "--report", page, "--apply", config, "--sustain", "0.3"
    )
    moved = [after - first for after, first in zip(storage_bytes(), before, strict=True)]
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "free" in lines[0]
    assert "at most 100.0 GB are written" in lines[1]
    assert any("; use " in line and "GB/s (" in line for line in lines)
    assert any("the mix is half read, half written" in line for line in lines)
    document = json.loads(found.read_text())
    assert moved[1] >= document["written_bytes"] > 32 * MIB
    assert moved[0] > 16 * MIB
    check_document(document, disk)
    merged = json.loads(config.read_text())
    assert merged["train_batch_size"] == 1
    assert merged["aio"] == document["fragment"]["aio"]
    assert "<table>" in page.read_text()
    assert list(disk.iterdir()) == []


def check_document(document: dict[str, Any], disk: Path) -> None:
    """Assert that the numbers of a result belong together."""
    (found,) = document["directories"]
    assert found["path"] == str(disk)
    assert found["direct"] is True
    assert found["chosen"]["engine"] == document["fragment"]["aio"]["engine"]
    for workload in ("mix", "read", "write"):
        rate = found["workloads"][workload]["rate"]
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]
        assert len(found["workloads"][workload]["settings"]) > 1
    depths = {row["depth"] for row in found["latencies"]}
    assert {1, 4} <= depths
    for row in found["latencies"]:
        times = row["seconds"]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert found["sustained"]["pieces"]


def test_the_limit_of_writes_is_kept(run: Run, disk: Path, tmp_path: Path) -> None:
    before = storage_bytes()[1]
    found = tmp_path / "found.json"
    limit = ["--max-write", "300M", "--sustain", "2"]
    code, _, err = run(disk, *BRIEF, *limit, "--json", found)
    assert code == 0, err
    written = storage_bytes()[1] - before
    document = json.loads(found.read_text())
    assert document["written_bytes"] <= 300 * MIB
    assert written <= 301 * MIB  # the probe of engines writes some blocks
    assert any("--max-write" in line for line in document["verdict"])


@pytest.mark.parametrize(
    ("flag", "measured", "absent"),
    [
        ("--no_write", "read", ["mix", "write"]),
        pytest.param("--no_read", "write", ["mix", "read"], marks=pytest.mark.full),
    ],
)
def test_one_direction_alone(
    flag: str, measured: str, absent: list[str], run: Run, disk: Path, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    code, out, _ = run(
        "--nvme_dir", disk, *BRIEF, flag, "--json", found, "--flush_page_cache", "--verbose",
        "--log_dir", tmp_path / "logs",
    )  # fmt: skip
    assert code == 0
    assert "--flush_page_cache has no effect" in out
    document = json.loads(found.read_text())
    assert list(document["directories"][0]["workloads"]) == [measured]
    assert not any(f"{name} " in document["verdict"][0] for name in absent)
    if measured == "read":  # the half that is read, and nothing else
        assert document["written_bytes"] == 16 * MIB
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["tune.html", "tune.json"]


def test_the_whole_grid_is_measured_beside_the_choice(run: Run, disk: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    code, out, _ = run(disk, *BRIEF, "--no_write", "--exhaustive", "--loops", "2", "--json", found)
    assert code == 0
    (directory,) = json.loads(found.read_text())["directories"]
    sweep = directory["exhausted"]
    assert sweep["rounds"] == 2
    assert sweep["settings"] == len(directory["workloads"]["read"]["settings"])
    assert sweep["verdict"] in out.replace("\n", " ")


def test_two_directories_of_one_disk_share_it(run: Run, disk: Path, tmp_path: Path) -> None:
    first, second = disk / "a", disk / "b"
    first.mkdir()
    second.mkdir()
    found = tmp_path / "found.json"
    code, out, _ = run(first, second, *BRIEF, "--no_write", "--json", found)
    assert code == 0
    assert "lie on one file system: they share its disk" in out
    document = json.loads(found.read_text())
    together = document["together"]
    assert set(together["alone"]) == {str(first), str(second)}
    assert 0 < together["share_of_sum"] < 1.5
    assert "the fastest of them is" in out
    assert document["fragment"]["tiers"]["nvme"][0]["path"] in {str(first), str(second)}


def test_json_to_stdout_is_json_alone(run: Run, disk: Path) -> None:
    code, out, err = run(disk, *BRIEF, "--no_write", "--json", "-")
    assert code == 0
    assert json.loads(out)["fragment"]["aio"]["block_size"] >= 4096
    assert "ahead is" in err


def test_a_step_is_measured_beside_the_mix(
    run: Run, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import tune_check

    config = tmp_path / "ds_config.json"
    section = {"device": "nvme", "nvme_path": str(disk)}
    config.write_text(json.dumps({"zero_optimization": {"offload_optimizer": section, "stage": 3}}))
    with pytest.raises(SystemExit, match="names no tuned setting"):
        tune_check.main([str(config)])
    assert run(disk, *BRIEF, "--no_write", "--apply", config)[0] == 0
    found = tmp_path / "check.json"
    small = ["--layers", "2", "--steps", "1", "--host-memory", "60MB", "--sub-group-size", "262144"]
    code = tune_check.main([str(config), *small, "--least", "0.01", "--json", str(found)])
    assert code == 0
    document = json.loads(found.read_text())
    assert document["share"] == document["steps"][0] / document["mixes"][0] > 0.01
    assert list(disk.iterdir()) == []


def test_help_has_an_example() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    )
    assert "example:\n  tierzero-nvme-tune /nvme0" in done.stdout
    for flag in ("--nvme_dir", "--io_size", "--no_read", "--log_dir", "--flush_page_cache"):
        assert flag in done.stdout


def test_the_picture_is_labelled_and_nothing_overlaps(disk: Path, tmp_path: Path) -> None:
    figure_module = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed")
    figures = []

    class Kept(figure_module.Figure):  # type: ignore[misc,name-defined]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            figures.append(self)

    request = Request((disk,), seconds=0.3, half_bytes=16 * MIB, sustain_s=0.3)
    result = tune(request, lambda directory, phase, standing: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure_module, "Figure", Kept)
        report.write(result, tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    panels = [axes for axes in figure.axes if axes.axison]
    assert len(panels) == 5
    boxes = []
    for axes in panels:
        assert axes.get_xlabel()
        assert "(GB/s)" in axes.get_ylabel() or "(ms)" in axes.get_ylabel()
        assert len([label for label in axes.get_yticklabels() if label.get_text()]) > 1
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label]
        shown = axes.get_window_extent().padded(1)
        texts += [
            label
            for label in axes.get_xticklabels()
            if label.get_text() and shown.containsx(sum(label.get_window_extent().intervalx) / 2)
        ]
        legend = axes.get_legend()
        texts += legend.get_texts() if legend is not None else []
        boxes += [(text.get_text(), text.get_window_extent()) for text in texts]
        boxes += [("the curves", axes.get_window_extent())]
    for index, (name, box) in enumerate(boxes):
        assert figure.bbox.containsx(box.x0), name
        assert figure.bbox.containsx(box.x1), name
        for other, box_other in boxes[index + 1 :]:
            assert not box.overlaps(box_other), f"{name!r} lies over {other!r}"


# What is bad.


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
