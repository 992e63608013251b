"""The sweep of ways to page: it measures what training moves, goes on after a kill, and says no."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.aio_ops.disks import mounted
from zero.config.__main__ import main as config_command

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "swap_sweep.py"
TINY = ["200K", "--steps", "1", "--sub-groups", "16K", "--slots", "2", "3"]
TINY += ["--formats", "exact", "--seconds", "60"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return swap_sweep.py as a module, in a working directory of its own."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.chdir(tmp_path)
    import swap_sweep

    return swap_sweep


@pytest.fixture
def run(sweep: ModuleType, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command here: exit code, stdout, stderr."""

    def run_it(*arguments: str | Path) -> tuple[int, str, str]:
        try:
            code = sweep.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            text = "" if isinstance(end.code, int | None) else str(end.code)
            return code, "", capsys.readouterr().err + text
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_it


def test_training_is_swept_and_the_best_applied(run: Run, scratch: Path, tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    section = {"device": "nvme", "nvme_path": str(scratch)}
    config.write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 8,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "zero_optimization": {"stage": 3, "offload_optimizer": section},
            }
        )
    )
    before = config.read_text()
    found, page = tmp_path / "found.json", tmp_path / "sweep.html"
    code, out, err = run(
        config, "--model", *TINY, "--json", found, "--report", page, "--apply", config
    )
    assert (code, err) == (0, "")
    document = json.loads(found.read_text())
    assert "s of update and waits" in out
    assert len(document["cases"]) == 2 * 2  # budgets, slots
    for case in document["cases"]:
        assert len(case["steps"]) == 3
        for step in case["steps"]:
            assert step["read_bytes"] > 0
            assert step["write_bytes"] > 0
            assert 0 < step["paging_seconds"] < step["seconds"]
    merged = json.loads(config.read_text())
    assert merged["tiers"]["host_memory"] == document["chosen"]["host_bytes"]
    assert merged["tiers"]["slot_count"] == document["chosen"]["slot_count"]
    assert merged["zero_optimization"]["offload_optimizer"] == section
    assert merged["train_batch_size"] == 8
    assert (tmp_path / "ds_config.json.bak").read_text() == before
    assert config_command(["check", str(config)]) == 0
    assert "<table>" in page.read_text()
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("more", [[], ["--offload-param"]])
def test_the_synthetic_loop_moves_what_training_moves(
    more: list[str], run: Run, scratch: Path, tmp_path: Path
) -> None:
    moved = []
    for loop in ([], ["--synthetic"]):
        found = tmp_path / "found.json"
        results = tmp_path / f"{len(loop)}.jsonl"
        code, _, err = run(
            *TINY, "--dir", scratch, "--dtype", "fp32", "--json", found, "--results", results,
            *loop, *more,
        )  # fmt: skip
        assert code == 0, err
        cases = json.loads(found.read_text())["cases"]
        moved.append(
            {
                (case["host_bytes"], case["slot_count"]): (
                    case["steps"][-1]["read_bytes"],
                    case["steps"][-1]["write_bytes"],
                )
                for case in cases
            }
        )
    trained, imitated = moved
    assert trained.keys() == imitated.keys()
    for key, (read_bytes, write_bytes) in trained.items():
        assert write_bytes == imitated[key][1] > 0
        # What is read ahead may still be in its slot when it is needed again.
        assert imitated[key][0] == pytest.approx(read_bytes, rel=0.1)


def test_killed_midway_it_goes_on(run: Run, scratch: Path, tmp_path: Path) -> None:
    arguments = [
        *TINY,
        "--synthetic",
        "--dir",
        str(scratch),
        "--results",
        str(tmp_path / "r.jsonl"),
    ]
    # The script imports its neighbours, which a safe path would hide.
    environment = {key: each for key, each in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = [sys.executable, "-u", str(SCRIPT), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "of update and waits" in line:
                break
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list(scratch.iterdir()) == []
    with (tmp_path / "r.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"case": {"host_by')  # as if killed while it wrote
    kept = (tmp_path / "r.jsonl").read_text().count("\n") - 1
    assert kept >= 1
    code, out, _ = run(*arguments)
    assert code == 0
    assert f"{kept} measurements are in" in out
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()[1:]]
    assert len(rows) == 4 * 3  # none is made twice
    code, out, _ = run(*arguments)
    assert code == 0
    assert "12 measurements are in" in out


def test_time_that_is_over_is_said(run: Run, scratch: Path) -> None:
    short = [*TINY[:-1], "0.001"]
    code, out, _ = run(*short, "--synthetic", "--dir", scratch)
    assert code == 0
    assert "3 of 4 cases were not measured: start it again" in out


def test_a_function_gives_model_and_batch(
    run: Run, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def make():\n"
        "    layers = [torch.nn.Linear(64, 64) for _ in range(8)]\n"
        "    return torch.nn.Sequential(*layers), torch.ones(2, 64)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    more = ["--steps", "1", "--sub-groups", "4K", "--slots", "2", "--budgets", "50%"]
    code, out, err = run("my_models:make", "--dir", scratch, *more)
    assert code == 0, err
    assert "use " in out


def test_a_budget_that_is_too_small_is_refused_with_its_reason(run: Run, scratch: Path) -> None:
    code, out, _ = run(*TINY, "--dir", scratch, "--synthetic", "--budgets", "1K")
    assert code == 1
    assert "nothing could be measured" in out


def test_the_picture_is_tidy(run: Run, scratch: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from tests.support.pictures import assert_tidy, kept_figures

    with pytest.MonkeyPatch.context() as patch:
        figures = kept_figures(patch)
        code, _, err = run(
            *TINY, "--synthetic", "--dir", scratch, "--report", tmp_path / "sweep.png"
        )
    assert code == 0, err
    assert_tidy(figures[0], 4)


# Who is measured again.


def test_the_better_half_of_each_budget_is_measured_again(
    sweep: ModuleType, tmp_path: Path
) -> None:
    from swap_sweep_cases import Case, Results, Step, best_of, choose, next_case

    def cost(case: Case) -> float:
        return case.slot_count / case.host_bytes

    cases = [Case(budget, "exact", 1, slots, 0, "auto") for budget in (1, 2) for slots in range(8)]
    with Results(tmp_path / "r.jsonl", {}) as results:
        while (case := next_case(cases, results)) is not None:
            results.add(case, Step(2 * cost(case), cost(case), 1, 1))
        counts = {case: len(results.steps[case]) for case in cases}
        best = best_of(cases, results)
        assert choose(best, results) == best[1]  # nothing to gain from more memory
    assert [counts[case] for case in cases] == [3, 3, 3, 2, 1, 1, 1, 1] * 2
    assert {budget: case.slot_count for budget, case in best.items()} == {1: 0, 2: 0}


# What is refused.


def test_another_sweep_in_the_file(run: Run, scratch: Path, tmp_path: Path) -> None:
    short = [*TINY[:-1], "0.001"]
    assert run(*short, "--synthetic", "--dir", scratch)[0] == 0
    code, _, err = run(*short, "--synthetic", "--dir", scratch, "--steps", "2")
    assert code == 1
    assert "holds another sweep (steps: 1 there, 2 now)" in err
    (tmp_path / "notes.txt").write_text("hello\n")
    code, _, err = run(*short, "--dir", scratch, "--results", tmp_path / "notes.txt")
    assert code == 1
    assert "is no results file of a sweep" in err
    assert (tmp_path / "notes.txt").read_text() == "hello\n"


def test_two_sweeps_of_one_file(run: Run, sweep: ModuleType, scratch: Path, tmp_path: Path) -> None:
    from swap_sweep_cases import Results

    with Results(tmp_path / "r.jsonl", {}):
        code, _, err = run(*TINY, "--dir", scratch, "--results", tmp_path / "r.jsonl")
    assert code == 1
    assert "another sweep writes" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["200K"], "--dir is needed"),
        (["200K", "--dir", "{tmp}/no"], "does not exist"),
        (["{tmp}/no.json"], "cannot be read"),
        (["{tmp}/none.json"], "offloads nothing to nvme"),
        (["{tmp}/none.json", "--model", "huge"], "a size such as 125M"),
        (["200K", "--dir", "{tmp}", "--apply", "{tmp}/bad.json"], "aio is 5"),
        (["200K", "--dir", "{tmp}", "--budgets", "lots"], "write a size such as 8G"),
        (["200K", "--dir", "{tmp}", "--budgets", "900000G"], "this machine has"),
        (["200K", "--dir", "{tmp}", "--formats", "fp7"], "state_format"),
        (["200K", "--dir", "{tmp}", "--report", "{tmp}/no/x.png"], "is no directory"),
        (["nothing:there", "--dir", "{tmp}"], "cannot be used"),
    ],
)
def test_what_cannot_be_used(arguments: list[str], reason: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "bad.json").write_text('{"zero_optimization": 3, "tiers": 5, "aio": 5}')
    reason = reason.replace("aio is 5", "zero_optimization is 3")
    code, _, err = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert code == 1
    assert reason in err
    assert not (tmp_path / "swap_sweep.jsonl").exists()


def test_memory_is_no_disk(run: Run, tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "tmpfs", "size=64m") as directory:
        code, _, err = run(*TINY, "--dir", directory)
    assert code == 1
    assert "which is memory" in err


def test_help_has_an_example(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        import swap_sweep

        swap_sweep.main(["--help"])
    shown: Any = capsys.readouterr().out
    assert "python scripts/swap_sweep.py 125M --dir /nvme0" in shown
    assert "swap_sweep.jsonl" in shown
