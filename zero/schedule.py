"""Hooks that unshard each unit just before it is needed and reshard it after.

[Note: holds] A unit stays unsharded while a forward of its module runs, while the backward of one
of its forward instances runs, or inside `GatheredParameters`. The backward of an instance begins
when the node that produced one of its outputs is about to run, and ends when the node that produced
one of its inputs is about to run: autograd runs ready nodes by descending sequence number, so by
then every node of the instance has run. Units whose inputs need no gradient are released when all
of their gradients have arrived ([Note: first units] in `zero/arrivals.py`); what is still held when
the graph task ends is released then.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offload import Store
from zero.arrivals import Arrivals, Instance
from zero.comm import Communicator
from zero.experts import ExpertTurns
from zero.gradients import GradientReducer
from zero.guard import SavedTensorGuard, refuse_transforms
from zero.hooks import ModuleHook, is_in_forward
from zero.order import Phase
from zero.prefetch import Prefetcher
from zero.reuse import PrefetchLimits
from zero.structures import aliases, cloned, replaced, tensors_in
from zero.tasks import BackwardTasks
from zero.unit import Unit

_UNTIL_NEXT_FORWARD = -2
"""Task id of holds that a backward with `create_graph=True` needs after it has ended."""


class UnitScheduler:
    """Owns the units of one engine, their hooks and their holds."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: Store,
        reducer: GradientReducer | None,
        limits: PrefetchLimits,
        communicator: Communicator,
    ) -> None:
        self.units = tuple(units)
        self._store = store
        self._communicator = communicator
        self._reducer = reducer
        self._turns = ExpertTurns(units, store, reducer, communicator)
        self._guard = SavedTensorGuard(self._require_for_backward)
        self._arrivals = Arrivals(units, self._release, self._turns.is_alone_with)
        self._tokens: dict[int, list[Instance]] = {unit.index: [] for unit in units}
        self._tasks = BackwardTasks(self._end_of_task)
        self._handles: list[Any] = []
        self._forward_thread: int | None = None
        self._forwards = 0
        """Forwards of units that run, one inside another."""
        self._phase = Phase.FORWARD
        """Of the forward that runs or ran."""
        self._is_in_model = False
        """Whether a forward of the model runs, whose root unit may have no hooks."""
        self._unsharded: dict[int, Unit] = {}
        """Units that move and are unsharded, by index: few of them, whatever the model's depth."""
        self.prefetcher = Prefetcher(self.units, store, limits, self._unsharded)
        self._is_retired = False
        self.on_resize: Callable[[Any], None] | None = None
        """Gives a parameter of this runtime another shape."""
        self.on_backward_begin: Callable[[], None] | None = None
        """Called once a backward, where no parameters rest on NVMe: slots are spare then."""
        self.on_backward_end: Callable[[], None] | None = None
        """Called when a backward that delivered gradients has ended."""
        self.on_backward_failure: Callable[[], None] | None = None
        """Called once when a backward is found to have failed."""

    def install(self) -> None:
        """Register the hooks; units that never move get none, but for the whole model's end."""
        self._handles.extend(self._turns.install())
        for unit in self.units:
            if unit.moves or self._turns.surround(unit):
                self._handles.append(
                    unit.module.register_forward_pre_hook(
                        ModuleHook(self._before_forward, unit), prepend=True, with_kwargs=True
                    )
                )
                self._handles.append(
                    unit.module.register_forward_hook(
                        ModuleHook(self._after_forward, unit), with_kwargs=True, always_call=True
                    )
                )
        self._handles.append(
            self.units[0].module.register_forward_hook(
                ModuleHook(self._after_model), always_call=True
            )
        )
        if self._reducer is not None:
            self._handles.extend(
                self._reducer.register(self._queue_end_of_task, self._arrivals.note)
            )

    def remove(self, *, for_good: bool = False) -> None:
        """Take all hooks off; for good, those of a call that is under way do nothing."""
        self._is_retired = self._is_retired or for_good
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.prefetcher.kept.drop_all()

    def hold(self, unit: Unit) -> None:
        """Unshard a unit for a `GatheredParameters` window."""
        unit.gather_depth += 1
        try:
            self._unshard(unit)
        except BaseException:
            unit.gather_depth -= 1
            raise

    def drop(self, unit: Unit) -> None:
        """End a `GatheredParameters` window."""
        unit.gather_depth -= 1
        self._release(unit)

    def begin_forward(self, *, of_model: bool) -> None:
        """Drop what a failed backward has left, unless a forward or a backward runs.

        The root unit has no hooks where it does not move: its blocks need to know of the model.
        What is left of a forward of the model that was interrupted is found by the next one.
        """
        if torch._C._current_graph_task_id() != -1:
            return
        model, thread = self.units[0].module, self._forward_thread
        if not self._forwards or (of_model and not is_in_forward(model, thread)):
            self.recover()
            self._phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.INFERENCE
            self._is_in_model = of_model

    def recover(self, *, announce: bool = True, has_failed: bool = False) -> None:
        """Drop what an interrupted forward or a failed backward has left; called outside both.

        Gradients of a failed backward are dropped with their window; `announce` warns of it where
        no exception tells. One that is known to have failed may have left no trace.
        """
        failed = self._tasks.reset() or has_failed
        if self._reducer is not None and self._reducer.has_pending():
            failed = True
            self._reducer.abandon()
        self._turns.reset()
        self._arrivals.reset()
        self._guard.pop_all()
        self.prefetcher.ahead.drop(self._store)
        self._forward_thread = None
        self._is_in_model = False
        if failed or self._forwards:
            self._store.reclaim()
        for unit in self.units:
            if unit.backward_tokens or unit.forward_depth:
                unit.backward_tokens.clear()
                unit.forward_depth = 0
                self._tokens[unit.index].clear()
                self._release(unit)
        self.prefetcher.end_pass()
        self._forwards = 0
        if failed and announce:
            warnings.warn(
                "a backward failed; the gradients of this accumulation window are dropped",
                RuntimeWarning,
                stacklevel=2,
            )
        if failed and self.on_backward_failure is not None:
            self.on_backward_failure()

    def _before_forward(
        self, unit: Unit, _module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None
    ) -> None:
        if self._is_retired:
            return
        if unit.moves:
            refuse_transforms(unit.name)
        if not self._forwards:
            if not self._is_in_model or self._tasks.is_open:
                self.begin_forward(of_model=False)
            self._forward_thread = threading.get_ident()
        elif self._forward_thread != threading.get_ident():
            raise RuntimeError(
                "two threads run a forward of the same engine at once; its units can be in only"
                " one state: give each thread its turn, or its own engine"
            )
        unit.forward_depth += 1
        self._forwards += 1
        token = Instance()
        self._tokens[unit.index].append(token)
        self._guard.push()
        in_backward = torch._C._current_graph_task_id() != -1  # recomputed, for checkpointing
        self._acquire(unit, Phase.BACKWARD if in_backward else self._phase)
        if torch.is_grad_enabled():
            for tensor in tensors_in((args, kwargs)):
                token.has_gradient_inputs |= tensor.requires_grad
                node = tensor.grad_fn
                if tensor.requires_grad and self._communicator.world_size > 1:
                    token.inputs.append((tensor, node))
                if node is not None:
                    token.last_input = max(token.last_input, node._sequence_nr())
                    node.register_prehook(ModuleHook(self._done, unit, token))

    def _after_forward(
        self, unit: Unit, _module: nn.Module, _args: Any, _kwargs: dict[str, Any], output: Any
    ) -> Any:
        if self._is_retired or not self._tokens[unit.index]:
            return output
        if self._forward_thread != threading.get_ident():
            return output  # a pre-hook failed before ours ran, or ours refused this thread
        unit.forward_depth -= 1
        self._forwards -= 1
        token = self._tokens[unit.index].pop()
        self._guard.pop()
        storages = {segment.flat.untyped_storage()._cdata for segment in unit.segments}
        if any(aliases(tensor, storages) for tensor in tensors_in(output)):
            output = cloned(output, storages)
        if token.inputs:
            output = replaced(output, token.is_passed_on, lambda tensor: tensor.view_as(tensor))
            token.inputs.clear()
        for tensor in tensors_in(output):
            node = tensor.grad_fn
            if node is not None:
                begin = (node._sequence_nr(), tensor.dim())
                node.register_prehook(ModuleHook(self._needed, unit, token, begin))
        in_backward = torch._C._current_graph_task_id() != -1
        self._release(unit, is_recomputed=in_backward)
        if not (self._forwards or in_backward or self._is_in_model):
            self.prefetcher.end_forward(has_backward=torch.is_grad_enabled())
        return output

    def _after_model(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """End a forward of the whole model, of which its root unit may know nothing."""
        in_backward = torch._C._current_graph_task_id() != -1
        if self._is_retired or self._forwards or in_backward:
            return
        self.prefetcher.end_forward(has_backward=torch.is_grad_enabled(), of_model=True)
        self._is_in_model = False
        self.expect_backward(output)

    def expect_backward(self, outputs: Any) -> None:
        """Be told when a backward comes to tensors in `outputs`, see [Note: graph tasks]."""
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(ModuleHook(self._enter_backward))

    def _enter_backward(self, *_: Any) -> None:
        """Be told of the end of a backward that has come to the model, see [Note: graph tasks]."""
        if self._tasks.is_stale():
            self.recover()  # no backward is around this one, so the earlier one failed
        self._tasks.enter()

    def _needed(self, unit: Unit, token: Instance, begin: tuple[int, int], _gradients: Any) -> None:
        """Unshard for the backward of one forward instance, which begins at one of its outputs.

        Args:
            unit: the unit.
            token: its forward.
            begin: sequence number of the node, and dimensions of the output.

        Raises:
            RuntimeError: if the model was planned anew since that forward.
        """
        _refuse_old_graph(is_old=self._is_retired)
        self._queue_end_of_task()
        sequence, output_dim = begin
        present = tuple(self._unsharded.values())
        for other, ended in self._arrivals.overtaken(token, sequence, present):
            if self._turns.is_alone_with(other) or not self._turns.take(unit):
                self._done(other, ended, None)
        task = torch._C._current_graph_task_id()
        unit.backward_tokens[token] = _UNTIL_NEXT_FORWARD if torch.is_grad_enabled() else task
        is_loss = unit.index == 0 and output_dim == 0
        self._acquire(unit, Phase.BACKWARD, is_loss=is_loss)
        self._turns.begin_backward(unit, token)

    def _done(self, unit: Unit, token: object, _gradients: Any) -> None:
        """End the backward of one forward instance: its gradients have all arrived."""
        self._turns.end_backward(unit, token)
        if unit.backward_tokens.get(token, _UNTIL_NEXT_FORWARD) == _UNTIL_NEXT_FORWARD:
            return
        del unit.backward_tokens[token]
        is_over = not unit.backward_tokens and not self._turns.take(unit)
        if is_over and self._reducer is not None:
            self._reducer.flush(unit.segments)
        self._release(unit)

    def _require_for_backward(self, unit: Unit) -> None:
        """Unshard a unit that the graph has reached by another way than its output."""
        _refuse_old_graph(is_old=self._is_retired)
        task = torch._C._current_graph_task_id()
        in_graph = torch.is_grad_enabled()
        if unit.is_held and not (in_graph and task != -1):
            return
        self._queue_end_of_task()
        hold = _UNTIL_NEXT_FORWARD if in_graph or task == -1 else task
        if hold not in unit.backward_tokens.values():
            unit.backward_tokens[object()] = hold
        self._unshard(unit)

    def _acquire(self, unit: Unit, phase: Phase, *, is_loss: bool = False) -> None:
        self._unshard(unit)
        self.prefetcher.note_use(unit, phase, is_loss=is_loss)

    def _unshard(self, unit: Unit) -> None:
        self.prefetcher.kept.make_room(unit)
        if not self._turns.gather(unit):
            unit.unshard(self._store)
        if unit.moves:
            self._unsharded[unit.index] = unit
        self._guard.watch(unit)

    def _release(self, unit: Unit, *, is_recomputed: bool = False) -> None:
        if not unit.is_held:
            self._guard.forget(unit)
            self._unsharded.pop(unit.index, None)
            self.prefetcher.kept.reshard(
                unit, may_keep=not self._turns.take(unit), is_recomputed=is_recomputed
            )

    def _queue_end_of_task(self) -> None:
        """Take part in a backward: something of the engine is needed, or gets a gradient."""
        if torch._C._current_graph_task_id() == -1 or self._tasks.counts:
            return
        self._enter_backward()
        if self._reducer is not None:
            self._reducer.hooks.move_back()
        is_first = not self._tasks.has_signs
        self._tasks.has_signs = True
        if is_first and not self.prefetcher.reads and self.on_backward_begin is not None:
            self.on_backward_begin()

    def _end_of_task(self, task: int) -> None:
        self._turns.end_of_task(task)
        self._arrivals.end_of_task(task)
        is_nested = self._tasks.is_open
        for unit in self.units:
            ended = [token for token, own in unit.backward_tokens.items() if own == task]
            for token in ended:
                del unit.backward_tokens[token]
            if ended:
                is_over = not unit.backward_tokens and not self._turns.take(unit)
                if is_nested and is_over and self._reducer is not None:
                    self._reducer.flush(unit.segments)  # of checkpointing with `use_reentrant`
                self._release(unit)
        if is_nested:
            return  # the outer one reduces
        had_signs, self._tasks.has_signs = self._tasks.has_signs, False
        if not had_signs:
            return
        self.prefetcher.end_pass()
        has_gradients = self._arrivals.take_any() or self._communicator.world_size > 1
        if self._reducer is not None and has_gradients:
            self._reducer.flush()
        if self.on_backward_end is not None and has_gradients:
            self.on_backward_end()


def _refuse_old_graph(*, is_old: bool) -> None:
    if is_old:
        raise RuntimeError(
            "this graph is of a forward before parameters were frozen, unfrozen or resized, and the"
            " model was planned anew since: run the forward again"
        )
