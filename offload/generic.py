"""The update by any element-wise optimizer: on fp32 views of the slice that a sub-group is.

[Note: generic update] The optimizer is given by its caller as one function of a flat fp32 master,
its scaled fp32 gradient and the named fp32 tensors of its state, which it changes in place. So it
knows nothing of formats; the master is put together before and taken apart after it, as the kernels
do it. State tensors are fields `extra_0`, `extra_1`, ... of the record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from estimators import EXTRA_FIELDS
from offload.codes import quieted
from offload.kernel_calls import Array
from offload.kernels import Kernels
from offload.operands import StateArrays

StepFunction = Callable[[Tensor, Tensor, dict[str, Tensor]], None]


@dataclass(frozen=True, slots=True)
class GenericStep:
    """One step of an optimizer that has no kernel."""

    run: StepFunction
    names: Sequence[str]
    """Names of its state tensors, in the order of the fields that hold them."""
    grad_scale: float

    def apply(
        self, kernels: Kernels, parameter: Array, gradient: Array, state: StateArrays
    ) -> None:
        """Update a slice on the host in place."""
        master = _master(kernels, parameter, state)
        wide = torch.from_numpy(_widened(gradient) * np.float32(self.grad_scale))
        fields = zip(self.names, EXTRA_FIELDS, strict=False)
        tensors = {
            name: torch.from_numpy(values)
            for name, field in fields
            if (values := state.get(field)) is not None
        }
        self.run(torch.from_numpy(master), wide, tensors)
        _put_master(kernels, parameter, state, master)


def _widened(values: Array) -> Array:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):
        return values.astype(np.float32, copy=False)


def _master(kernels: Kernels, parameter: Array, state: StateArrays) -> Array:
    if state.residual is not None:
        master = np.empty(parameter.size, np.float32)
        kernels.join_master(parameter, state.residual, master)
        return master
    master = state.master if state.master is not None else parameter
    return np.asarray(master)


def _put_master(kernels: Kernels, parameter: Array, state: StateArrays, master: Array) -> None:
    if state.residual is not None:
        kernels.split_master(master, parameter, state.residual)
    elif state.master is not None and parameter.dtype == np.float16:
        kernels.round_to_fp16(master, parameter)
    elif state.master is not None:
        kernels.split_master(quieted(master), parameter, np.empty(master.size, np.int16))
