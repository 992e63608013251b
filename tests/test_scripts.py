"""scripts/ as a user meets them: what they say, what they leave behind, what they refuse."""

import importlib.util
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
TRAIN = SCRIPTS / "train_lm.py"
LICENSE = str(ROOT / "LICENSE")
# About 180,000 parameters: 3 MB of fp32 parameters, gradients and state.
TINY = ["--hidden", "64", "--layers", "3", "--heads", "2", "--sequence", "16", "--batch", "2"]
BUDGET = ["--host-memory", "1MB"]

Outcome = tuple[int, str, str]  # exit code, stdout, stderr


@pytest.fixture
def train_lm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return train_lm.py as a module, its process-wide settings undone afterwards."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    import train_lm

    return train_lm


@pytest.fixture
def run_here(
    train_lm: ModuleType, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], Outcome]:
    """Return a function that runs the command line in this process."""

    def run(arguments: list[str]) -> Outcome:
        try:
            code = train_lm.main(arguments)
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def assert_refused(outcome: Outcome, *reasons: str) -> None:
    """Assert exit code 2 and exactly one line, on stderr, that names each reason."""
    code, out, err = outcome
    assert code == 2, err
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("train_lm")
    for reason in reasons:
        assert reason in err


def tiny_config(folder: Path, swap: Path, *, sub_group_size: int = 16384, **changes: Any) -> Path:
    """Write the demo's configuration with sub-groups that suit another model."""
    settings = json.loads((SCRIPTS / "configs" / "zero3_nvme.json").read_text())
    settings["zero_optimization"]["sub_group_size"] = sub_group_size
    for name in ("offload_param", "offload_optimizer"):
        settings["zero_optimization"][name]["nvme_path"] = str(swap)
    path = folder / "config.json"
    path.write_text(json.dumps({**settings, **changes}))
    return path


# What was given is wrong.


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (["--text", "{tmp}/empty"], ["empty", "holds no text"]),
        (["--text", "{tmp}/missing"], ["missing does not exist"]),
        (["--text", "{tmp}/short.txt"], ["holds 5 bytes", "at least 65"]),
        (["--text", "{tmp}/binary"], ["holds no text"]),
        (["--text", "/dev/zero"], ["a file or a folder"]),
        (["--config", "{tmp}/missing.json"], ["missing.json does not exist"]),
        (["--config", "{tmp}/empty"], ["cannot read", "directory"]),
        (["--config", "{tmp}/broken.json"], ["not valid JSON", "line 2, column 1"]),
        (["--config", "{tmp}/list.json"], ["must hold a JSON object, not list"]),
        (["--config", "{tmp}/binary"], ["not UTF-8"]),
        (["--config", "{tmp}/shape.json"], ['"tiers"', "must be an object"]),
        (["--config", "{tmp}/plain.json", "--nvme-path", "{tmp}"], ["nothing on nvme"]),
        (["--json", "{tmp}/missing/out.json"], ["cannot write --json"]),
        (["--hidden", "65", "--heads", "4"], ["multiple of --heads", "--hidden 64"]),
        (["--steps", "0"], ["--steps", "whole number from 1"]),
        (["--layers", "many"], ["--layers", "whole number"]),
        (["--dtype", "fp64"], ["--dtype", "fp64"]),
        (["--surprise"], ["--surprise"]),
    ],
)
def test_what_cannot_be_used_is_one_line(
    arguments: list[str],
    reasons: list[str],
    tmp_path: Path,
    run_here: Callable[[list[str]], Outcome],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary").write_bytes(b"\0\xff" * 1000)
    (tmp_path / "broken.json").write_text('{"optimizer":\n')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "shape.json").write_text('{"tiers": 3}')
    (tmp_path / "plain.json").write_text("{}")
    outcome = run_here([argument.format(tmp=tmp_path) for argument in arguments])
    assert_refused(outcome, *reasons)


@pytest.mark.parametrize("place", ["{tmp}/missing", "{tmp}/file", "/proc"])
def test_an_unusable_swap_folder_is_one_line(
    place: str, tmp_path: Path, run_here: Callable[[list[str]], Outcome]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    place = place.format(tmp=tmp_path)
    arguments = [*TINY, *BUDGET, "--text", LICENSE, "--nvme-path", place]
    assert_refused(run_here(arguments), place)


def test_an_unknown_key_is_one_line(
    tmp_path: Path, run_here: Callable[[list[str]], Outcome]
) -> None:
    config = tiny_config(tmp_path, tmp_path, optimiser={})
    assert_refused(run_here([*TINY, "--text", LICENSE, "--config", str(config)]), "optimiser")


def test_a_disk_too_small_for_the_plan_is_one_line(
    tmp_path: Path, run_here: Callable[[list[str]], Outcome]
) -> None:
    # 640 G parameters on meta: some 10 TB of state, which is planned and not tried.
    config = tiny_config(tmp_path, tmp_path, sub_group_size=2**30)
    size = ["--hidden", "16384", "--layers", "200", "--host-memory", "64GB", "--meta"]
    outcome = run_here([*size, "--text", LICENSE, "--config", str(config)])
    assert_refused(outcome, str(tmp_path), "are free")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


# It runs.


def start(arguments: list[str], *launcher: str) -> subprocess.Popen[str]:
    """Start train_lm.py in a process of its own, as the scripts do."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    command = [sys.executable, *launcher, str(TRAIN), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def test_a_tiny_model_trains_through_the_disk(scratch: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, scratch)
    summary_path = tmp_path / "summary.json"
    arguments = [*TINY, *BUDGET, "--steps", "6", "--lr", "1e-2", "--generate", "5", "--meta"]
    arguments += ["--text", LICENSE, "--config", str(config), "--json", str(summary_path)]
    ledger_path, trace_path = tmp_path / "ledger.jsonl", tmp_path / "trace.json"
    arguments += ["--ledger", str(ledger_path), "--trace", str(trace_path)]
    with start(arguments) as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.index("nvme") < out.index("step 1/6") < out.index("step 6/6")
    assert out.index("step 6/6") < out.index("Where the time went") < out.index("sample")
    assert "byte-unigram entropy" in out
    summary = json.loads(summary_path.read_text())
    assert summary["steps"] == len(summary["losses"]) == 6
    assert summary["losses"][-1] < summary["losses"][0]
    assert len(summary["sample"]) > 0
    # A step reads the state of every parameter that is not resident, and writes it back.
    assert summary["nvme_read_bytes"] > 0
    assert summary["nvme_write_bytes"] > 0
    moved = {name: size for name, size in summary["bytes_by_class"].items() if size > 0}
    assert any("read" in name for name in moved)
    assert any("write" in name for name in moved)
    steps = [json.loads(line) for line in ledger_path.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(step["written_bytes_per_token"] > 0 for step in steps)
    events = json.loads(trace_path.read_text())["traceEvents"]
    assert {"M", "X", "b", "e"} <= {event["ph"] for event in events}
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_meta_and_dtype_run_here(
    dtype: str, scratch: Path, tmp_path: Path, run_here: Callable[[list[str]], Outcome]
) -> None:
    config = tiny_config(tmp_path, scratch, gradient_accumulation_steps=2)
    meta = ["--meta"] if dtype == "bf16" else ["--tied"]
    options = [*BUDGET, "--dtype", dtype, *meta, "--steps", "2", "--generate", "0"]
    code, out, err = run_here([*TINY, *options, "--text", LICENSE, "--config", str(config)])
    assert (code, err) == (0, "")
    assert "step 2/2" in out
    assert "sample" not in out
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_cleanly(
    number: signal.Signals, scratch: Path, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, scratch)
    arguments = [*TINY, *BUDGET, "--steps", "1000000", "--text", LICENSE, "--config", str(config)]
    with start(arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step") and " 2/" in line:
                break
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == 128 + number
    assert err.startswith("train_lm: stopped by ")
    assert err.count("\n") == 1
    assert list(scratch.iterdir()) == []


def test_under_a_launcher_only_rank_0_prints(scratch: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, scratch)
    arguments = [*TINY, *BUDGET, "--steps", "2", "--generate", "3"]
    arguments += ["--text", LICENSE, "--config", str(config)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with start(arguments, *launcher) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.count("step 1/2") == 1
    assert out.count("sample") == 1
    assert "rank 0 of 2" in out
    assert list(scratch.iterdir()) == []


# Its parts.


def test_the_text_is_measured_and_cut_into_windows(train_lm: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    (folder / "below").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"bb")
    (folder / "below" / "c.txt").write_bytes(b"aa")
    (folder / ".hidden").write_bytes(b"zz")
    text = train_lm.load_text(folder, 3)
    assert text.content == b"bbaa"
    assert "2 files" in text.origin
    assert text.unigram_entropy() == pytest.approx(math.log(2))
    assert set(text.windows(50, 3, random.Random(0))) == {b"bba", b"baa"}


def test_the_default_text_is_the_standard_library(train_lm: ModuleType) -> None:
    text = train_lm.load_text(None, 64)
    assert len(text.content) > 1_000_000
    assert b"def dataclass(" in text.content
    assert 2.5 < text.unigram_entropy() < 4


def test_options_override_a_copy_of_the_configuration(train_lm: ModuleType) -> None:
    settings = train_lm.read_settings(SCRIPTS / "configs" / "zero3_nvme.json")
    before = json.dumps(settings)
    changed = train_lm.override(
        settings, train_lm.Overrides(batch=3, lr=0.5, dtype="bf16", nvme_path=Path("/x"))
    )
    assert json.dumps(settings) == before
    assert changed["train_micro_batch_size_per_gpu"] == 3
    assert changed["optimizer"]["params"] == {**settings["optimizer"]["params"], "lr": 0.5}
    assert changed["bf16"] == {"enabled": True}
    for name in ("offload_param", "offload_optimizer"):
        assert changed["zero_optimization"][name]["nvme_path"] == "/x"
    settings["tiers"]["nvme"] = [{"path": "/a"}, {"path": "/b"}]
    one = train_lm.override(settings, train_lm.Overrides(nvme_path=Path("/x")))
    assert one["tiers"]["nvme"] == [{"path": "/x"}]  # one folder is one drive


def test_only_the_default_swap_folder_is_made(
    train_lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_options

    monkeypatch.setattr(lm_options, "SCRIPTS", tmp_path / "scripts")
    section = {"device": "nvme", "nvme_path": ".swap"}
    settings = {"zero_optimization": {"offload_param": section, "offload_optimizer": None}}
    train_lm.prepare_swap_folders(settings)
    assert section["nvme_path"] == str(tmp_path / ".swap")
    section["nvme_path"] = str(tmp_path / "elsewhere")
    with pytest.raises(train_lm.UsageError, match="elsewhere is not an existing folder"):
        train_lm.prepare_swap_folders(settings)
    assert [path.name for path in tmp_path.iterdir()] == [".swap"]


# What setup refuses. PATH holds nothing but what each case puts there.

OLD_PYTHON = "#!/bin/sh\nexit 1\n"
BARE_PYTHON = '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\n'


@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        ({}, "Python 3.11 or newer was not found"),
        ({"python3": OLD_PYTHON}, "Python 3.11 or newer was not found"),
        ({"python3": BARE_PYTHON}, "python3 has no ensurepip"),
        ({"uname": "#!/bin/sh\necho Darwin\n"}, "Linux only, and this is Darwin"),
    ],
)
def test_setup_refuses_in_one_line(programs: dict[str, str], reason: str, tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("dirname", "uname"):
        if name not in programs:
            (commands / name).symlink_to(found(name))
    for name, program in programs.items():
        (commands / name).write_text(program)
        (commands / name).chmod(0o755)
    (tmp_path / "scripts").mkdir()
    for name in ("setup.sh", "demo.sh"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    done = subprocess.run(
        [found("bash"), str(tmp_path / "scripts" / "demo.sh")],
        env={"PATH": str(commands)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("setup: ")
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "scripts"]


def found(command: str) -> str:
    path = shutil.which(command)
    assert path is not None
    return path


@pytest.mark.parametrize(
    "script",
    [
        "checkpoint_bench.py",
        "device_bench.py",
        "durable_bench.py",
        "io_bench.py",
        "plan_check.py",
        "step_bench.py",
    ],
)
def test_a_folder_that_is_not_there_ends_in_a_line(script: str, tmp_path: Path) -> None:
    assert_refused_by(script, tmp_path / "none", f"there is no folder {tmp_path / 'none'}")


@pytest.mark.parametrize(
    "script",
    [
        "checkpoint_bench.py",
        "device_bench.py",
        "durable_bench.py",
        "format_study.py",
        "io_bench.py",
        "kernel_bench.py",
        "plan_check.py",
        "step_bench.py",
        "swap_sweep.py",
        "tune_check.py",
    ],
)
def test_a_result_that_could_not_be_written_is_refused_at_once(script: str, tmp_path: Path) -> None:
    file = tmp_path / "none" / "result.json"
    reason = f"--json: {file}: there is no folder {tmp_path / 'none'}: make it"
    assert_refused_by(script, f"--json={file}", reason)


HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
@pytest.mark.parametrize("script", ["step_bench.py", "io_bench.py"])
def test_a_chart_that_could_not_be_drawn_is_refused_at_once(script: str) -> None:
    reason = "--chart: chart.png needs matplotlib, which is not installed: pip install"
    assert_refused_by(script, "--chart=chart.png", reason)


def test_a_configuration_that_is_none_ends_in_a_line(tmp_path: Path) -> None:
    for text, reason in (("{", "is not JSON"), ("[]", "holds list, not an object")):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        assert_refused_by("tune_check.py", tmp_path / "config.json", reason)
    assert_refused_by("tune_check.py", tmp_path / "none.json", "cannot be read: No such file")


def assert_refused_by(script: str, place: Path | str, reason: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), str(place)],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr.splitlines()[-1]


def test_the_smoke_test_refuses_other_options() -> None:
    done = subprocess.run(
        [found("bash"), str(SCRIPTS / "device_smoke.sh"), "--foo"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "scripts/device_smoke.sh --cpu" in done.stdout
