"""On which device an engine computes."""

from __future__ import annotations

import os

import torch
from torch import nn

from offload import Device, HostDevice, open_cuda_device
from zero.errors import ConfigError


def open_device(wanted: str) -> Device:
    """Return the device that `tiers.device` names; "auto" is a GPU where torch finds one.

    A launcher's LOCAL_RANK chooses among several GPUs, else torch's current one is taken.

    Raises:
        ConfigError: if there is no such device.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return HostDevice()
    if not torch.cuda.is_available():
        raise ConfigError(
            f'tiers.device is "{wanted}", but torch {torch.__version__} finds no CUDA device;'
            ' install a torch for CUDA, or write "auto" or "cpu"'
        )
    local_rank = os.environ.get("LOCAL_RANK", "")
    index = int(local_rank) if local_rank.isdigit() else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"LOCAL_RANK is {index}, but torch finds {torch.cuda.device_count()} CUDA devices;"
            ' start as many ranks a node as it has devices, or set tiers.device to "cpu"'
        )
    return open_cuda_device(index)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put the buffers of a model, and parameters that no engine manages, on a device."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]
