"""The rows of the GPU benchmark: what rests where, with how much memory, and what is planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpu_sizes import Sizes

from estimators import PREFETCH_LIMIT, AheadLimit, PlanError, StateFormat, Tier
from estimators.activations import Batch
from estimators.estimate import estimate
from estimators.inputs import Node, PlanInputs
from estimators.models import NormKind, model_of_config

GB = 1_000_000_000
_STEP_BYTES = GB // 20
_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    optimizer: str
    parameters: str = "none"
    host_memory: int | str = "auto"
    device_memory: int | str = "auto"
    state_format: str = "exact"
    peer_case: str = "cpu"
    checkpoints: bool = False
    warm_up: int = 2
    steps: int = 5
    takes_peer_memory: bool = False
    """Whether the host budget is what the peer took, where that is known."""
    fills_device: bool = False
    """Whether the device budget is as large as what the peer took allows, where that is known."""


_NVME = Row("nvme", host_memory=4 * GB, device_memory=8 * GB, peer_case="nvme", warm_up=1)
_HOST = Row("cpu", device_memory=8 * GB, warm_up=8)
"""The first seven updates try out whether host and device share them."""
_ALL = replace(
    _NVME,
    parameters="nvme",
    device_memory="auto",
    peer_case="nvme_param",
    checkpoints=True,
    fills_device=True,
)

ROWS = {
    "host-exact": _HOST,
    "host-compact": replace(_HOST, state_format="compact"),
    "nvme-fits-exact": replace(_NVME, host_memory=18 * GB, warm_up=2, takes_peer_memory=True),
    "nvme-4gb-exact": replace(_NVME, steps=6),
    "nvme-4gb-compact": replace(_NVME, state_format="compact", warm_up=2),
    "all-nvme-4gb-exact": replace(_ALL, steps=3),
    "all-nvme-4gb-compact": replace(_ALL, state_format="compact"),
    "all-host-exact": Row("cpu", "cpu", fills_device=True, warm_up=8),
    "device-exact": Row("none", peer_case="none"),
}


def planned_device_bytes(
    row: Row, sizes: Sizes, prefetch_limit: AheadLimit = PREFETCH_LIMIT
) -> int:
    """Return the device peak that the planner expects of a row."""
    model = model_of_config(sizes.config)
    if sizes.fuses_norms:
        fused = tuple(replace(stack, norm=NormKind.LAYER) for stack in model.stacks)
        model = replace(model, stacks=fused)
    host, device = row.host_memory, row.device_memory
    inputs = PlanInputs(
        model,
        Node(host_bytes=None if isinstance(host, str) else host),
        Batch(sizes.batch, sizes.length, checkpointing=row.checkpoints),
        parameter_tier=_TIERS[row.parameters],
        optimizer_tier=_TIERS[row.optimizer],
        state_format=StateFormat(row.state_format),
        device_budget_bytes=None if isinstance(device, str) else device,
        prefetch_limit=prefetch_limit,
        built_on_meta=False,
    )
    return estimate(inputs).tensor_bytes


def within_peer(row: Row, sizes: Sizes, peer: dict[str, Any]) -> Row:
    """Return a row with budgets that keep it within what the peer took.

    On the device that is the largest budget whose planned peak is below the peer's, but no more
    than the row has, if it has one; on the host what the peer took beside what its process had
    before, in rows that say so.
    """
    if row.takes_peer_memory and "baseline_bytes" in peer:
        host = int(peer["rss_peak_gb"] * GB) - peer["baseline_bytes"]
        row = replace(row, host_memory=host)
    if "gpu_peak_gb" not in peer:
        return row
    peak = GB * float(peer["gpu_peak_gb"])
    if row.fills_device:
        # Peaks were within 1 % of what was planned.
        return _within_peak(row, sizes, max(int(peak), GB), GB, 0.98 * peak)
    if isinstance(row.device_memory, str):
        return row
    return _within_peak(row, sizes, row.device_memory, 4 * GB, 0.998 * peak)


def _within_peak(row: Row, sizes: Sizes, budget: int, least: int, peak: float) -> Row:
    """Return a row with the largest device budget, a whole number of steps below the given one,
    whose planned peak is no more than `peak`.

    If all plan more it is about the least one, or the last that holds what must be there; the row
    itself if none does.
    """
    fitted = row
    while True:
        smaller = replace(row, device_memory=budget)
        try:
            planned = planned_device_bytes(smaller, sizes)
        except PlanError:
            return fitted
        fitted = smaller
        if planned <= peak or budget <= least:
            return fitted
        budget -= _STEP_BYTES


def make_config(row: Row, nvme_path: str, batch: int, changes: list[str]) -> dict[str, Any]:
    """Return the configuration of a row; `changes` are `key=value` of `tiers`."""
    stage: dict[str, Any] = {"stage": 3}
    for key, device in (("offload_optimizer", row.optimizer), ("offload_param", row.parameters)):
        if device != "none":
            stage[key] = {"device": device}
            if device == "nvme":
                stage[key]["nvme_path"] = nvme_path
    tiers: dict[str, Any] = {
        "host_memory": row.host_memory,
        "device_memory": row.device_memory,
        "state_format": row.state_format,
    }
    for change in changes:
        name, _, value = change.partition("=")
        tiers[name] = int(value) if value.isdigit() else value
    return {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": stage,
        "tiers": tiers,
    }
