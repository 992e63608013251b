"""Seeded delays in everything that an engine waits for: collectives, meetings, copies, transfers.

Every rank sleeps at moments of its own, and one rank of each seed is slower than the others. What
is late is not there before somebody waits for it: a broadcast that nobody waited for has scribbled
over its target, a transfer is not done before its time. Each delay is counted by its kind.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zero
from aio_ops import Engine, SimulatedDisk, open_engine
from aio_ops.memory import Span
from aio_ops.transfer import Ticket, Transfer, TransferFile
from offload.device import Fence, Pairs
from tests.support.simulated_device import SimulatedDevice
from zero.rendezvous import Rendezvous

COLLECTIVES = tuple(
    name
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
        *("all_reduce", "reduce", "broadcast", "broadcast_object_list", "barrier"),
        *("all_to_all", "all_to_all_single", "gather", "scatter", "send", "recv"),
    )
    if hasattr(dist, name)
)

KINDS = (
    "meeting",
    *(
        f"{when} of a {what}"
        for what in ("collective", "copy", "transfer")
        for when in ("issue", "completion")
    ),
)


class Delays:
    """Sleeps of one rank of one run, and how many there were of each kind."""

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.chance = random.Random(f"{seed} {rank}")
        self._longest_s = 1e-3 if seed % world_size == rank else 2e-4

    def length_s(self) -> float:
        """Return how long something is late: mostly not at all, sometimes for long."""
        kind = self.chance.random()
        if kind < 0.9:
            return 0.0
        return self.chance.random() * self._longest_s * (0.2 if kind < 0.97 else 1.0)

    def pause(self, what: str) -> None:
        """Sleep, perhaps."""
        length_s = self.length_s()
        if length_s:
            self.counts[what] += 1
            time.sleep(length_s)


class LateWork:
    """A collective that is issued when somebody waits for it, or issues another one."""

    def __init__(self, late: LateCollectives, issue: Callable[[], Any]) -> None:
        self._late = late
        self._issue = issue
        self.is_over = False

    def is_completed(self) -> bool:
        """Tell whether it is over, which it is only after a wait."""
        return self.is_over

    def run(self) -> None:
        """Issue it and wait for it."""
        work = self._issue()
        if work is not None:
            work.wait()
        self.is_over = True

    def wait(self, *_arguments: Any) -> bool:
        """Bring this one and all before it to an end."""
        while not self.is_over:
            self._late.catch_up()
        self._late.delays.pause("completion of a collective")
        return True


class LateCollectives:
    """Wraps the functions of torch.distributed; what is asynchronous keeps its order."""

    def __init__(self, delays: Delays) -> None:
        self.delays = delays
        self.bytes = 0
        self._works: collections.deque[LateWork] = collections.deque()

    def catch_up(self) -> None:
        """Issue what waits, in order."""
        while self._works:
            self._works.popleft().run()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is late."""

        @functools.wraps(function)
        def late(*args: Any, **kwargs: Any) -> Any:
            self.delays.pause("issue of a collective")
            tensors = [each for each in (*args, *kwargs.values()) if torch.is_tensor(each)]
            self.bytes += sum(each.nbytes for each in tensors)
            if not kwargs.get("async_op"):
                self.catch_up()
                result = function(*args, **kwargs)
                self.delays.pause("completion of a collective")
                return result
            if name == "broadcast" and args[1] != dist.get_rank():
                args[0].view(torch.uint8).fill_(0xFF)
            work = LateWork(self, functools.partial(function, *args, **kwargs))
            self._works.append(work)
            return work

        return late


@contextmanager
def late_collectives(delays: Delays) -> Iterator[LateCollectives]:
    """Delay the collectives and meetings of this process, wherever the product refers to them."""
    late = LateCollectives(delays)
    wrapped = {
        id(function): late.wrap(name, function)
        for name in COLLECTIVES
        if (function := getattr(dist, name))
    }
    modules = [dist, *(each for name, each in sys.modules.items() if name.startswith("zero."))]
    undone = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if id(value) in wrapped
    ]
    meet = Rendezvous.meet

    @functools.wraps(meet)
    def late_meeting(self: Rendezvous, what: str, **options: Any) -> bool:
        delays.pause("meeting")
        is_ready = meet(self, what, **options)
        delays.pause("meeting")
        return is_ready

    for module, name, value in undone:
        setattr(module, name, wrapped[id(value)])
    Rendezvous.meet = late_meeting  # type: ignore[method-assign]
    try:
        yield late
        late.catch_up()
    finally:
        Rendezvous.meet = meet  # type: ignore[method-assign]
        for module, name, value in undone:
            setattr(module, name, value)


class DelayedDevice(SimulatedDevice):
    """Copies late, and in its own time."""

    def __init__(self, seed: int, delays: Delays) -> None:
        super().__init__(seed)
        self._delays = delays

    def _start(self, way: str, pairs: Pairs, after: Fence) -> Fence:
        self._delays.pause("issue of a copy")
        return super()._start(way, pairs, after)

    def catch_up(self, fence: Any) -> None:
        self._delays.pause("completion of a copy")
        super().catch_up(fence)


class DelayedDisk(SimulatedDisk):
    """Completes in random order, scribbles, and sleeps."""

    def __init__(self, seed: int, delays: Delays) -> None:
        super().__init__(seed)
        self._delays = delays

    def _start(
        self, transfers: list[Transfer], file: TransferFile, pieces: Sequence[tuple[int, Span]]
    ) -> list[Ticket]:
        self._delays.pause("issue of a transfer")
        return super()._start(transfers, file, pieces)

    def _advance(self, transfer: Transfer, timeout_s: float | None) -> None:
        self._delays.pause("completion of a transfer")
        super()._advance(transfer, timeout_s)


class LateTicket(Ticket):
    """A ticket of a real engine that is not over before its time."""

    def __init__(self, ticket: Ticket, delays: Delays) -> None:
        super().__init__(ticket._transfer, ticket._advance)
        late_s = delays.length_s()
        delays.counts["completion of a transfer"] += late_s > 0
        self._due = time.monotonic() + late_s

    def settle(self, timeout_s: float | None = None) -> bool:
        left_s = self._due - time.monotonic()
        if left_s > 0 and timeout_s is not None and timeout_s < left_s:
            return False
        time.sleep(max(left_s, 0.0))
        return super().settle(timeout_s)


def delay_engine(engine: Engine, delays: Delays) -> Engine:
    """Make the transfers of an engine that moves real bytes late."""
    start = engine._start

    def late_start(
        transfers: list[Transfer], file: TransferFile, pieces: Sequence[tuple[int, Span]]
    ) -> list[Ticket]:
        delays.pause("issue of a transfer")
        return [LateTicket(each, delays) for each in start(transfers, file, pieces)]

    engine._start = late_start  # type: ignore[method-assign]
    return engine


def open_late_engine(seed: int, delays: Delays, path: str) -> Engine:
    """Return a hostile disk in memory for odd seeds, a real engine in `path` for even ones."""
    if seed % 2:
        return DelayedDisk(seed, delays)
    return delay_engine(open_engine("auto", directory=path), delays)


@contextmanager
def late_device(seed: int, delays: Delays) -> Iterator[DelayedDevice]:
    """Let engines compute beside a device whose copies are late."""
    device = DelayedDevice(seed, delays)
    with mock.patch.object(zero.planning, "open_device", lambda _wanted: device):
        yield device
