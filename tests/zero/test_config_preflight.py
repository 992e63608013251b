"""Looking at a directory before anything is written to it."""

import errno
import os
import warnings
from pathlib import Path

import pytest

from aio_ops.file_systems import find_mount
from zero.config import ConfigError, PreflightWarning, load_config, preflight

MOUNTS = r"""21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:30 / /dev/shm rw - tmpfs tmpfs rw
23 21 0:31 / /mnt/data\040set rw - xfs /dev/nvme0n1 rw
24 21 0:32 / /mnt/nfs rw shared:1 - nfs4 server:/export rw
25 24 0:33 / /mnt/nfs/fast rw - ext4 /dev/nvme1n1 rw
26 21 0:34 / /mnt/nfs rw - tmpfs cover rw
malformed line
27 21 0:35 / /over rw - overlay overlay rw
"""


def mounted(monkeypatch: pytest.MonkeyPatch, file_system: str) -> None:
    """Let every directory lie on a file system of this type."""
    monkeypatch.setattr(
        "zero.config.swap_directory._mount_of", lambda directory: (file_system, "device")
    )


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/", ("ext4", "/dev/vda")),
        ("/home/x", ("ext4", "/dev/vda")),
        ("/dev/shm", ("tmpfs", "tmpfs")),
        ("/dev/shmem", ("ext4", "/dev/vda")),
        ("/mnt/data set/a", ("xfs", "/dev/nvme0n1")),
        ("/mnt/nfs/fast/x", ("ext4", "/dev/nvme1n1")),
        ("/mnt/nfs/x", ("tmpfs", "cover")),
        ("/over/x", ("overlay", "overlay")),
    ],
)
def test_the_innermost_and_latest_mount_counts(path: str, found: tuple[str, str]) -> None:
    assert find_mount(MOUNTS, path) == found


def test_no_mount_is_unknown() -> None:
    assert find_mount("", "/x") == ("unknown", "unknown")


def test_a_good_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, "ext4")
    report = preflight(tmp_path, 1)
    assert report.path == tmp_path
    assert (report.file_system, report.device) == ("ext4", "device")
    assert report.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_direct_transfers_are_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, "ext4")
    real = os.open

    def no_direct(path: object, flags: int, *rest: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", no_direct)
    assert preflight(tmp_path, 1).direct is False


def test_refusals_name_path_value_and_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, "ext4")
    missing = tmp_path / "no"
    with pytest.raises(FileNotFoundError, match=rf"nvme_path {missing} does not exist .*mkdir -p"):
        preflight(missing, 1)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match=rf"nvme_path {file} is not a directory; name"):
        preflight(file, 1)
    with pytest.raises(OSError, match=rf"nvme_path {file / 'x'}: Not a directory; name"):
        preflight(file / "x", 1)
    free = preflight(tmp_path, 1).free_bytes
    with pytest.raises(
        OSError, match=rf"nvme_path {tmp_path}: the plan needs {free * 4} bytes, \d+ ar"
    ) as caught:
        preflight(tmp_path, free * 4)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("error", "remedy"),
    [(errno.EACCES, "give user"), (errno.EROFS, "a file system that is mounted for writing")],
)
def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, remedy: str
) -> None:
    mounted(monkeypatch, "ext4")

    def refuse(*arguments: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        OSError, match=rf"nvme_path {tmp_path} cannot be written: .*; .*{remedy}"
    ) as caught:
        preflight(tmp_path, 1)
    assert caught.value.errno == error


@pytest.mark.parametrize("file_system", ["nfs4", "cifs", "lustre", "9p", "fuse.sshfs"])
def test_network_file_systems_are_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str
) -> None:
    mounted(monkeypatch, file_system)
    with pytest.raises(ConfigError, match=rf"lies on {file_system}, a network file system; name"):
        preflight(tmp_path, 1)
    assert preflight(tmp_path, 1, allow_any_file_system=True).file_system == file_system


@pytest.mark.parametrize(
    ("file_system", "text"), [("tmpfs", "which is memory"), ("overlay", "layered file system")]
)
def test_memory_and_layered_file_systems_warn_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str, text: str
) -> None:
    mounted(monkeypatch, file_system)
    with pytest.warns(PreflightWarning, match=rf"lies on {file_system}, .*{text}"):
        preflight(tmp_path, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preflight(tmp_path, 1, allow_any_file_system=True)


def test_the_key_that_allows_reaches_the_settings() -> None:
    nvme = [{"path": "/n", "allow_any_file_system": True}]
    settings = load_config({"zero_optimization": {"stage": 3}, "tiers": {"nvme": nvme}}).settings(1)
    assert settings.tiers.nvme[0].allow_any_file_system is True
