"""On which device an engine computes."""

from __future__ import annotations

import torch
from torch import nn

from offload import Device, HostDevice, open_cuda_device
from zero.comm import Communicator, local_gpu
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
    index = local_gpu()
    torch.cuda.set_device(index)  # kernels run where torch's current device is
    return open_cuda_device(index)


def join_devices(device: Device, communicator: Communicator) -> None:
    """Make ready for collectives on the device of each rank; a collective.

    Raises:
        ConfigError: on all ranks, if some compute on the processor and some do not, or if two share
            a GPU: NCCL moves nothing between them.
    """
    if communicator.world_size == 1:
        return
    names = communicator.gather_texts(device.identity)
    on_host = [rank for rank, name in enumerate(names) if not name]
    if 0 < len(on_host) < len(names):
        raise ConfigError(
            f"ranks {on_host} compute on the processor, and the others on GPUs; give every rank a"
            ' GPU, or set tiers.device to "cpu"'
        )
    for name in names:
        sharing = [rank for rank, other in enumerate(names) if other == name]
        if name and len(sharing) > 1:
            raise ConfigError(
                f"ranks {sharing} compute on the same GPU ({name}), and ranks that do cannot"
                " exchange anything with NCCL; start as many ranks a node as it has GPUs (torchrun"
                ' sets LOCAL_RANK, which chooses one), or set tiers.device to "cpu"'
            )
    if device.torch_device.type == "cuda":
        communicator.use_gpu()


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put the buffers of a model, and parameters that no engine manages, on a device."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]
