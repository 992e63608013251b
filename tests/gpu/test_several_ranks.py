"""Two ranks with a GPU each: tiers and stages change no bits, checkpoints move, nobody hangs."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.support.gpu_ranks import config, rank_cells, train
from tests.support.launch import run_worker
from tests.support.observe import state_digest
from tests.support.tiny import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.nvme]

WORLD_SIZE = 2
CELLS = range(len(rank_cells()))


def cell_name(index: int) -> str:
    cell = rank_cells()[index]
    what = "all" if cell["with_parameters"] else "optimizer"
    spare = "-spare" if "device_memory" in cell else ""
    spare += "-reduced-in-fp32" if "communication_data_type" in cell else ""
    name = f"{cell['device']}-{what}-{cell['dtype']}-{cell['update_device']}"
    return f"stage{cell['stage']}-{name}{spare}"


@pytest.fixture(scope="module", autouse=True)
def devices() -> None:
    if torch.cuda.device_count() < WORLD_SIZE:
        pytest.skip(f"torch finds {torch.cuda.device_count()} CUDA devices; two are needed")


@pytest.fixture(scope="module")
def ranks(module_scratch: Path) -> list[dict[str, Any]]:
    """Return what each rank found; they run once."""
    engine, _, _, _ = zero.initialize(
        model=make_model(dtype=torch.bfloat16), config=config(module_scratch, "cpu")
    )
    train(engine, 0, 3)
    engine.save_checkpoint(module_scratch / "one")
    before = state_digest(engine)
    engine.destroy()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    done = run_worker("gpu_ranks.py", str(module_scratch), world_size=WORLD_SIZE)
    assert done.returncode == 0, done.stderr[-6000:]
    found = [
        json.loads((module_scratch / f"rank{rank}.json").read_text(encoding="utf-8"))
        for rank in range(WORLD_SIZE)
    ]
    return [{**each, "before": before} for each in found]


@pytest.mark.parametrize("index", CELLS, ids=cell_name)
def test_bits_equal_the_reference_and_every_other_tier(
    index: int, ranks: list[dict[str, Any]]
) -> None:
    cell = rank_cells()[index]
    first = next(at for at in CELLS if rank_cells()[at]["dtype"] == cell["dtype"])
    for rank in ranks:
        assert "cuda:nccl" in rank["backend"]
        expected, found = rank["outcomes"][first], rank["outcomes"][index]
        assert found["world_size"] == WORLD_SIZE
        assert found["mismatches"] == []
        assert all(ours == reference > 0 for reference, ours in found["norms"])
        assert found["losses"] == expected["losses"]
        assert found["digest"] == expected["digest"]
        for step in found["ledger"]:
            assert step["read"] == step["planned_read"]
            assert step["written"] == step["planned_written"]
            assert (step["read"] > 0) == (cell["device"] == "nvme")
        if cell["dtype"] == "fp32":
            assert 0 < found["torch_difference"] < 1e-5
    assert len({rank["outcomes"][index]["digest"] for rank in ranks}) == 1
    assert ranks[0]["outcomes"][index]["losses"] != ranks[1]["outcomes"][index]["losses"]


def test_parameters_are_read_changed_and_loaded_outside_their_windows(
    ranks: list[dict[str, Any]],
) -> None:
    first, second = (rank["cases"] for rank in ranks)
    assert first == second
    assert first["touches"].startswith("read 1 write 1 init 1 gradient 1 local 1")
    assert first["changes"].startswith("grown 1 kept 1 thawed 1 average 1")
    assert first["loading"] == "loaded 1 half 1"
    assert first["set_gradients"].startswith("[1, 1, 1, 1, 1, 1]")
    assert first["different_seeds"].endswith("[0.0, 0.0, 0.0]")


def test_memory_does_not_grow(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        before, after, copied = rank["growth"]
        assert after == before
        assert min(copied.values()) > 0


def test_checkpoints_move_between_one_rank_and_several(
    ranks: list[dict[str, Any]], module_scratch: Path
) -> None:
    assert [rank["elastic"]["device"] for rank in ranks] == ["cuda:0", "cuda:1"]
    for rank in ranks:
        assert rank["elastic"]["loaded"] == rank["before"]
        assert rank["elastic"]["saved"] != rank["before"]
    for device in ("cuda", "cpu"):
        chosen = config(module_scratch, "nvme")
        chosen["tiers"]["device"] = device
        engine, _, _, _ = zero.initialize(model=make_model(dtype=torch.bfloat16), config=chosen)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the other world size
            engine.load_checkpoint(module_scratch / "several")
        assert engine.device.type == device
        assert {state_digest(engine)} == {rank["elastic"]["saved"] for rank in ranks}
        train(engine, 5, 6)
        engine.destroy()


def test_ranks_that_differ_are_named_and_nobody_waits_for_nccl(scratch: Path) -> None:
    cases = ("branches", "early_step", "ends_early", "backward_alone")
    done = run_worker("divergence.py", str(scratch), "1.0", *cases, world_size=2, timeout_s=120)
    said: list[list[str]] = [[], []]
    for line in done.stdout.splitlines():
        rank, _, outcome = line.partition(": ")
        said[int(rank)].append(outcome)
    assert [len(each) for each in said] == [len(cases)] * 2, done.stdout + done.stderr[-3000:]
    for outcomes in said:
        assert all(float(each.split(" ", 1)[0]) < 30 for each in outcomes), outcomes
    assert all("others do something else" in outcomes[0] for outcomes in said)
    assert all("a step" in outcomes[1] for outcomes in said)
    assert "rank 1 has destroyed its engine or ended" in said[0][2]
    assert "rank 0 waits in another collective" in said[1][3]
    assert "Error" in said[0][3]
