"""Device kernels behind the calls of the host's, so that one suite tests both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from offload.kernels_device import DeviceKernels, add_block_sums, load_device_kernels


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array on a device; bf16 bits (uint16) become torch's bf16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(array).to(device)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array on the host; bf16 as its bits."""
    host = tensor.cpu()
    if host.dtype is torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16)
    return host.numpy()


class OnDevice:
    """Calls a device kernel on copies of arrays, and copies what it wrote back."""

    def __init__(self, kernels: DeviceKernels, device: torch.device) -> None:
        self.kernels = kernels
        self.device = device
        self.name = kernels.name

    def __getattr__(self, call: str) -> Any:
        def run(*operands: Any) -> None:
            arrays = {i: each for i, each in enumerate(operands) if isinstance(each, np.ndarray)}
            tensors = {i: to_tensor(each.copy(), self.device) for i, each in arrays.items()}
            getattr(self.kernels, call)(*(tensors.get(i, each) for i, each in enumerate(operands)))
            for i, array in arrays.items():
                changed = to_array(tensors[i])
                if not np.array_equal(changed.view(np.uint8), array.view(np.uint8)):
                    array[:] = changed

        return run

    def sum_squares(self, values: np.ndarray, first_index: int) -> float:
        """Return the sum of squares, the blocks added on the host."""
        sums = self.kernels.block_sums(to_tensor(values.copy(), self.device), first_index)
        assert sums.device.type == self.device.type
        return add_block_sums(sums.tolist())


def make_device_kernels(kind: str, device_type: str) -> OnDevice:
    """Load device kernels of a kind, which must be what is then used."""
    device = torch.device(device_type)
    made = load_device_kernels(device, kind)
    assert made.name == kind
    return OnDevice(made, device)
