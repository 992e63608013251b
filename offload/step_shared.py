"""One update that host and device share: each takes a sub-group whenever it has room for one.

[Note: shared update] The device takes from the front of the order and the host from the back, until
they meet. The host can take what rests in memory with its state on the host. One thread issues
everything: kernels of the host run in a queue, see [Note: kernel queue] in offload/kernel_queue.py.
Both give the same bits, so who took what changes nothing but the time. Whether an update is shared
at all is found out by trial (`estimators.ShareTrial`): both sides read and write the same memory.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Protocol

from estimators import Section, ShareRates, SubGroup, Tier, host_is_sooner
from estimators.records import DEVICE_BUFFER_COUNT
from offload.device import Fence
from offload.kernel_queue import open_queue
from offload.sharing import Sharing
from offload.step_device import Lend, StreamedUpdate
from offload.step_host import HostUpdate
from offload.update_pass import UpdatePass


class OnUpdate(Protocol):
    """Called with each sub-group that was updated, and where: on the "host" or the "device"."""

    def __call__(self, group: SubGroup, side: str) -> None:
        """Take note of it."""


class _Order:
    """The sub-groups that nobody has taken yet, in order."""

    def __init__(self, groups: Sequence[SubGroup], host_count: int | None) -> None:
        self._groups = groups
        self._taken = [False] * len(groups)
        self._front = 0
        self._for_host = [at for at, group in enumerate(groups) if host_may_take(group)]
        self._reserved: frozenset[int] = frozenset()
        if host_count is not None:
            self._for_host = self._for_host[max(len(self._for_host) - host_count, 0) :]
            self._reserved = frozenset(self._for_host)
        self.numel = sum(group.numel for group in groups)
        """Elements of what nobody has taken."""

    @property
    def is_fixed(self) -> bool:
        """Whether it is settled who takes what."""
        return bool(self._reserved)

    def first(self) -> int | None:
        """Return what the device takes next."""
        while self._front < len(self._groups) and (
            self._taken[self._front] or self._front in self._reserved
        ):
            self._front += 1
        return self._front if self._front < len(self._groups) else None

    def last(self) -> SubGroup | None:
        """Return what the host takes next."""
        while self._for_host and self._taken[self._for_host[-1]]:
            self._for_host.pop()
        return self._groups[self._for_host[-1]] if self._for_host else None

    def take_first(self, position: int) -> SubGroup:
        """Take what `first` returned."""
        self._taken[position] = True
        self.numel -= self._groups[position].numel
        return self._groups[position]

    def take_last(self) -> None:
        """Take what `last` returned."""
        position = self._for_host.pop()
        self._taken[position] = True
        self.numel -= self._groups[position].numel


def host_may_take(group: SubGroup) -> bool:
    """Tell whether the host can update a sub-group: its state is there, nothing is on NVMe."""
    return group.tier(Section.STATE) is Tier.HOST and not any(map(group.on_nvme, Section))


def update_shared(
    pass_: UpdatePass,
    sharing: Sharing,
    on_update: OnUpdate,
    groups: Sequence[SubGroup],
    lend: Lend,
) -> Fence:
    """Update all sub-groups, shared or by the device alone, and time it.

    The fence is behind all that the device copies out.
    """
    begin = time.perf_counter()
    is_shared, is_open = sharing.is_next, sharing.trial.is_open
    device = StreamedUpdate(pass_, groups, functools.partial(on_update, side="device"))
    if is_shared:
        # What a kernel of the host writes may still be copied.
        pass_.store.device.settle()
        order = _Order(groups, sharing.host_count)
        first = order.first()
        if first is not None:
            device.take(order.take_first(first), lend(first))
        with open_queue(pass_.store.kernels, spares_a_core=True) as queue:
            segments = {group.segment for group in groups if host_may_take(group)}
            on_host = functools.partial(on_update, side="host")
            host = HostUpdate(pass_, queue, on_host, segments)
            fence, device_seconds = _share(sharing, order, host, device, lend)
            _note_rates(sharing, groups, (host.seconds, host.numel), device_seconds)
    else:
        fence = device.run(lend)
    if is_open:
        fence.wait()
    sharing.trial.note(time.perf_counter() - begin, shared=is_shared)
    if is_open and not sharing.is_next and not sharing.trial.is_open:
        pass_.store.staging = None  # nothing will be shared
    return fence


def _share(
    sharing: Sharing, order: _Order, host: HostUpdate, device: StreamedUpdate, lend: Lend
) -> tuple[Fence, float]:
    """Update all that is in order; return the fence of the device, and how long it took."""
    begin = time.perf_counter()
    while order.first() is not None or order.last() is not None:
        has_moved = host.advance()
        has_moved |= _offer_to_host(sharing, order, host, device)
        position = order.first()
        if position is not None and device.waiting_count <= DEVICE_BUFFER_COUNT:
            device.take(order.take_first(position), lend(position))
            has_moved = True
        if not has_moved:
            host.rest()
    fence = device.finish()
    seconds = 0.0
    while host.is_busy:
        if not seconds and fence.done():
            seconds = time.perf_counter() - begin
        if not host.advance():
            host.rest()
    host.finish()
    return fence, seconds or time.perf_counter() - begin


def _offer_to_host(
    sharing: Sharing, order: _Order, host: HostUpdate, device: StreamedUpdate
) -> bool:
    """Let the host take a sub-group, if it has room and would be done with it sooner."""
    group = order.last()
    if group is None or not host.has_room:
        return False
    if not order.is_fixed:
        others = order.numel - group.numel + device.waiting_count * group.numel
        if not host_is_sooner(sharing.rates, host.waiting_numel + group.numel, others):
            return False
    order.take_last()
    host.take(group)
    return True


def _note_rates(
    sharing: Sharing,
    groups: Sequence[SubGroup],
    by_host: tuple[float, int],
    device_seconds: float,
) -> None:
    """Remember what an element took: `by_host` are the seconds and elements of the host."""
    host_seconds, host_numel = by_host
    device_numel = sum(group.numel for group in groups) - host_numel
    if host_numel and device_numel:
        sharing.rates = ShareRates(host_seconds / host_numel, device_seconds / device_numel)
