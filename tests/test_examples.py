"""The examples of docs/: short enough to read, and they do what they say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
MOST_LINES = 60


def source_of(name: str) -> str:
    return (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")


def parts_of(name: str, tmp_path: Path) -> dict[str, Any]:
    """Return what an example defines, without running it."""
    definitions = tmp_path / "definitions.py"
    source = source_of(name)
    assert source.endswith("\nmain()\n")
    definitions.write_text(source.removesuffix("main()\n"), encoding="utf-8")
    return runpy.run_path(str(definitions))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.nvme
def test_generation_from_nvme(scratch: Path, tmp_path: Path) -> None:
    parts = parts_of("generate_from_nvme", tmp_path)
    weights = tmp_path / "weights.pt"
    program = [sys.executable, str(EXAMPLES / "generate_from_nvme.py")]
    subprocess.run([*program, "--random", str(weights)], check=True)
    model = parts["Model"]()
    model.load_state_dict(torch.load(weights))
    model.eval()
    tokens = torch.tensor([[10, 20, 30]])
    with torch.inference_mode():
        for _ in range(parts["TOKENS"]):
            following = model(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
    command = [*program, str(scratch), str(weights)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"tokens (\[.*\]); (\d+) MB were read\n", done.stdout)
    assert found is not None, done.stdout
    assert found[1] == str(tokens[0].tolist())
    size_mb = sum(each.numel() * each.element_size() for each in model.parameters()) / 1e6
    assert 8 / size_mb < 0.25  # the budget in the example
    assert int(found[2]) > 0.75 * parts["TOKENS"] * size_mb
    assert list(scratch.iterdir()) == []
