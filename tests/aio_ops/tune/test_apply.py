"""Merging the choice into a configuration."""

import copy
import json
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest

from aio_ops.tune import ApplyError, apply, fragment
from aio_ops.tune.apply import check_applicable, merge
from aio_ops.tune.settings import Setting
from zero.config import ConfigError, ConfigWarning, load_config
from zero.config.__main__ import main as check_command

FILES = sorted((Path(__file__).parents[2] / "zero" / "configs").glob("*.json"))
CHOICE = Setting("io_uring", 4 << 20, 16)
ON_THREADS = Setting("threads", 1 << 20, 8)


def settings_of(document: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return load_config(document).settings(1)


def accepted(file: Path) -> bool:
    try:
        settings_of(json.loads(file.read_text()))
    except ConfigError:
        return False
    return True


def test_most_shapes_are_tried() -> None:
    assert sum(map(accepted, FILES)) > 15


@pytest.mark.parametrize("choice", [CHOICE, ON_THREADS])
@pytest.mark.parametrize("file", list(filter(accepted, FILES)), ids=lambda file: file.stem)
def test_every_shape_of_configuration_takes_the_choice(
    file: Path, choice: Setting, tmp_path: Path
) -> None:
    document = json.loads(file.read_text())
    merged = merge(document, fragment(choice, [tmp_path]))
    settings = settings_of(merged)
    aio = settings.aio
    assert (aio.engine, aio.block_bytes) == (choice.engine, choice.block_bytes)
    assert (aio.queue_depth, aio.thread_count) == (choice.queue_depth, choice.thread_count)
    assert [entry.path for entry in settings.tiers.nvme] == [tmp_path]
    kept = copy.deepcopy(merged)
    for section in ("aio", "tiers", "zero_optimization"):
        document.pop(section, None)
        kept.pop(section, None)
    assert kept == document


def test_check_accepts_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds_config.json"
    named = next(file for file in FILES if file.stem == "trainer_zero3_nvme")
    document = {**json.loads(named.read_text()), "train_micro_batch_size_per_gpu": 1}
    file.write_text(json.dumps(document))
    apply(file, fragment(CHOICE, [tmp_path]))
    assert check_command(["check", str(file)]) == 0
    captured = capsys.readouterr()
    assert ": valid" in captured.out
    assert "has no effect: tiers.nvme names" not in captured.err


def test_what_the_configuration_says_of_the_directory_stays(tmp_path: Path) -> None:
    own = {"path": str(tmp_path), "capacity": "5GB"}
    document = {"tiers": {"host_memory": "8MB", "nvme": [own, {"path": "/other"}]}}
    before = copy.deepcopy(document)
    merged = merge(document, fragment(CHOICE, [tmp_path]))
    assert merged["tiers"] == {"host_memory": "8MB", "nvme": [own]}
    assert document == before


def test_a_key_under_its_other_name_goes(tmp_path: Path) -> None:
    merged = merge({"aio": {"thread_count": 1, "use_gds": False}}, fragment(CHOICE, [tmp_path]))
    assert "thread_count" not in merged["aio"]
    assert merged["aio"]["use_gds"] is False


def test_the_file_keeps_its_mode_and_a_link_stays_one(tmp_path: Path) -> None:
    file, link = tmp_path / "real.json", tmp_path / "link.json"
    file.write_text('{"train_batch_size": 1, "name": "ü"}')
    file.chmod(0o640)
    link.symlink_to(file)
    apply(link, fragment(CHOICE, [tmp_path]))
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert json.loads(file.read_text())["name"] == "ü"
    assert stat.S_IMODE((tmp_path / "real.json.bak").stat().st_mode) == 0o640
    names = ["link.json", "real.json", "real.json.bak"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_every_file_that_is_replaced_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "real.json"
    file.write_text("{}")
    kept = apply(file, fragment(CHOICE, [tmp_path]))
    assert kept == tmp_path / "real.json.bak"
    assert kept.read_text() == "{}"
    first = file.read_text()
    assert apply(file, fragment(CHOICE, [tmp_path])) is None  # it says so already
    assert file.read_text() == first
    again = apply(file, fragment(ON_THREADS, [tmp_path]))
    assert again == tmp_path / "real.json.bak2"
    assert again.read_text() == first
    assert kept.read_text() == "{}"


def test_all_directories_are_named_and_keep_what_is_said_of_them(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    own = {"path": str(second), "capacity": "5GB"}
    offload = {"device": "nvme", "nvme_path": str(second)}
    document = {
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "tiers": {"nvme": [own, {"path": "/other"}]},
    }
    merged = merge(document, fragment(CHOICE, [first, second], bursts=True))
    assert merged["tiers"]["nvme"] == [{"path": str(first)}, own]
    assert merged["tiers"]["io_schedule"] == "measure"
    assert merged["zero_optimization"]["offload_optimizer"] == offload
    settings = settings_of(merged)
    assert [entry.path for entry in settings.tiers.nvme] == [first, second]
    assert settings.tiers.measures_schedule


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{'a': 1}", "is not strict JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ("[]", "holds no JSON object"),
        ('{"aio": 3}', "aio is 3, not an object"),
        ('{"tiers": [1]}', r"tiers is \[1\], not an object"),
        ('{"tiers": {"nvme": 5}}', "tiers.nvme is 5, not a list"),
        ('{"zero_optimization": 3}', "zero_optimization is 3, not an object"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_merged_stays_as_it_is(
    text: str | None, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    for refuse in (check_applicable, apply):
        with pytest.raises(ApplyError, match=reason):
            refuse(file, fragment(CHOICE, [tmp_path]))
    assert (file.read_text() if file.exists() else None) == text


def test_a_failure_midway_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")

    def fail(self: Path, target: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        apply(file, fragment(CHOICE, [tmp_path]))
    assert file.read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
