"""The program that runs the peers of the GPU benchmark, as far as that needs no GPU."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import zero
from zero.config import ConfigWarning

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
SIZES = ("256", "2", "2", "64", "4")
sys.path.insert(0, str(SCRIPTS))

from gpu_groups import GROUPS, PROGRAM, program_of  # noqa: E402
from gpu_peer_program import DEEPSPEED_CASES, TORCH_CASES, deepspeed_config  # noqa: E402


@pytest.mark.parametrize("case", DEEPSPEED_CASES)
def test_what_the_peer_is_configured_with_runs_here(case: str, scratch: Path) -> None:
    """It has no key that this field does not know, and says what the case is named after."""
    with pytest.warns(ConfigWarning, match="without effect here"):
        config = zero.load_config(deepspeed_config(case, 4, scratch))
    stage = config.zero_optimization
    optimizer = stage.offload_optimizer.device if stage.offload_optimizer else "none"
    parameters = stage.offload_param.device if stage.offload_param else "none"
    assert optimizer == {"none": "none", "cpu": "cpu"}.get(case, "nvme")
    assert parameters == ("nvme" if case == "nvme_param" else "none")


def test_every_peer_of_a_group_has_a_case() -> None:
    for group in GROUPS.values():
        for peer in group.peers:
            assert peer.case in (TORCH_CASES if peer.is_torch else DEEPSPEED_CASES)


def test_one_program_runs_all_peers() -> None:
    options = argparse.Namespace(program=PROGRAM, torch_program=None)
    for group in GROUPS.values():
        assert all(program_of(peer, options) == PROGRAM for peer in group.peers)
    foreign = argparse.Namespace(program=Path("other.py"), torch_program=None)
    assert [program_of(each, foreign) for each in GROUPS["torch"].peers] == [None, None]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is there")
def test_a_peer_that_is_not_installed_is_named() -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "gpu_peer.py"),
            str(PROGRAM),
            "cpu",
            *SIZES,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("gpu_peer: case cpu needs the package deepspeed, which is not")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")
@pytest.mark.parametrize("case", TORCH_CASES)
def test_peers_of_torch_learn(case: str) -> None:
    """On the processor, where there is no GPU."""
    from gpu_peer import result_of

    command = [sys.executable, str(SCRIPTS / "gpu_peer.py"), str(PROGRAM), case]
    done = subprocess.run([*command, *SIZES], capture_output=True, text=True, check=True)
    found = result_of(done.stdout)
    assert found is not None
    losses = [row[4] for row in found["rows"]]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
