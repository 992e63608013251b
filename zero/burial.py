"""What lies behind a parameter while it is sharded: nothing that could be read by mistake.

[Note: burial] A freed storage is no guard: code that reaches memory without asking
`__torch_function__` (`torch.tensor(weight)`, for one) would read it and end the process. So between
windows `parameter.data` is a tensor of a device that nobody has, of the true shape and type, and
such code raises. Autograd compares devices, though. Where it may look at a parameter between
windows, because a graph of other code holds it or an optimizer asks for its gradient, the parameter
lies open: it has its empty memory on the CPU until that graph is gone and it is touched again. Nor
is a parameter buried between a forward that records a graph and the backward: another device makes
autograd forget the node that accumulates its gradient, so a parameter used twice would be delivered
twice in one backward, and the sum of three parts depends on their order.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zero.errors import ShardedAccessError
from zero.parameter import ShardedParameter

_NOBODYS_DEVICE = torch.device("hpu")


class _Nowhere(torch.Tensor):
    """A tensor without memory; never seen by users, only its geometry is taken over."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
            return True  # in inference mode, setting .data asks
        raise ShardedAccessError(f"{func} on a tensor that has no memory")


class Grave:
    """What a sharded parameter has in place of its values."""

    def __init__(self, empty: torch.Tensor) -> None:
        self._empty = empty
        with torch.inference_mode(mode=False):
            self._nowhere = _nowhere(empty) if _is_available() else empty
        self._nodes: list[weakref.ref[Any]] = []
        self._awaits_backward = False
        self._is_open = False

    def await_backward(self, *, is_awaited: bool) -> None:
        """Say whether a graph of the parameter's unit is about to be walked back."""
        self._awaits_backward = is_awaited

    def bury(self, parameter: nn.Parameter) -> None:
        """Make a parameter whose memory is free a sharded one, or close it again."""
        self._nodes = [node for node in self._nodes if node() is not None]
        self._is_open = self._awaits_backward or bool(self._nodes)
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data = self._empty if self._is_open else self._nowhere
        parameter.__class__ = ShardedParameter

    def keep_open(self, node: Any) -> None:
        """Leave the parameter open as long as a node of a graph lives."""
        self._nodes.append(weakref.ref(node))

    def lay_open(self, parameter: nn.Parameter) -> None:
        """Let autograd look at a sharded parameter, until it is closed."""
        if not self._is_open:
            self._is_open = True
            with torch._C.DisableTorchFunctionSubclass():
                parameter.data = self._empty

    def close(self, parameter: nn.Parameter) -> None:
        """Bury a parameter again that lies open for nobody any more."""
        if self._is_open and isinstance(parameter, ShardedParameter):
            self.bury(parameter)


def bury_all(parameters: Sequence[nn.Parameter], graves: Sequence[Grave]) -> None:
    """Make parameters whose memory is free sharded ones."""
    for parameter, grave in zip(parameters, graves, strict=True):
        grave.bury(parameter)


def _nowhere(like: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _Nowhere, like.size(), strides=like.stride(), dtype=like.dtype, device=_NOBODYS_DEVICE
    )
    return made


@functools.cache
def _is_available() -> bool:
    """Try whether a parameter can go to nobody's device and come back."""
    try:
        probe = nn.Parameter(torch.ones(2, 3))
        values = probe.data
        probe.data = _nowhere(values)
        probe.data = values
        return probe.sum().item() == 6.0
    except (RuntimeError, TypeError, AttributeError):
        return False
