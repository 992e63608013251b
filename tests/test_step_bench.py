"""The step benchmark runs, counts the kernel's bytes, and compares with a limit of the same run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.nvme
@pytest.mark.full
def test_a_small_sweep_writes_its_table_json_and_chart(scratch: Path, tmp_path: Path) -> None:
    report, chart = tmp_path / "step.json", tmp_path / "step.png"
    command = [sys.executable, str(ROOT / "scripts" / "step_bench.py"), str(scratch)]
    options = (
        "--parameters 1048576 --budgets 0 0.5 1 --sub-groups 0.02 --slots 2 4 --bursts 0 2"
        " --rounds 1 --updates 1 --limit-mebibytes 64"
    )
    drawing = ["--chart", str(chart)] if importlib.util.find_spec("matplotlib") else []
    # The script imports its neighbour, which a safe path would hide.
    environment = {key: each for key, each in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [*command, *options.split(), "--json", str(report), *drawing],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "limit:" in done.stdout
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["limit"]["bytes_per_s"] > 0
    assert {limit["schedule"] for limit in found["limits"]} >= {"mixed", "bursts of 32 MiB"}
    assert len(found["rows"]) == 3 * 1 * 2 * 2
    for row in found["rows"]:
        if row["budget_share"] == 1:
            assert row["bytes_per_update"] == row["nonresident_share"] == 0
            continue
        assert row["bytes_per_update"] >= row["ledger_bytes_per_update"] > 0
        assert row["of_limit"] == row["bytes_per_s"] / found["limit"]["bytes_per_s"] > 0
        assert row["slots"] == row["slot_count"]
    paged = {row["budget_share"]: row["bytes_per_update"] for row in found["rows"]}
    assert paged[0] > paged[0.5] > paged[1] == 0
    if drawing:
        assert chart.stat().st_size > 10_000
