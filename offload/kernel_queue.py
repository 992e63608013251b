"""Updates on the host that run beside the thread that asks for them.

[Note: kernel queue] One native thread runs the kernels of a queue, one after the other, without the
interpreter's lock, so that Python goes on issuing copies and launches meanwhile. Whoever submits an
update gets a ticket; until that is done the arrays are the queue's, which keeps them. Tickets are
done in the order of their numbers. A queue lives as long as one update of all sub-groups: nothing
is left running when that is over or has failed, and a forked child misses no thread.
"""

from __future__ import annotations

import abc
import collections
from types import TracebackType
from typing import TYPE_CHECKING

from offload.codes import RoundingKey
from offload.kernel_calls import Array, Kept, check_update
from offload.kernels import Kernels, NativeKernels
from offload.operands import StateArrays
from offload.rules import UpdateScalars

if TYPE_CHECKING:
    from offload import _kernels


class UpdateQueue(abc.ABC):
    """Kernels whose updates are asked for now and done by a ticket; see [Note: kernel queue]."""

    kernels: Kernels
    """Their `update` submits."""

    @property
    @abc.abstractmethod
    def last_ticket(self) -> int:
        """The ticket of what was submitted last, 0 before anything was."""

    @abc.abstractmethod
    def wait(self, ticket: int, most_seconds: float = 0.0) -> bool:
        """Tell whether a ticket is done, after waiting for it at most so long.

        Raises:
            RuntimeError: if an update failed, with what the native thread says.
        """

    def times(self, first: int, last: int) -> tuple[float, float] | None:  # noqa: ARG002
        """Return when the first of some tickets that are done began and the last of them ended.

        These are times of `time.perf_counter`; None where nothing ran beside.
        """
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Drop what has not begun, and wait for what runs."""

    def __enter__(self) -> UpdateQueue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _QueuedKernels(NativeKernels):
    """Native kernels whose updates go to a queue."""

    def __init__(self, thread_count: int, queue: _kernels.KernelQueue) -> None:
        super().__init__(thread_count, queue)
        self.kept: collections.deque[tuple[int, object]] = collections.deque()
        """The arrays of each ticket that is not known to be done."""
        self.last_ticket = 0

    def _update(
        self,
        kept: Kept,
        param: Array,
        grad: Array,
        state: StateArrays,
        scalars: UpdateScalars,
        key: RoundingKey | None,
    ) -> None:
        check_update(kept, (param, grad), state, scalars, key)
        self.last_ticket = self._call(kept, (param, grad), state, scalars, key)
        self.kept.append((self.last_ticket, (param, grad, state)))


class _NativeQueue(UpdateQueue):
    def __init__(self, thread_count: int) -> None:
        from offload import _kernels

        self._queue = _kernels.KernelQueue()
        self.kernels = self._queued = _QueuedKernels(thread_count, self._queue)

    @property
    def last_ticket(self) -> int:
        return self._queued.last_ticket

    def wait(self, ticket: int, most_seconds: float = 0.0) -> bool:
        is_done = self._queue.wait(ticket, most_seconds)
        kept = self._queued.kept
        while is_done and kept and kept[0][0] <= ticket:
            kept.popleft()
        return is_done

    def times(self, first: int, last: int) -> tuple[float, float] | None:
        if first > last:
            return None
        return self._queue.times(first)[0], self._queue.times(last)[1]

    def close(self) -> None:
        self._queue.close()
        self._queued.kept.clear()


class _NoQueue(UpdateQueue):
    """Kernels that update when they are asked to: those without a native module."""

    last_ticket = 0

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def wait(self, ticket: int, most_seconds: float = 0.0) -> bool:  # noqa: ARG002  all is done
        return True

    def close(self) -> None:
        """Do nothing: nothing runs."""


def open_queue(kernels: Kernels, *, spares_a_core: bool) -> UpdateQueue:
    """Return a queue of these kernels, on a thread less if the issuing one is busy meanwhile."""
    if not isinstance(kernels, NativeKernels):
        return _NoQueue(kernels)
    return _NativeQueue(max(kernels.thread_count - spares_a_core, 1))
