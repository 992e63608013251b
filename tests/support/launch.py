"""Start worker programs of the tests: alone, or one for each rank under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker: one OpenMP thread, the tests importable."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def worker_command(script: str, *arguments: str, world_size: int = 1) -> list[str]:
    """Return the command that runs `tests/support/SCRIPT` on `world_size` ranks."""
    path = str(ROOT / "tests" / "support" / script)
    if world_size == 1:
        return [sys.executable, path, *arguments]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={world_size}",
    ]
    return [*launcher, path, *arguments]


def run_worker(
    script: str, *arguments: str, world_size: int = 1, timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run a worker to its end and return it; its output is captured."""
    return subprocess.run(
        worker_command(script, *arguments, world_size=world_size),
        env=worker_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_rank_case(case: str, scratch: Path, world_size: int = 2) -> list[str]:
    """Run a case of `ranks.py` and return what each rank said came of it."""
    done = run_worker("ranks.py", case, str(scratch), world_size=world_size, timeout_s=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line[:1].isdigit())
    return [found[str(rank)] for rank in range(world_size)]
