"""Hooks that unshard each unit just before it is needed and reshard it after.

[Note: holds] A unit stays unsharded while a forward of its module runs, while the backward of one
of its forward instances runs, or inside `GatheredParameters`. The backward of an instance begins
when the node that produced one of its outputs is about to run, and ends when the node that produced
one of its inputs is about to run: autograd runs ready nodes by descending sequence number, so by
then every node of the instance has run. What is still held when the graph task ends is released
then, which covers units whose inputs need no gradient.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from estimators import Section, Tier
from offload import Store
from zero.gradients import GradientReducer
from zero.order import Phase, RecordedOrder
from zero.unit import Unit


class UnitScheduler:
    """Owns the units of one engine, their hooks and their holds."""

    def __init__(
        self, units: Sequence[Unit], store: Store, reducer: GradientReducer | None
    ) -> None:
        self.units = tuple(units)
        self._store = store
        self._reducer = reducer
        self._order = RecordedOrder()
        self._tokens: dict[int, list[object]] = {unit.index: [] for unit in units}
        self._tasks_with_callback: set[int] = set()
        self._handles: list[Any] = []
        self.on_backward_end: Callable[[], None] | None = None
        """Called once when a backward that delivered gradients has ended."""
        self.on_backward_failure: Callable[[], None] | None = None
        """Called once when a backward is found to have failed."""

    def install(self) -> None:
        """Register the hooks; units that never move get none."""
        for unit in self.units:
            if unit.moves:
                self._handles.append(
                    unit.module.register_forward_pre_hook(
                        functools.partial(self._before_forward, unit),
                        prepend=True,
                        with_kwargs=True,
                    )
                )
                self._handles.append(
                    unit.module.register_forward_hook(
                        functools.partial(self._after_forward, unit),
                        with_kwargs=True,
                        always_call=True,
                    )
                )
        if self._reducer is not None:
            self._handles.extend(self._reducer.register(self._queue_end_of_task))

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def hold(self, unit: Unit) -> None:
        """Unshard a unit for a `GatheredParameters` window."""
        unit.gather_depth += 1
        try:
            unit.unshard(self._store)
        except BaseException:
            unit.gather_depth -= 1
            raise

    def drop(self, unit: Unit) -> None:
        """End a `GatheredParameters` window."""
        unit.gather_depth -= 1
        self._release(unit, keep_aliases=True)

    def recover(self) -> None:
        """Drop what a failed backward has left behind; called outside any backward."""
        failed = bool(self._tasks_with_callback)
        self._tasks_with_callback.clear()
        if self._reducer is not None and self._reducer.has_pending():
            failed = True
            self._reducer.abandon()
        if failed:
            self._store.reclaim()
        for unit in self.units:
            if unit.backward_tokens:
                unit.backward_tokens.clear()
                self._release(unit, keep_aliases=False)
        if failed and self.on_backward_failure is not None:
            warnings.warn(
                "a backward failed; the gradients of this accumulation window are dropped",
                RuntimeWarning,
                stacklevel=2,
            )
            self.on_backward_failure()

    def _before_forward(
        self, unit: Unit, _module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.recover()
        unit.forward_depth += 1
        token = object()
        self._tokens[unit.index].append(token)
        self._acquire(unit, Phase.FORWARD)
        if torch.is_grad_enabled():
            for tensor in _tensors((args, kwargs)):
                node = tensor.grad_fn
                if node is not None:
                    node.register_prehook(functools.partial(self._done, unit, token))

    def _after_forward(
        self, unit: Unit, _module: nn.Module, _args: Any, _kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not self._tokens[unit.index]:
            return output  # another pre-hook failed before ours ran
        unit.forward_depth -= 1
        token = self._tokens[unit.index].pop()
        storages = {segment.flat.untyped_storage()._cdata for segment in unit.segments}
        if any(_aliases(tensor, storages) for tensor in _tensors(output)):
            output = _cloned(output, storages)
        for tensor in _tensors(output):
            node = tensor.grad_fn
            if node is not None:
                node.register_prehook(functools.partial(self._needed, unit, token))
        self._release(unit, keep_aliases=not torch.is_grad_enabled())
        return output

    def _needed(self, unit: Unit, token: object, _gradients: Any) -> None:
        """Unshard for the backward of one forward instance."""
        self._queue_end_of_task()
        unit.backward_tokens[token] = torch._C._current_graph_task_id()
        self._acquire(unit, Phase.BACKWARD)

    def _done(self, unit: Unit, token: object, _gradients: Any) -> None:
        """End the backward of one forward instance."""
        if unit.backward_tokens.pop(token, None) is not None:
            self._release(unit, keep_aliases=False)

    def _acquire(self, unit: Unit, phase: Phase) -> None:
        unit.unshard(self._store)
        predicted = self._order.visit(phase, unit.index)
        if predicted is not None:
            self._read_ahead(self.units[predicted])

    def _read_ahead(self, unit: Unit) -> None:
        for segment in unit.segments:
            tier = self._store.plan.segment_tier(segment.index, Section.PARAMETER)
            if tier is Tier.NVME:
                self._store.read_ahead_parameters(segment.index)

    def _release(self, unit: Unit, *, keep_aliases: bool) -> None:
        if not unit.is_held:
            unit.reshard(keep_aliases=keep_aliases)

    def _queue_end_of_task(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._tasks_with_callback:
            return
        self._tasks_with_callback.add(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(self._end_of_task, task))

    def _end_of_task(self, task: int) -> None:
        self._tasks_with_callback.discard(task)
        for unit in self.units:
            ended = [token for token, own in unit.backward_tokens.items() if own == task]
            for token in ended:
                del unit.backward_tokens[token]
            if ended:
                self._release(unit, keep_aliases=False)
        if self._tasks_with_callback:
            return  # a nested backward; the outer one reduces
        if self._reducer is not None:
            self._reducer.flush()
        if self.on_backward_end is not None:
            self.on_backward_end()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and plain objects."""
    pending = [value]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
            continue
        if item is None or isinstance(item, str | bytes | int | float | type) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set):
            pending.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, nn.Module):
            pending.extend(vars(item).values())


def _aliases(tensor: torch.Tensor, storages: set[int]) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages


def _cloned(value: Any, storages: set[int]) -> Any:
    """Return `value` with tensors on the given storages cloned, containers rebuilt."""
    if isinstance(value, torch.Tensor):
        return value.clone() if _aliases(value, storages) else value
    if isinstance(value, dict):
        return {key: _cloned(item, storages) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cloned(item, storages) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cloned(item, storages) for item in value)
    return value
