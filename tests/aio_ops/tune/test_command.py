"""The tuner as a user meets it, on a real disk, briefly."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aio_ops.tune import command, report
from aio_ops.tune.tuner import Request, tune
from tests.aio_ops.disks import storage_bytes

SCRIPT = Path(__file__).parents[3] / "scripts" / "nvme_tune.py"
MIB = 1 << 20
BRIEF = ["--seconds", "0.2", "--io_size", "16M"]

Run = Callable[..., tuple[int, str, str]]


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
    (named,) = document["fragment"]["tiers"]["nvme"]  # one of each file system
    assert named["path"] in {str(first), str(second)}
    assert "names one directory of each file system" in out


def test_the_choice_for_two_drives_names_both(
    run: Run, disk: Path, small: Path, tmp_path: Path
) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text("{}")
    found = tmp_path / "found.json"
    code, out, err = run(disk, small, *BRIEF, "--apply", config, "--json", found)
    assert code == 0, err
    document = json.loads(found.read_text())
    merged = json.loads(config.read_text())
    assert {entry["path"] for entry in merged["tiers"]["nvme"]} == {str(disk), str(small)}
    setting = document["together"]["setting"]
    assert merged["aio"]["engine"] == setting["engine"]
    assert merged["aio"]["block_size"] == setting["block_bytes"]
    assert "for all" in out
    assert (tmp_path / "ds_config.json.bak").read_text() == "{}"


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
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from tests.support.pictures import assert_tidy, kept_figures

    request = Request((disk,), seconds=0.3, half_bytes=16 * MIB, sustain_s=0.3)
    result = tune(request, lambda directory, phase, standing: None)
    with pytest.MonkeyPatch.context() as patch:
        figures = kept_figures(patch)
        report.write(result, tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert_tidy(figure, 5)


def test_sizes_are_read_in_binary_and_decimal_units() -> None:
    texts = ("400M", "400MiB", "20GB", "1KB", "1.5k", "7")
    expected = [400 << 20, 400 << 20, 20 * 10**9, 1000, 1536, 7]
    assert [command.size(text) for text in texts] == expected
