"""The saved-tensor guard: autograd keeps geometry instead of the memory of unsharded parameters.

[Note: saved-tensor guard] While a unit's forward runs, whatever autograd saves passes through
`pack`. A tensor that lies in the flat buffer of an unsharded segment is remembered as its position
and the version of the parameter there, so the buffer can be freed; `unpack` unshards again if
nobody has, and rebuilds the view. So any way into the graph finds the values, also one through a
tensor that the module put elsewhere than in its output. torch skips its own check for in-place
changes once hooks exist, so the guard makes it. Tensors elsewhere go to the hooks that were on top
before (activation checkpointing, for one), or are kept with their version. They are kept detached:
an operation that saves its own output would else keep itself, and with it its graph, for good.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero.unit import Segment, Unit

_Hook = Callable[[Any], Any]
_autograd = torch._C._autograd
_hooks_are_enabled: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class _SavedView:
    """A tensor in the flat buffer of a segment, without its memory."""

    unit: Unit
    segment: Segment
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    parameter: nn.Parameter
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class _SavedTensor:
    """A tensor elsewhere, with the version that it was saved at."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class _SavedByOthers:
    """What the hooks below made of a tensor."""

    packed: Any
    unpack: _Hook


class SavedTensorGuard:
    """Pushes and pops the hooks, and knows which storages belong to unsharded segments."""

    def __init__(self, require: Callable[[Unit], None]) -> None:
        self._require = require
        self._owners: dict[int, tuple[Unit, Segment]] = {}
        self._pushed: list[tuple[int, int] | None] = []
        """The thread of each `push`, and the graph task that it was inside of, -1 outside; None if
        it pushed nothing."""

    def watch(self, unit: Unit) -> None:
        """Recognise the buffers of a unit that is unsharded now."""
        for segment in unit.segments:
            if not segment.is_in_place and segment.flat.numel():
                self._owners[segment.flat.untyped_storage()._cdata] = (unit, segment)

    def forget(self, unit: Unit) -> None:
        """Stop recognising the buffers of a unit that is about to be resharded."""
        for segment in unit.segments:
            self._owners.pop(segment.flat.untyped_storage()._cdata, None)

    def push(self) -> None:
        """Guard what autograd saves from here on."""
        if not torch.is_grad_enabled() or not _hooks_are_enabled():
            self._pushed.append(None)
            return
        below = _autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003  torch names no argument
        if below is not None and getattr(below[0], "guard", None) is self:
            self._pushed.append(None)  # an outer unit's forward is guarded already
            return
        _autograd._push_saved_tensors_default_hooks(_Pack(self, below), self._unpack)
        self._pushed.append(_place())

    def pop(self) -> None:
        """End the innermost `push`."""
        if self._pushed and self._pushed.pop() is not None:
            _autograd._pop_saved_tensors_default_hooks()

    def pop_all(self) -> None:
        """End every `push` that an interruption has left behind.

        Each thread has hooks of its own, and they are as before when a backward ends, whatever was
        pushed inside of it.
        """
        here, outside = _place(), (threading.get_ident(), -1)
        left, self._pushed = self._pushed, []
        for place in left:
            if place == here:
                _autograd._pop_saved_tensors_default_hooks()
            elif place == outside:
                self._pushed.append(place)  # to be ended when this is called outside again

    def pack(self, tensor: torch.Tensor, below: tuple[_Hook, _Hook] | None) -> Any:
        """Return what autograd keeps in place of `tensor`."""
        owner = None
        if tensor.layout is torch.strided:
            owner = self._owners.get(tensor.untyped_storage()._cdata)
        if owner is not None:
            unit, segment = owner
            offset = int(tensor.storage_offset())
            parameter = _parameter_at(segment, offset)
            return _SavedView(
                unit,
                segment,
                tensor.size(),
                tensor.stride(),
                offset,
                parameter,
                parameter._version,
            )
        if below is not None:
            return _SavedByOthers(below[0](tensor), below[1])
        version = tensor._version
        return _SavedTensor(tensor if tensor.is_leaf else tensor.detach(), version)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedByOthers):
            return saved.unpack(saved.packed)  # type: ignore[no-any-return]
        if isinstance(saved, _SavedTensor):
            if saved.tensor._version != saved.version:
                raise _modified(f"a tensor of shape {list(saved.tensor.shape)}", saved.version)
            return saved.tensor
        if not isinstance(saved, _SavedView):
            raise TypeError(f"the guard did not save {type(saved)}")
        if saved.parameter._version != saved.version:
            raise _modified(f"parameter {_name_of(saved)}", saved.version)
        self._require(saved.unit)
        with torch.no_grad():
            return saved.segment.flat.as_strided(saved.size, saved.stride, saved.offset)


class _Pack:
    """The pack hook of one `push`, with the hooks that were on top before."""

    def __init__(self, guard: SavedTensorGuard, below: tuple[_Hook, _Hook] | None) -> None:
        self.guard = guard
        self._below = below

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.guard.pack(tensor, self._below)


def refuse_transforms(name: str) -> None:
    """Refuse to run the forward of a unit that moves inside of what sees through memory.

    Args:
        name: of the unit.

    Raises:
        RuntimeError: inside of a transform of `torch.func`, or where torch traces.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        what, fix = (
            "a transform of torch.func (grad, vmap, jvp, jacrev ...)",
            ("use torch.autograd.grad, torch.autograd.functional or torch.autograd.forward_ad"),
        )
    elif torch._C._get_tracing_state() is not None:
        what, fix = "torch.jit.trace", "trace a model that no engine has"
    else:
        return
    raise RuntimeError(
        f"unit {name} moves between memories, which {what} cannot follow: {fix}, or let parameters"
        " stay where they are used (zero_optimization.stage 0 to 2)"
    )


def _place() -> tuple[int, int]:
    """Return this thread, and the graph task that runs in it."""
    return threading.get_ident(), torch._C._current_graph_task_id()


def _parameter_at(segment: Segment, offset: int) -> nn.Parameter:
    """Return the parameter that holds the element at `offset` of the flat buffer."""
    position = bisect.bisect_right(segment.layout.offsets, offset) - 1
    while position > 0 and segment.layout.numels[position] == 0:
        position -= 1
    return segment.members[max(position, 0)].parameter


def _name_of(saved: _SavedView) -> str:
    return next(
        member.name for member in saved.segment.members if member.parameter is saved.parameter
    )


def _modified(what: str, version: int) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace"
        f" operation: {what}, which was saved at version {version}; run the forward again after"
        " changing it"
    )
