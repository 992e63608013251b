"""Checksums of parameters on a device, computed there."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from offload.kernels_device import triton_unavailable_reason

LINE_BYTES = 64
SUM_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
"""Spreads small differences over all bits of a wrapping sum."""


class DeviceChecksums:
    """Checksums of the bits of ranges of a flat tensor on a device, computed there.

    A line is 64 bytes. The 8-byte words of a line are added, then the lines with a weight each:
    whatever changes a line shows, unless it only moves words within it.
    """

    def __init__(self, flat: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        """Take ranges of elements that begin at a line each; what follows one stays as it is."""
        size = flat.element_size()
        bounds = [
            [start * size // LINE_BYTES, -(-stop * size // LINE_BYTES)] for start, stop in ranges
        ]
        self._bounds = torch.tensor(bounds, dtype=torch.int64).view(-1, 2).to(flat.device)
        self._kernel: Any = None
        if triton_unavailable_reason(flat.device) is None:
            self._kernel = importlib.import_module("offload.triton_checksums").line_sums

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the checksums, int64, shape `[ranges]`, on the device; the host waits for none."""
        words = flat.view(torch.int64)
        if self._kernel is not None:
            sums: torch.Tensor = self._kernel(words, self._bounds)
            return sums
        return sums_of_lines(words, self._bounds)


def sums_of_lines(words: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of ranges of lines, by plain operations of torch."""
    lines = words.view(-1, LINE_BYTES // 8).sum(1)
    weights = (2 * torch.arange(lines.numel(), device=words.device) + 1) * SUM_FACTOR
    running = torch.nn.functional.pad((lines * weights).cumsum(0), (1, 0))
    return running[bounds[:, 1]] - running[bounds[:, 0]]
