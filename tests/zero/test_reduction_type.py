"""The type in which ranks add up gradients: the bits, the bytes, the memory, an overflow."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zero
from estimators import ElementType
from offload.arrays import torch_dtype
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.observe import as_bits, digest, full_gradients, full_parameters
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme

MICRO = 2
SCALE = 64.0
CASES: dict[str, dict[str, Any]] = {
    "bf16 in fp32": {"dtype": "bf16", "exchange": "fp32", "persist": 800},
    "fp32 in fp16, stage 2": {"dtype": "fp32", "exchange": "fp16", "stage": 2},
    "bf16 into fp32 in bf16": {"dtype": "bf16", "exchange": "bf16", "accumulate": "fp32"},
    "fp16 in fp32, stage 2": {"dtype": "fp16", "exchange": "fp32", "stage": 2},
    "fp32 in bf16": {"dtype": "fp32", "exchange": "bf16"},
}
CHOSEN = {1: 1, 2: 3, 3: 5}
"""How many of them are tried, by world size."""


def engine_of(scratch: Path, case: dict[str, Any]) -> zero.ZeroEngine:
    """Return an engine in which everything pages that may."""
    stage = case.get("stage", 3)
    config = make_config(
        parameters="nvme" if stage == 3 else "none",
        optimizer="nvme",
        nvme_path=str(scratch),
        dtype=case["dtype"],
        accumulation=MICRO,
        host_memory="90KB",
        sub_group_size=1024,
        grad_accum_dtype=case.get("accumulate"),
        loss_scale=SCALE,
        stage=stage,
    )
    if stage == 3:
        config["zero_optimization"]["offload_param"]["max_in_cpu"] = 0
    config["zero_optimization"]["stage3_param_persistence_threshold"] = case.get("persist", 0)
    config["communication_data_type"] = case["exchange"]
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    return engine


def type_of(name: str) -> torch.dtype:
    return torch_dtype(ElementType(name))


def expected(case: dict[str, Any], exchange: str, world_size: int) -> dict[str, np.ndarray]:
    """Return the gradients of a window: torch's of every rank, added up in rank order."""
    accumulate, moved = type_of(case.get("accumulate", case["dtype"])), type_of(exchange)
    model = make_model(dtype=type_of(case["dtype"]))
    total: dict[str, torch.Tensor] = {}
    for micro in range(MICRO):
        ranks = []
        for rank in range(world_size):
            model.zero_grad()
            loss = model(*make_batch(micro, rank)) / MICRO
            (loss * (SCALE if case["dtype"] == "fp16" else 1.0)).backward()
            ranks.append({name: each.grad for name, each in model.named_parameters()})
        for name in ranks[0]:
            first, *others = (each[name].to(accumulate).to(moved) for each in ranks)
            for other in others:
                first = first + other
            mean = (first / world_size).to(accumulate)
            total[name] = total[name] + mean if micro else mean
    return {name: as_bits(each) for name, each in total.items()}


def ran(scratch: Path, rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """Train one step, and return what came of it."""
    engine = engine_of(scratch, case)
    world_size, plan = engine.world_size, engine.plan.memory
    before = engine.ledger.snapshot()
    for micro in range(MICRO):
        engine.backward(engine(*make_batch(micro, rank)))
    gradients = full_gradients(engine)
    reduced = engine.ledger.snapshot().minus(before).rank_bytes["reduced"]
    wanted = expected(case, case["exchange"], world_size)
    usual = expected(case, case.get("accumulate", case["dtype"]), world_size)
    start = digest(full_parameters(engine))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # of a plan that was exceeded
        engine.step()
    moved = engine.ledger.snapshot()
    found = {
        "wrong": [name for name in wanted if not np.array_equal(gradients[name], wanted[name])],
        "as usual": digest(gradients) == digest(usual),
        "trained": digest(full_parameters(engine)) != start,
        "reduced": reduced,
        "numels": [
            each.layout(world_size).padded_numel for each in plan.request.segments if each.trainable
        ],
        "paged": [moved.nvme_read_bytes, moved.nvme_write_bytes, plan.swap_file_bytes],
        "persistent": plan.persistent_bytes,
        "scratch": plan.collective_scratch_bytes,
    }
    engine.destroy()
    return found


def is_skipped(scratch: Path, rank: int, dtype: str, exchange: str | None, value: float) -> bool:
    """Give each rank's gradients of one parameter a value, and say whether the step is skipped."""
    engine = engine_of(scratch, {"dtype": dtype, "exchange": exchange, "stage": 2})
    start = digest(full_parameters(engine))
    for micro in range(MICRO):
        loss = engine(*make_batch(micro, rank))
        if micro == 0:
            loss = loss + engine.module.norm.bias.float().sum() * value * MICRO
        engine.backward(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the step that is skipped
        engine.step()
    skipped = engine.skipped_steps == 1
    assert skipped is (digest(full_parameters(engine)) == start)
    engine.destroy()
    return skipped


@pytest.mark.parametrize("world_size", CHOSEN)
def test_ranks_add_up_in_the_type_that_is_named(scratch: Path, world_size: int) -> None:
    cases = dict(list(CASES.items())[: CHOSEN[world_size]])

    def work(rank: int) -> list[Any]:
        return [ran(scratch, rank, case) for case in cases.values()]

    several = world_size > 1
    for found in on_ranks(work, world_size, scratch):
        for (name, case), each in zip(cases.items(), found, strict=True):
            size = ElementType(case["exchange"]).size_bytes
            own = ElementType(case.get("accumulate", case["dtype"])).size_bytes
            assert not each["wrong"], name
            # A sum of two is rounded once, in either type.
            assert each["as usual"] is (world_size <= (2 if size > own else 1)), name
            assert each["trained"] and min(each["paged"]) > 0, name
            assert (each["persistent"] > 0) is ("persist" in case), name
            moved = MICRO * size * sum(each["numels"])
            assert each["reduced"] * world_size == moved * (world_size - 1), name
            # The cast and gloo's copy, and as much that the heap may keep.
            assert each["scratch"] == 4 * several * size * max(each["numels"]), name


def test_a_sum_that_overflows_skips_the_step_and_a_wider_type_holds_it(scratch: Path) -> None:
    """Gradients of 40000 a rank: fp16 holds each of them and their mean, but not their sum."""
    asked = [
        ("fp16", None, 40000 / SCALE),
        ("fp16", "fp32", 40000 / SCALE),
        ("fp32", "fp16", 40000.0),
        ("fp32", None, 40000.0),
    ]

    def work(rank: int) -> list[bool]:
        return [is_skipped(scratch, rank, *each) for each in asked]

    assert on_ranks(work, 2, scratch) == 2 * [[True, False, True, False]]
