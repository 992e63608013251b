"""The study of state formats: runs that share the machine, and results before all of them ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STUDY = str(ROOT / "scripts" / "format_study.py")
TINY = ["--steps", "3", "--hidden", "64", "--layers", "1", "--sequence", "16", "--batch", "2"]
FORMATS = ["exact", "compact"]


def study(*arguments: str) -> str:
    command = [sys.executable, STUDY, "--device", "cpu", "--formats", *FORMATS, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_runs_at_once_give_what_they_give_alone_and_a_part_of_them_can_be_shown(
    tmp_path: Path,
) -> None:
    found: list[dict[str, Any]] = []
    for count in ("1", "2"):
        path = tmp_path / f"{count}.json"
        text = ["--text", str(ROOT / "LICENSE"), "--json", str(path)]
        study(*TINY, *text, "--seeds", "1", "--at-once", count)
        found.append(json.loads(path.read_text(encoding="utf-8")))
    losses = [{run["format"]: run["losses"] for run in each["runs"]} for each in found]
    assert sorted(losses[0]) == sorted(FORMATS)
    assert losses[0] == losses[1]
    assert losses[0]["exact"] != losses[0]["compact"]

    sys.path.insert(0, str(ROOT / "scripts"))
    from format_study import compare

    runs = found[0]["runs"]
    again = {**runs[0], "seed": 1}
    assert compare(runs[:1], FORMATS) == []
    assert compare([again, *runs], FORMATS) == found[0]["comparison"]
    part = tmp_path / "part.json"
    part.write_text(json.dumps({"comparison": compare(runs[:1], FORMATS)}), encoding="utf-8")
    assert "Loss of the last" in study("--read", str(part))
    assert "Loss of the last 3 steps" in study("--read", str(tmp_path / "1.json"))
