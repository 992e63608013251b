"""How far the start of an engine is, in the log: tiers made, then units placed."""

from __future__ import annotations

import logging
import time

_log = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Seconds between two lines of the log."""


class StartProgress:
    """Says at INFO what is done, not more often than every `INTERVAL_S`, and what it took."""

    def __init__(self, unit_count: int, numel: int) -> None:
        self._unit_count, self._numel = unit_count, numel
        self._units = self._placed = 0
        self._begin = self._said = time.perf_counter()

    def tiers_made(self, size_bytes: int) -> None:
        """Say that memory and swap file are there."""
        _log.info("tiers of %.2f GB made in %.1f s", size_bytes / 1e9, self._seconds())

    def placed(self, numel: int) -> None:
        """Count a unit whose parameters are where they rest."""
        self._units += 1
        self._placed += numel
        now = time.perf_counter()
        if self._units == self._unit_count or now - self._said >= INTERVAL_S:
            self._said = now
            _log.info(
                "placed %d of %d units, %.1f of %.1f M parameters, after %.1f s",
                self._units,
                self._unit_count,
                self._placed / 1e6,
                self._numel / 1e6,
                self._seconds(),
            )

    def _seconds(self) -> float:
        return time.perf_counter() - self._begin
