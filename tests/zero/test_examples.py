"""The examples run as they are printed, on one rank and, where they say so, on two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, worker_environment

pytestmark = pytest.mark.nvme
ELSEWHERE = {"generate_from_nvme"}  # tests/test_examples.py gives it the weights that it needs
EXAMPLES = [
    each for each in sorted((ROOT / "docs" / "examples").glob("*.py")) if each.stem not in ELSEWHERE
]
SAYS = {
    "adapters": r"merged, off by \S+e-0[67]",
    "mixture_of_experts": r"rank 0, step 19: loss 0\.[0-4]",
    "several_losses": r"step 19: loss 0\.\d+, norm \d\.\d+, clipped [01]\.\d+",
}


def run(path: Path, scratch: Path, *launcher: str) -> str:
    command = [sys.executable, *launcher, str(path), str(scratch)]
    strict = worker_environment() | {"PYTHONWARNINGS": "error::RuntimeWarning"}  # ranks inherit it
    done = subprocess.run(
        command, env=strict, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_runs(scratch: Path, path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60
    said = run(path, scratch)
    assert re.search(SAYS[path.stem], said), said


def test_experts_are_routed_differently_on_two_ranks(scratch: Path) -> None:
    path = next(each for each in EXAMPLES if each.stem == "mixture_of_experts")
    said = run(path, scratch, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    for rank in (0, 1):
        assert re.search(rf"rank {rank}, step 19: loss 0\.\d", said), said
