"""Configurations of tests, and budgets that force paging."""

from __future__ import annotations

from typing import Any

from estimators import PlacementRequest, SegmentSpec, StateFormat, Tier, UpdateRule
from estimators.records import staged_bytes

LR, EPS, BETAS, WEIGHT_DECAY = 1e-3, 1e-4, (0.9, 0.95), 0.1


def make_config(
    *,
    parameters: str = "none",
    optimizer: str = "none",
    nvme_path: str | None = None,
    dtype: str = "fp32",
    accumulation: int = 1,
    clip: float = 0.0,
    host_memory: int | str = "auto",
    sub_group_size: int = 1_000_000_000,
    state_format: str = "exact",
    engine: str = "auto",
    grad_accum_dtype: str | None = None,
    loss_scale: float = 0.0,
    stage: int = 3,
) -> dict[str, Any]:
    """Return a ZeRO configuration; an offload of "none" leaves its section out."""
    section: dict[str, Any] = {
        "stage": stage,
        "sub_group_size": sub_group_size,
        "stage3_param_persistence_threshold": 0,  # small models page all the same
        "stage3_max_reuse_distance": 0,  # and what a step moves is what the plan says at most
    }
    for key, device in (("offload_param", parameters), ("offload_optimizer", optimizer)):
        if device != "none":
            section[key] = {"device": device}
            if device == "nvme":
                section[key]["nvme_path"] = nvme_path
    precision: dict[str, Any] = {}
    if dtype == "fp16":
        precision["fp16"] = {"enabled": True, "loss_scale": loss_scale, "initial_scale_power": 8}
    else:
        precision["bf16"] = {"enabled": dtype == "bf16"}
    if grad_accum_dtype is not None:
        precision["data_types"] = {"grad_accum_dtype": grad_accum_dtype}
    return {
        **precision,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": section,
        "aio": {"engine": engine},
        "tiers": {"host_memory": host_memory, "state_format": state_format},
    }


_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


def slot_budget(
    segments: tuple[SegmentSpec, ...],
    *,
    slots: int,
    world_size: int,
    parameters: str,
    optimizer: str,
    sub_group_size: int,
    state_format: str = "exact",
    rule: UpdateRule = UpdateRule.ADAMW,
) -> int:
    """Return the node's host budget that holds exactly `slots` slots a rank and nothing else."""
    request = PlacementRequest(
        segments=segments,
        world_size=world_size,
        parameter_tier=_TIERS[parameters],
        optimizer_tier=_TIERS[optimizer],
        state_format=StateFormat(state_format),
        sub_group_numel=sub_group_size,
        alignment_bytes=4096,
        rule=rule,
    )
    largest = max(
        staged_bytes(request, segment, min(sub_group_size, segment.layout(world_size).shard_numel))
        for segment in segments
    )
    return slots * largest * world_size
