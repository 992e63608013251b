"""io_bench.py under the flags of ds_io: it moves what it says, and tells the field's lines."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.aio_ops.disks import storage_bytes

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "io_bench.py"
MIB = 1 << 20
SMALL = ["--io_size", "8M", "--block_size", "256K", "--queue_depth", "4", "--loops", "2"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return io_bench.py as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import io_bench

    return io_bench


@pytest.fixture
def run(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Return a function that runs the command here: exit code, stdout, stderr."""

    def run_it(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["io_bench.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            bench.main()
        captured = capsys.readouterr()
        code = end.value.code
        if isinstance(code, int):
            return code, captured.out, captured.err
        return 1, captured.out, captured.err + str(code)

    return run_it


@pytest.mark.parametrize(
    ("flags", "verb"),
    [
        (["--read", "--validate"], "Read"),
        (["--validate", "--engine", "threads", "--io_parallel", "2"], "Write"),
        (["--sequential_requests", "--single_submit", "--include_warmup_time"], "Write"),
    ],
)
def test_it_tells_the_fields_lines(
    flags: list[str], verb: str, run: Run, scratch: Path, tmp_path: Path
) -> None:
    found = tmp_path / "found.json"
    before = storage_bytes()
    code, out, err = run("--folder", scratch, *SMALL, *flags, "--json", found)
    moved = [after - first for after, first in zip(storage_bytes(), before, strict=True)]
    assert (code, err) == (0, "")
    loops = 3  # one of them to warm up
    assert moved[0 if verb == "Read" else 1] >= loops * 8 * MIB
    for kind in ("Task", "E2E"):
        assert re.search(rf"^{kind} {verb} Latency = [\d.e-]+ sec$", out, re.MULTILINE)
        assert re.search(rf"^{kind} {verb} Speed = [\d.e-]+ GB/sec$", out, re.MULTILINE)
    summary = json.loads(found.read_text())
    counted = loops if "--include_warmup_time" in flags else 2
    assert summary["blocks"] == counted * 32
    assert summary["task_gib_s"] == pytest.approx(
        counted * 8 / 1024 / summary["task_latency_s"], rel=1e-6
    )
    assert summary["task_latency_s"] < summary["e2e_latency_s"]
    times = list(summary["latency_s"].values())
    assert times[0] > 0
    assert times == sorted(times)
    assert list(scratch.iterdir()) == []


def test_two_processes_and_a_report(run: Run, scratch: Path, tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    mapping = ["--folder_to_device_mapping", f"{scratch}:0", f"{scratch}:1"]
    code, out, err = run(*mapping, *SMALL, "--report", page)
    assert (code, err) == (0, "")
    assert "2 x 8 MiB" in out
    assert "(128 blocks)" in out  # both processes, two loops
    assert "<table>" in page.read_text()
    assert list(scratch.iterdir()) == []


def test_the_picture_is_tidy(run: Run, scratch: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from tests.support.pictures import assert_tidy, kept_figures

    with pytest.MonkeyPatch.context() as patch:
        figures = kept_figures(patch)
        code, _, err = run("--folder", scratch, *SMALL, "--report", tmp_path / "bench.png")
    assert code == 0, err
    assert_tidy(figures[0], 2)


def test_what_was_not_written_is_found(
    run: Run, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io_bench_ds

    def forget(self: object, mover: object, spans: object, *, writes: bool) -> list[float]:
        return [0.1]

    monkeypatch.setattr(io_bench_ds.Worker, "_move", forget)
    code, _, err = run("--folder", scratch, *SMALL, "--validate")
    assert code == 1
    assert "block 0 of" in err
    assert "is not what was written" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--folder", "{tmp}/no", *SMALL], "does not exist"),
        (["--folder", "{tmp}", "--io_size", "9M", "--block_size", "2M"], "whole blocks"),
        (["--folder", "{tmp}", *SMALL, "--engine", "torch_io"], "use aio_handle"),
        (["--folder", "{tmp}", *SMALL, "--gpu", "--use_gds"], "use --gpu alone"),
        (["--folder_to_device_mapping", "{tmp}", *SMALL], "write DIR:DEV"),
        (["--folder", "{tmp}", *SMALL, "--multi_process", "0"], "from 1 on"),
        (["--folder", "{tmp}", "--io_size", "900000G"], "lower --io_size"),
    ],
)
def test_what_cannot_be_used(arguments: list[str], reason: str, run: Run, tmp_path: Path) -> None:
    code, out, err = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert code == 1
    assert reason in err
    assert "Latency" not in out


def test_help_has_an_example(run: Run) -> None:
    code, out, _ = run("--folder", "x", "--help")
    assert code == 0
    assert "python scripts/io_bench.py --folder /nvme0 --io_size 1G --read" in out
