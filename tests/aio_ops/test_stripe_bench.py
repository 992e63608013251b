"""A striped file is as fast as its drives together, on drives that are really throttled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "stripe_bench.py"
CANNOT = 77


@pytest.mark.full
@pytest.mark.parametrize("engine", ["io_uring", "kernel_aio", "threads", "python"])
def test_the_rate_is_the_sum_of_the_drives(engine: str, tmp_path: Path) -> None:
    rates = [90, 30]
    command = [sys.executable, str(BENCH), "--json", "--engine", engine, "--parent", str(tmp_path)]
    command += ["--rates", *(str(rate) for rate in rates), "--seconds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    found = json.loads(done.stdout)
    assert found["engine"] == engine
    for rate, alone in zip(rates, found["alone"], strict=True):
        assert alone["read"] == pytest.approx(rate * 1e6, rel=0.1)  # the limits are real
        assert alone["write"] == pytest.approx(rate * 1e6, rel=0.1)
    assert found["shares"][0] == pytest.approx(0.75, abs=0.05)
    for workload in "read", "write", "mixed":
        assert found["ratio"][workload] >= 0.9, found
