"""What lies behind a parameter while it is sharded: nothing that could be read by mistake.

[Note: seal] A freed storage is no guard: code that reaches memory without asking
`__torch_function__` (`torch.tensor(weight)`, a scripted function, an extension in C++) would read
it and end the process. So between windows `parameter.data` is a tensor of the true shape, type and
device without memory, whose dispatch keys send every operator to a backend that nobody has,
quantized tensors of "hpu": it raises. Its device is that of the values, for autograd forgets the
node that accumulates a gradient when the device changes, gives that node gradients of its device
alone, and aborts the process where it records an operator on a device that torch is not built for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zero.errors import ShardedAccessError
from zero.parameter import ShardedParameter


class _Nowhere(torch.Tensor):
    """A tensor without memory; never seen by users, only what describes it is taken over."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
            return True  # in inference mode, setting .data asks
        raise ShardedAccessError(f"{func} on a tensor that has no memory")


def seal(parameter: nn.Parameter, sealed: torch.Tensor) -> None:
    """Make a parameter whose memory is free a sharded one."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = sealed
    parameter.__class__ = ShardedParameter


def seal_all(parameters: Sequence[nn.Parameter], sealed: Sequence[torch.Tensor]) -> None:
    """Make parameters whose memory is free sharded ones."""
    for parameter, each in zip(parameters, sealed, strict=True):
        seal(parameter, each)


def sealed_like(empty: torch.Tensor) -> torch.Tensor:
    """Return a sealed tensor like one whose memory will be free; that one if torch lacks a way."""
    with torch.inference_mode(mode=False):
        return _sealed_like(empty) if _is_available(empty.device) else empty


def _sealed_like(like: torch.Tensor) -> torch.Tensor:
    key = torch._C.DispatchKey
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _Nowhere,
        like.size(),
        strides=like.stride(),
        dtype=like.dtype,
        device=like.device,
        _extra_dispatch_keys=torch._C.DispatchKeySet(key.QuantizedHPU)
        | torch._C.DispatchKeySet(key.HPU),
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # what asks for the address raises as well
    return made


@functools.cache
def _is_available(device: torch.device) -> bool:
    """Try whether a parameter on a device can be sealed, is not read then, and comes back."""
    try:
        probe = nn.Parameter(torch.ones(2, 3, dtype=torch.float32, device=device))
        values = probe.data
        probe.data = _sealed_like(values)
        with contextlib.suppress(RuntimeError):
            probe + 1
            return False
        probe.data = values
        return probe.sum().item() == 6.0
    except (RuntimeError, TypeError, AttributeError):
        return False
