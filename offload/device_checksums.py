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
        self.bounds = (
            torch.tensor(bounds, dtype=torch.int64, device="cpu").view(-1, 2).to(flat.device)
        )
        """First and last line of each range, shape `[ranges, 2]`."""
        self._kernel: Any = None
        self.kernel_of_all: Any = None
        """What sums up several buffers at once, if there is such a kernel on the device."""
        if triton_unavailable_reason(flat.device) is None:
            kernels = importlib.import_module("offload.triton_checksums")
            self._kernel, self.kernel_of_all = kernels.line_sums, kernels.line_sums_of

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the checksums, int64, shape `[ranges]`, on the device; the host waits for none."""
        words = flat.view(torch.int64)
        if self._kernel is not None:
            sums: torch.Tensor = self._kernel(words, self.bounds)
            return sums
        return sums_of_lines(words, self.bounds)


def checksums_of_all(buffers: Sequence[tuple[DeviceChecksums, torch.Tensor]]) -> torch.Tensor:
    """Return the checksums of several buffers of a device, one after another, int64."""
    kernel = buffers[0][0].kernel_of_all
    if kernel is None:
        return torch.cat([checksums.of(flat) for checksums, flat in buffers])
    words = [flat.view(torch.int64) for _, flat in buffers]
    sums: torch.Tensor = kernel(words, [checksums.bounds for checksums, _ in buffers])
    return sums


def sums_of_lines(words: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of ranges of lines, by plain operations of torch."""
    lines = words.view(-1, LINE_BYTES // 8).sum(1)
    weights = (2 * torch.arange(lines.numel(), device=words.device) + 1) * SUM_FACTOR
    running = torch.nn.functional.pad((lines * weights).cumsum(0), (1, 0))
    return running[bounds[:, 1]] - running[bounds[:, 0]]
