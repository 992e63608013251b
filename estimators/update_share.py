"""How host and device share an update: who takes what, and whether sharing is worth it."""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass, replace

from estimators.formats import UpdateRule
from estimators.placement import minimum_host_bytes
from estimators.segments import PlacementRequest, Tier

_ROUNDS = 3
"""Updates of each kind that are compared."""
_WORTH = 0.95
"""Part of the device's time that a shared update may take: it takes cores and memory as well."""
_WATCHED = 8
"""Shared updates, the last ones, that must not be slower than the device alone was."""


def may_share(request: PlacementRequest) -> bool:
    """Tell whether the host can update some of what a device streams: state that rests there.

    Ranks that compute at one another's pace, and a durable run, leave it to the device.
    """
    return (
        request.update_on_device
        and request.trains
        and request.optimizer_tier is Tier.HOST
        and isinstance(request.rule, UpdateRule)
        and request.world_size == 1
        and not request.durable
    )


def fit_sharing(request: PlacementRequest, host_bytes: int) -> PlacementRequest:
    """Return the request, unshared if the host budget has no room for the buffers of sharing."""
    if not request.shares_update or minimum_host_bytes(request) <= host_bytes:
        return request
    return replace(request, shares_update=False)


class ShareTrial:
    """Tells, from the seconds of updates so far, whether the next one is shared.

    The first update is shared and not counted: kernels are compiled in it. Those after it are by
    turns shared and of the device alone; from then on they are shared if that took less by a
    twentieth (the median). A trial starts anew once shared updates take longer than the device
    alone did.
    """

    def __init__(self) -> None:
        self._is_first = True
        self._shared: list[float] = []
        self._alone: list[float] = []
        self._last: collections.deque[float] = collections.deque(maxlen=_WATCHED)

    @property
    def is_open(self) -> bool:
        """Whether updates are still compared."""
        return len(self._alone) < _ROUNDS

    @property
    def shares(self) -> bool:
        """Whether the next update is shared."""
        if self.is_open:
            return len(self._shared) <= len(self._alone)
        return statistics.median(self._shared) < _WORTH * statistics.median(self._alone)

    def note(self, seconds: float, *, shared: bool) -> None:
        """Count an update."""
        if self._is_first:
            self._is_first = False
        elif self.is_open:
            (self._shared if shared else self._alone).append(seconds)
        elif shared:
            self._watch(seconds)

    def _watch(self, seconds: float) -> None:
        self._last.append(seconds)
        is_slower = statistics.median(self._last) > statistics.median(self._alone)
        if len(self._last) == _WATCHED and is_slower:
            for each in (self._shared, self._alone, self._last):
                each.clear()


@dataclass(frozen=True, slots=True)
class ShareRates:
    """Seconds that an element took in the last shared update, on each side."""

    host_seconds: float
    device_seconds: float


def host_is_sooner(rates: ShareRates | None, host_numel: int, device_numel: int) -> bool:
    """Tell whether the host is done sooner with what it would have than the device with the rest.

    Args:
        rates: None where nothing was measured yet: the host then takes what it can.
        host_numel: elements that the host has taken and not updated, those asked about included.
        device_numel: elements that the device would have: taken and not updated, or nobody's.
    """
    if rates is None:
        return True
    return host_numel * rates.host_seconds <= device_numel * rates.device_seconds
