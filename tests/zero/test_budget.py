"""The host budget is hard: in a cgroup that kills a breach, models many times larger than it train.

What is allowed above the baseline (the same process after one trained step of a tiny model) is the
budget and the plan's device line, and 5 %. The plan is held against what the kernel says: VmHWM,
smaps, blocks of the swap file, and bytes of /proc/self/io.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cgroups import MemoryCgroup, memory_cgroup
from tests.support.launch import run_worker, worker_command, worker_environment

HOST_BYTES = 256_000_000


def run_job(guard: MemoryCgroup | None, allow: float = 1.0, **job: Any) -> tuple[int, dict, str]:
    """Run `budget.py` under a guard and return its exit status, its report, and its errors."""
    arguments = json.dumps({"host_bytes": HOST_BYTES, "rlimit": guard is None, **job})
    with subprocess.Popen(
        worker_command("budget.py", arguments),
        env=worker_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=guard.join if guard else None,  # noqa: PLW1509  before anything is charged
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        ready = child.stdout.readline()
        if ready and guard:
            guard.limit(guard.held_bytes + int(json.loads(ready)["allow_bytes"] * allow))
        try:
            child.stdin.write("go\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass
        report = child.stdout.readline()
        errors = child.stderr.read()
    return child.returncode, json.loads(report) if report else {}, errors


def check(outcome: dict[str, Any], factor: int) -> None:
    allowed = (outcome["host_budget"] + outcome["device_planned"]) * 1.05
    above = outcome["peak"] - outcome["baseline"]
    assert 0 < above <= allowed, f"{above / 1e6:.0f} MB of {allowed / 1e6:.0f} MB"
    assert outcome["parameters_and_state"] >= factor * HOST_BYTES
    assert outcome["host_planned"] <= outcome["host_budget"] == HOST_BYTES
    assert above >= 0.5 * outcome["host_planned"], "the budget was hardly used"
    assert outcome["swap_planned"] <= outcome["swap_blocks"] <= outcome["swap_planned"] + (1 << 20)
    grown = outcome["smaps"]["Anonymous"] - outcome["anonymous_baseline"]
    assert 0.5 * outcome["host_planned"] < grown <= allowed
    assert outcome["smaps"]["Locked"] == outcome["smaps"]["Swap"] == outcome["locked"] == 0
    for line in outcome["lines"]:
        slack = 1 << 20 if line["tier"] == "nvme" else 0
        assert (line["actual_bytes"] or 0) <= line["planned_bytes"] + slack, line
    for step in outcome["steps"][1:]:
        read = sum(size for name, size in step["nvme_bytes"].items() if "read" in name)
        assert read == outcome["planned_read"]
    moved = outcome["steps"]
    written = sum(
        size for step in moved for name, size in step["nvme_bytes"].items() if "write" in name
    )
    assert written == outcome["planned_written"] * len(moved)
    assert outcome["kernel_written"] >= written
    assert all(norm > 0.1 for norm in outcome["norms"])  # clipping acts on every step


@pytest.mark.nvme
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("factor", "options"),
    [
        (4, {"steps": 1}),
        pytest.param(4, {"dtype": "bf16"}, marks=pytest.mark.full),
        pytest.param(10, {}, marks=pytest.mark.full),
        pytest.param(40, {"steps": 1}, marks=pytest.mark.full),
    ],
    ids=["4x", "4x-bf16", "10x", "40x"],
)
def test_a_model_larger_than_the_budget_stays_within_it(
    scratch: Path, factor: int, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with memory_cgroup() as (guard, reason):
        status, outcome, errors = run_job(guard, nvme_path=str(scratch), factor=factor, **options)
    with capsys.disabled():
        how = f"a cgroup v{guard.version}" if guard else f"RLIMIT_DATA and VmHWM ({reason})"
        sys.stdout.write(f"\n{factor}x host_memory, guarded by {how}")
        if outcome:
            above = outcome["peak"] - outcome["baseline"]
            planned = outcome["host_budget"] + outcome["device_planned"]
            sys.stdout.write(f": {above / 1e6:.0f} MB of {planned / 1e6:.0f} MB planned\n")
    assert status == 0, f"status {status}: {errors[-2000:]}"
    check(outcome, factor)


@pytest.mark.nvme
@pytest.mark.full
def test_the_guard_kills_a_breach(scratch: Path) -> None:
    """The test of the test: with two thirds of the memory the same run does not survive."""
    with memory_cgroup() as (guard, reason):
        if guard is None:
            pytest.skip(f"no memory cgroup: {reason}")
        status, outcome, _ = run_job(guard, 0.66, nvme_path=str(scratch), factor=4, steps=1)
    assert status == -9
    assert not outcome


@pytest.mark.nvme
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ranks_of_a_node_share_budget_and_drive(
    scratch: Path, tmp_path: Path, world_size: int
) -> None:
    """Each rank stays within its share, gloo's copies included, and all move the same bytes."""
    job = {"host_bytes": HOST_BYTES, "nvme_path": str(scratch), "factor": 4, "out": str(tmp_path)}
    done = run_worker("budget.py", json.dumps(job), world_size=world_size, timeout_s=800)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = [
        json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        for rank in range(world_size)
    ]
    for outcome in outcomes:
        share = HOST_BYTES // world_size
        assert outcome["host_planned"] <= outcome["host_budget"] == share
        allowed = (share + outcome["device_planned"]) * 1.05
        assert 0 < outcome["peak"] - outcome["baseline"] <= allowed
        for line in outcome["lines"]:
            slack = 1 << 20 if line["tier"] == "nvme" else 0
            assert (line["actual_bytes"] or 0) <= line["planned_bytes"] + slack, line
    moved = [outcome["steps"][-1]["nvme_bytes"] for outcome in outcomes]
    assert all(each == moved[0] for each in moved)
    assert sum(outcome["parameters_and_state"] for outcome in outcomes) >= 4 * HOST_BYTES
    seconds = [outcome["steps"][-1]["seconds"] for outcome in outcomes]
    assert max(seconds) <= 1.25 * min(seconds)
