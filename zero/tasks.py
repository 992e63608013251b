"""The backward that runs: its graph tasks, of which checkpointing with `use_reentrant` nests some.

[Note: graph tasks] Autograd tells when a graph task ends to whoever was inside it. All that the
parameters of a checkpointed model get may arrive in nested tasks, so the outer one is entered where
the backward of the model begins, at its outputs, and at the loss that `engine.backward` gets.
Entering says nothing yet: who asks for the gradient of an input alone goes through the outputs as
well. Only gradients and units that are needed are signs of a backward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

import torch

from zero.hooks import ModuleHook


class BackwardTasks:
    """The graph tasks that were entered and have not ended."""

    def __init__(self, on_end: Callable[[int], None]) -> None:
        self._on_end = on_end
        self._open: set[int] = set()
        self._thread = 0
        """The one that was in the first of them."""
        self.has_signs = False
        """Whether gradients have arrived, or units were needed."""

    @property
    def is_open(self) -> bool:
        """Whether a backward runs, or failed."""
        return bool(self._open)

    @property
    def counts(self) -> bool:
        """Whether the task that runs was entered, and its backward has shown signs."""
        return self.has_signs and torch._C._current_graph_task_id() in self._open

    def is_stale(self) -> bool:
        """Tell whether what is open belongs to a backward that failed, and another one runs."""
        if not self.is_open or torch._C._current_graph_task_id() in self._open:
            return False
        return _is_outer(self._thread)

    def enter(self) -> None:
        """Be told of the end of the task that runs, inside of which this is called."""
        task = torch._C._current_graph_task_id()
        if task in self._open:
            return
        if not self._open:
            self._thread = threading.get_ident()
        self._open.add(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(ModuleHook(self._end, task))

    def reset(self) -> bool:
        """Forget a backward that failed; tell whether there was one that counts."""
        failed = self.is_open and self.has_signs
        self._open.clear()
        self.has_signs = False
        return failed

    def _end(self, task: int) -> None:
        self._open.discard(task)
        self._on_end(task)


def _is_outer(first: int) -> bool:
    """Tell whether no backward is around the one that runs.

    The backward of a GPU runs on a thread of autograd, the same one each time, which the caller's
    frames are not on. Those that are nested very deeply run on threads of autograd as well, which
    are others.

    Args:
        first: identifier of the thread that the backward before was first seen on.
    """
    is_of_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    if is_of_autograd and threading.get_ident() != first:
        return False
    return _backward_depth() == (0 if is_of_autograd else 1)


def _backward_depth() -> int:
    """Return how many backwards are on this thread's stack."""
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return depth
