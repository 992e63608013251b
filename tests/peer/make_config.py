"""Our configuration for what the peer trains, on any tier."""

from __future__ import annotations

from typing import Any

from tests.peer.model import peer_config


def peer_training(nvme_path: str, tier: str, accumulation: int) -> dict[str, Any]:
    """Return the peer's configuration with its ranks' batches as micro-batches of one rank."""
    config: dict[str, Any] = dict(peer_config(3, offload=False))
    stage: dict[str, Any] = {"stage": 3, "sub_group_size": 128}
    stage["stage3_param_persistence_threshold"] = 0
    if tier != "device":
        stage["offload_optimizer"] = {"device": tier}
        stage["offload_param"] = {"device": tier}
    config["zero_optimization"] = stage
    config["gradient_accumulation_steps"] = accumulation
    if tier == "nvme":
        config["tiers"] = {"host_memory": "20KB", "nvme": [{"path": nvme_path}]}
    return config
