"""Device kernels behind the calls of the host's, so that one suite tests both."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from estimators import StateField
from offload import StateArrays
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

    def _moved(self, operand: Any) -> Any:
        """Return an operand on the device: a copy of an array or of all arrays of a state."""
        if isinstance(operand, np.ndarray):
            return to_tensor(operand.copy(), self.device)
        if isinstance(operand, StateArrays):
            views = {field: operand.get(field) for field in StateField}
            return StateArrays.of({field: self._moved(each) for field, each in views.items()})
        return operand

    def _copy_back(self, operand: Any, moved: Any) -> None:
        if isinstance(operand, np.ndarray):
            changed = to_array(moved)
            if not np.array_equal(changed.view(np.uint8), operand.view(np.uint8)):
                operand[:] = changed
        if isinstance(operand, StateArrays):
            for field in StateField:
                self._copy_back(operand.get(field), moved.get(field))

    def __getattr__(self, call: str) -> Any:
        def run(*operands: Any) -> None:
            moved = [self._moved(each) for each in operands]
            getattr(self.kernels, call)(*moved)
            for operand, there in zip(operands, moved, strict=True):
                self._copy_back(operand, there)

        return run

    def update(self, param: Any, grad: Any, state: Any, scalars: Any, key: Any = None) -> None:
        """Update copies on the device; bases (uint16) stay integers there."""
        moved = [self._moved(param), self._moved(grad), self._moved(state)]
        bases = {
            name: torch.from_numpy(base.copy()).to(self.device)
            for name in ("exp_avg_base", "exp_avg_sq_base")
            if (base := getattr(state, name)) is not None
        }
        moved[2] = dataclasses.replace(moved[2], **bases)
        self.kernels.update(*moved, scalars, key)
        for operand, there in zip((param, grad, state), moved, strict=True):
            self._copy_back(operand, there)

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
