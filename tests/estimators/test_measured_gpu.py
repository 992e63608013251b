"""Plans against what was measured on one H200: 1.364 B parameters, 4 x 1024 tokens, bf16.

The numbers are those of `scripts/gpu_bench.py` of 2026-11-29, its row, device peak and step. They
were taken for another purpose, and nothing here was fitted to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from estimators import DriveRates, StateFormat, Tier
from estimators.activations import Batch
from estimators.estimate import estimate
from estimators.hardware import GPUS, bandwidths_of
from estimators.inputs import Node, PlanInputs
from estimators.models import ModelShape, NormKind, model_of_config

GB = 10**9
DRIVE = DriveRates(2.3e9, 4.1e9, "measured by fio on that machine")


@dataclass(frozen=True)
class Measured:
    """One row: what was asked for, and what was found."""

    row: str
    optimizer: Tier
    state_format: StateFormat
    host_bytes: int | None
    device_budget_bytes: int | None
    peak_bytes: int
    step_s: float
    io_bound: bool = False


ROWS = [
    Measured(
        "host-exact, device auto", Tier.HOST, StateFormat.EXACT, None, None, 12059756544, 0.4053
    ),
    Measured("host-exact", Tier.HOST, StateFormat.EXACT, None, 8 * GB, 13884340224, 0.3706),
    Measured("host-compact", Tier.HOST, StateFormat.COMPACT, None, 8 * GB, 14046297088, 0.2124),
    Measured(
        "nvme-4gb-exact",
        Tier.NVME,
        StateFormat.EXACT,
        4 * GB,
        8 * GB,
        13884340224,
        7.362,
        io_bound=True,
    ),
    Measured(
        "nvme-4gb-compact", Tier.NVME, StateFormat.COMPACT, 4 * GB, 8 * GB, 14046297088, 0.5043
    ),
]


def model() -> ModelShape:
    """Return the benchmark's model; torch's fused RMS norm keeps what a layer norm does."""
    config = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 32000,
    }  # fmt: skip
    found = model_of_config(config)
    assert found.numel == 1_364_297_728
    fused = tuple(replace(stack, norm=NormKind.LAYER) for stack in found.stacks)
    return replace(found, stacks=fused)


@pytest.mark.parametrize("measured", ROWS, ids=lambda measured: measured.row)
def test_peak_and_least_time_of_a_gpu(measured: Measured) -> None:
    node = Node(host_bytes=measured.host_bytes, bandwidths=bandwidths_of(GPUS["h200"], DRIVE))
    found = estimate(
        PlanInputs(
            model(),
            node,
            Batch(4, 1024),
            optimizer_tier=measured.optimizer,
            state_format=measured.state_format,
            device_budget_bytes=measured.device_budget_bytes,
            built_on_meta=False,
        )
    )
    assert found.tensor_bytes == pytest.approx(measured.peak_bytes, rel=0.1)
    assert found.tensor_bytes == pytest.approx(measured.peak_bytes, rel=0.01)  # as it turned out
    assert 0 < found.time.lower_bound <= measured.step_s
    if measured.io_bound:
        assert found.time.binding == "drive"
        assert measured.step_s <= 2 * found.time.lower_bound
