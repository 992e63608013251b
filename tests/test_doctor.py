"""The doctor on this machine as it is, and on machines that lack something."""

import contextlib
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aio_ops.disk import Disk, pci_link
from aio_ops.doctor import machine as machine_checks
from aio_ops.doctor.command import main
from aio_ops.doctor.rows import Row, Status, ok, run
from aio_ops.pinned import open_cuda
from tests.aio_ops.disks import mounted, mounted_ext4
from tests.support.configs import make_config
from zero import machine
from zero.doctor import host_memory

SCRIPT = Path(__file__).parents[1] / "scripts" / "doctor.py"
MACHINE = {
    "system", "Python", "tierzero", "native I/O", "CPU", "memory lock", "pinned memory",
    "huge pages", "shared memory", "limits", "io_uring", "kernel AIO", "GPU", "GDS", "packages",
    "torch", "native kernels", "host memory", "threads", "distributed",
}  # fmt: skip

Diagnose = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def diagnose(capsys: pytest.CaptureFixture[str]) -> Diagnose:
    """Return a function that gives the exit code and the rows by what they are about."""

    def diagnose_it(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        code = main([*(str(argument) for argument in arguments), "--json"])
        document = json.loads(capsys.readouterr().out)
        assert document["starts"] is (code == 0)
        return code, {row["what"]: row for row in document["rows"]}

    return diagnose_it


def write_config(folder: Path, **changes: Any) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps({**make_config(optimizer="nvme", **changes)}))
    return path


# This machine.


def test_the_script_says_all_on_one_screen(scratch: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for what in MACHINE:
        assert f" {what} " in done.stdout
    assert f"disk {scratch}" in done.stdout
    assert "training would start: " in done.stdout
    assert len(done.stdout.splitlines()) < 45
    assert list(scratch.iterdir()) == []


def test_json_has_a_remedy_wherever_something_is_not_well(
    diagnose: Diagnose, scratch: Path
) -> None:
    code, rows = diagnose(scratch)
    assert code == 0
    assert set(rows) == MACHINE | {f"disk {scratch}"}
    for row in rows.values():
        assert row["status"] in ("OK", "WARN", "FAIL")
        assert row["found"]
        assert bool(row["remedy"]) == (row["status"] != "OK")
    found = rows[f"disk {scratch}"]["found"]
    assert "direct I/O at multiples of" in found
    assert found.count("GB/s") == 3


def test_a_directory_under_two_names_is_one_row(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, diagnose: Diagnose
) -> None:
    monkeypatch.chdir(scratch.parent)
    config = write_config(tmp_path, nvme_path=str(scratch))
    _, rows = diagnose(scratch.name, scratch, "--config", config)
    assert [what for what in rows if what.startswith("disk ")] == [f"disk {scratch.name}"]


def test_interrupted_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupt(_directory: Path) -> Row:
        raise KeyboardInterrupt

    monkeypatch.setattr("aio_ops.doctor.command.disk", interrupt)
    assert main([str(tmp_path)]) == 130
    assert capsys.readouterr() == ("", "tierzero-doctor: interrupted; nothing was left behind\n")


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "example:\n  tierzero-doctor /nvme0 --config" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["tierzero-doctor", "tierzero-nvme-tune"])
def test_the_commands_are_installed(name: str) -> None:
    found = importlib.metadata.entry_points(group="console_scripts", name=name)
    if not found:
        pytest.skip("tierzero is used from its sources: no commands are installed")
    (entry,) = found
    assert entry.load().__module__ in {"aio_ops.doctor.command", "aio_ops.tune.command"}


# Disks.


def test_a_missing_directory_fails(diagnose: Diagnose, tmp_path: Path) -> None:
    code, rows = diagnose(tmp_path / "no")
    assert code == 1
    row = rows[f"disk {tmp_path / 'no'}"]
    assert (row["status"], "does not exist" in row["found"]) == ("FAIL", True)
    assert "mkdir -p" in row["remedy"]


def test_a_read_only_disk_fails(diagnose: Diagnose, tmp_path: Path) -> None:
    with mounted(tmp_path / "ro", "tmpfs", "ro") as directory:
        code, rows = diagnose(directory)
    assert code == 1
    assert "cannot be written: Read-only" in rows[f"disk {directory}"]["found"]


def test_memory_for_a_disk_warns(diagnose: Diagnose, tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "tmpfs", "size=256m") as directory:
        code, rows = diagnose(directory)
    assert code == 0
    assert rows[f"disk {directory}"]["status"] == "WARN"
    assert "which is memory" in rows[f"disk {directory}"]["remedy"]


def test_a_full_disk_fails(diagnose: Diagnose, tmp_path: Path) -> None:
    with mounted_ext4(tmp_path, 8 << 20) as directory:
        code, rows = diagnose(directory)
        assert code == 0
        assert "too full to be measured" in rows[f"disk {directory}"]["found"]
        with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        code, rows = diagnose(directory)
    assert code == 1
    row = rows[f"disk {directory}"]
    assert "No space left" in row["found"]
    assert "free some space" in row["remedy"]


def test_a_pci_link_is_read_from_the_nearest_device_above(tmp_path: Path) -> None:
    block = tmp_path / "0000:01:00.0" / "nvme" / "nvme0" / "nvme0n1"
    block.mkdir(parents=True)
    assert pci_link(block)[0] is None
    device = tmp_path / "0000:01:00.0"
    (device / "current_link_speed").write_text("16.0 GT/s PCIe\n")
    (device / "current_link_width").write_text("4\n")
    link, rate = pci_link(block)
    assert link == "PCIe 16.0 GT/s x4"
    assert rate == pytest.approx(7.876e9)


@pytest.mark.parametrize(
    ("file_system", "said"),
    [("nfs4", "network"), ("tmpfs", "memory"), ("overlay", "layered"), ("ext4", None)],
)
def test_kinds_of_file_systems_that_are_no_local_disk(file_system: str, said: str | None) -> None:
    disk = Disk(Path("/x"), file_system, "device", (), None, None, None, 1, 1)
    warning = disk.warning()
    assert (warning is None) == (said is None)
    assert said is None or said in str(warning)


# The machine.


@contextlib.contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    """Lower a limit of this process for the length of a block."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Be nobody for the length of a block, where this process is root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_memory_that_may_not_be_locked(tmp_path: Path) -> None:
    machine_checks.memory_lock()
    with limited(resource.RLIMIT_MEMLOCK, 64 << 10), without_rights():
        assert not machine_checks.may_lock_anything()
        lock, pinned = machine_checks.memory_lock(), machine_checks.pinned()
    assert lock.status is Status.WARN
    assert "64 KiB" in lock.found
    assert "--ulimit memlock=-1" in lock.remedy
    assert pinned.status is Status.WARN
    assert "64 MiB cannot be locked" in pinned.found


def test_limits_of_files() -> None:
    with limited(resource.RLIMIT_NOFILE, 512):
        row = machine_checks.limits()
    assert (row.status, "ulimit -n" in row.remedy) == (Status.WARN, True)
    with limited(resource.RLIMIT_FSIZE, 1 << 40):
        row = machine_checks.limits()
    assert (row.status, "ulimit -f" in row.remedy) == (Status.FAIL, True)


def test_no_more_descriptors_is_said_of_the_engines() -> None:
    free = os.dup(0)  # the lowest number that is free
    os.close(free)
    with limited(resource.RLIMIT_NOFILE, free):
        rows = [machine_checks.io_uring()]
    assert rows[0].status is Status.WARN
    assert "Too many open files" in rows[0].found
    assert machine_checks.io_uring().status is Status.OK or machine_checks.io_uring().remedy


@pytest.mark.parametrize("required", ["1", "0"])
def test_a_native_module_that_does_not_load(required: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aio_ops._native", None)
    monkeypatch.delattr("aio_ops._native", raising=False)
    monkeypatch.setenv("TIERZERO_REQUIRE_NATIVE", required)
    row = machine_checks.native()
    assert row.status is (Status.FAIL if required == "1" else Status.WARN)
    assert "C++20" in row.remedy
    assert "ImportError" in row.found or "ModuleNotFoundError" in row.found


def test_without_torch_the_rest_is_still_said() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from aio_ops.doctor.command import main; sys.exit(main(['--json']))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = {row["what"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["package zero"]["status"] == "FAIL"
    assert "torch" in rows["package zero"]["found"]
    assert rows["io_uring"]["found"]
    assert "torch" not in rows


def test_a_check_that_cannot_be_made_is_a_row() -> None:
    def broken() -> Row:
        raise FileNotFoundError(2, "No such file", "/proc/x")

    rows = list(run([("this", broken), ("that", lambda: ok("that", "fine"))]))
    assert [row.status for row in rows] == [Status.WARN, Status.OK]
    assert "could not be found out: FileNotFoundError" in rows[0].found


@pytest.mark.parametrize(
    ("listing", "folder", "limit_name", "usage_name", "version"),
    [
        ("0::/job\n", "job", "memory.max", "memory.current", "cgroup v2"),
        ("5:memory:/job\n", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes",
         "cgroup v1"),
    ],
)  # fmt: skip
def test_the_cgroup_that_bounds_memory_is_named(
    listing: str,
    folder: str,
    limit_name: str,
    usage_name: str,
    version: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "list").write_text(listing)
    directory = tmp_path / "root" / folder
    directory.mkdir(parents=True)
    (directory / limit_name).write_text("900000000\n")
    (directory / usage_name).write_text("100000000\n")
    monkeypatch.setattr(machine, "_CGROUP_LIST", tmp_path / "list")
    monkeypatch.setattr(machine, "_CGROUP_ROOT", tmp_path / "root")
    row = host_memory()
    assert row.status is Status.WARN
    assert "0.8 GB can be used" in row.found
    assert f"{version} allows 0.9 GB" in row.found


@pytest.mark.gpu
def test_a_gpu_and_its_link_are_named(diagnose: Diagnose) -> None:
    _, rows = diagnose()
    cuda, _ = open_cuda(0)
    assert cuda is not None
    assert cuda.pci_bus_id in rows["GPU"]["found"]
    assert "registered with CUDA" in rows["pinned memory"]["found"]


# A configuration.


def test_a_good_configuration_and_its_disk(
    diagnose: Diagnose, scratch: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, nvme_path=str(scratch), host_memory="8MB")
    code, rows = diagnose("--config", config)
    assert code == 0
    assert set(rows) == MACHINE | {
        "configuration", "host budget", "engine", f"swap {scratch}", f"disk {scratch}"
    }  # fmt: skip
    assert "valid, for world size 1" in rows["configuration"]["found"]
    assert "preflight passes" in rows[f"swap {scratch}"]["found"]


@pytest.mark.parametrize(
    ("changes", "what", "reason"),
    [
        ({"nvme_path": "/nowhere/at/all"}, "swap /nowhere/at/all", "does not exist"),
        ({"nvme_path": "{dir}", "host_memory": "9000GB"}, "host budget", "9 TB, and"),
        ({"nvme_path": "{dir}", "engine": "warp"}, "configuration", "warp"),
    ],
)
def test_what_a_configuration_asks_for_in_vain(
    changes: dict[str, str], what: str, reason: str, diagnose: Diagnose, tmp_path: Path
) -> None:
    changes = {name: value.format(dir=tmp_path) for name, value in changes.items()}
    code, rows = diagnose("--config", write_config(tmp_path, **changes))
    assert code == 1
    assert rows[what]["status"] == "FAIL"
    assert reason in rows[what]["found"]
    assert rows[what]["remedy"]


def test_a_network_disk_is_refused_as_training_would(
    diagnose: Diagnose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero.config.swap_directory._mount_of", lambda directory: ("nfs4", "x"))
    code, rows = diagnose("--config", write_config(tmp_path, nvme_path=str(tmp_path)))
    assert code == 1
    assert "a network file system" in rows[f"swap {tmp_path}"]["found"]
