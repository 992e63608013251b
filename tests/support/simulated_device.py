"""A device whose copies are late: what does not wait for them sees NaN.

Its memory is host memory, kept apart. A copy fills its target with 0xFF, which is NaN in every
floating-point type (unless it must begin after another copy), and is made when somebody waits for
its fence or joins it, with all earlier ones of its direction. Whether a copy has ended without that
is decided by chance.
"""

from __future__ import annotations

import collections
import os
import random
from dataclasses import dataclass

import torch

from aio_ops import HostArena, Span
from offload.arrays import copy_bytes
from offload.device import PASSED, Fence, Memory, SeparateDevice


@dataclass(eq=False)
class _Late(Fence):
    device: SimulatedDevice
    queue: collections.deque[_Late]
    source: Memory
    target: Memory
    after: Fence
    is_over: bool = False

    def wait(self) -> None:
        self.device.catch_up(self)

    def done(self) -> bool:
        if not self.is_over and self.device.chance.random() < 0.5:
            self.device.catch_up(self)
        return self.is_over


class SimulatedDevice(SeparateDevice):
    """Computes at once, copies late."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu")
        self.identity = f"simulated {os.getpid()}"
        self.chance = random.Random(seed)
        self._queues = {"in": collections.deque(), "out": collections.deque()}

    def _start(self, way: str, source: Memory, target: Memory, after: Fence) -> Fence:
        if after is PASSED or (isinstance(after, _Late) and after.is_over):
            _span(target).view()[:] = b"\xff" * target.size_bytes
        fence = _Late(self, self._queues[way], source, target, after)
        self._queues[way].append(fence)
        return fence

    def join(self, fence: Fence) -> None:
        fence.wait()

    def settle(self) -> None:
        for queue in self._queues.values():
            while queue:
                self.catch_up(queue[-1])

    def arena(self, size_bytes: int) -> HostArena:
        return HostArena(size_bytes)

    def catch_up(self, fence: _Late) -> None:
        """Make all copies of a direction up to one."""
        while not fence.is_over:
            first = fence.queue.popleft()
            first.after.wait()
            source, target = _span(first.source), _span(first.target)
            copy_bytes(source, target, source.size_bytes)
            first.is_over = True
            del first.source, first.target


def _span(memory: Memory) -> Span:
    if isinstance(memory, Span):
        return memory
    storage = memory.bytes.untyped_storage()
    if memory.bytes.storage_offset() + memory.size_bytes > storage.nbytes():
        raise RuntimeError("device memory was freed while a copy used it")
    return Span(memory.bytes.data_ptr(), memory.size_bytes, storage)
