"""A device whose copies are late: what does not wait for them sees NaN.

Its memory is host memory, kept apart. A copy fills its target with 0xFF, which is NaN in every
floating-point type (unless it must begin after another copy), and is made when somebody waits for
its fence or joins it, with all earlier ones of its direction. Whether a copy has ended without that
is decided by chance. What runs beside is as late. Copies keep no device memory alive: where it was
freed before somebody waited, that is an error.
"""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from aio_ops import HostArena, Span
from offload.arrays import copy_bytes
from offload.device import PASSED, Fence, Memory, Pairs, SeparateDevice


class Held:
    """Memory of a copy in flight: what is on the device lives as long as others keep it."""

    def __init__(self, memory: Memory) -> None:
        self._span: Span | None = None
        if isinstance(memory, Span):
            self._span = memory
            return
        storage = memory.bytes.untyped_storage()
        self._storage = StorageWeakRef(storage)
        self._end_bytes = memory.bytes.storage_offset() + memory.size_bytes
        self._place = memory.bytes.data_ptr(), memory.size_bytes

    def span(self) -> Span:
        """Return where it is, or raise if it is nowhere."""
        if self._span is not None:
            return self._span
        storage = self._alive()
        if storage is None or self._end_bytes > storage.nbytes():
            raise RuntimeError("device memory was freed while a copy used it")
        return Span(*self._place, storage)

    def _alive(self) -> torch.UntypedStorage | None:
        if self._storage.expired():
            return None
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(
            self._storage.cdata
        )
        return found


@dataclass(eq=False)
class _Late(Fence):
    device: SimulatedDevice
    queue: collections.deque[_Late]
    is_over: bool = field(default=False, init=False)

    def wait(self) -> None:
        self.device.catch_up(self)

    def done(self) -> bool:
        return self.is_over

    def make(self) -> None:
        """Do what is late."""
        raise NotImplementedError


@dataclass(eq=False)
class _LateCopy(_Late):
    source: Held
    target: Held
    after: Fence

    def done(self) -> bool:
        if not self.is_over and self.device.chance.random() < 0.5:
            self.device.catch_up(self)
        return self.is_over

    def make(self) -> None:
        self.after.wait()
        source, target = self.source.span(), self.target.span()
        copy_bytes(source, target, source.size_bytes)
        del self.source, self.target


@dataclass(eq=False)
class _LateWork(_Late):
    work: Callable[[], object]
    memory: torch.Tensor
    before: torch.Tensor

    def make(self) -> None:
        self.memory.view(torch.uint8).copy_(self.before)
        self.work()
        del self.work, self.memory, self.before


class SimulatedDevice(SeparateDevice):
    """Computes at once, copies late."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu")
        self.identity = f"simulated {os.getpid()}"
        self.chance = random.Random(seed)
        ways = ("in", "out", "in aside", "out aside")
        self._queues = {way: collections.deque() for way in ways}
        self._beside = collections.deque()
        self.wait_count = 0
        """How often somebody waited for what was fetched."""
        self._fetch_count = 0
        self._fetched_until = 0

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Bring a tensor late: with the first that is waited for of those behind it."""
        self._fetch_count += 1
        number, values = self._fetch_count, tensor.clone()

        def finish() -> torch.Tensor:
            if number > self._fetched_until:
                self.wait_count += 1
                self._fetched_until = self._fetch_count
            return values

        return finish

    def _start(self, way: str, pairs: Pairs, after: Fence) -> Fence:
        fence: Fence = PASSED
        for source, target in pairs:
            if after is PASSED or (isinstance(after, _Late) and after.is_over):
                Held(target).span().view()[:] = b"\xff" * target.size_bytes
            fence = _LateCopy(self, self._queues[way], Held(source), Held(target), after)
            self._queues[way].append(fence)
        return fence

    def beside(
        self, work: Callable[[], object], memory: torch.Tensor, after: Fence = PASSED
    ) -> Fence:
        """Work late, never by chance: ranks exchange in the same order. Until then there is NaN."""
        after.wait()
        raw = memory.detach().view(torch.uint8)
        fence = _LateWork(self, self._beside, work, memory.detach(), raw.clone())
        raw.fill_(0xFF)
        self._beside.append(fence)
        return fence

    def start_aside(self) -> None:
        """What was issued is done."""

    def join(self, fence: Fence) -> None:
        fence.wait()

    def settle(self) -> None:
        for queue in self._queues.values():
            while queue:
                self.catch_up(queue[-1])

    def arena(self, size_bytes: int) -> HostArena:
        return HostArena(size_bytes)

    def catch_up(self, fence: _Late) -> None:
        """Do all that is late of a direction, up to one."""
        while not fence.is_over:
            first = fence.queue.popleft()
            first.make()
            first.is_over = True
