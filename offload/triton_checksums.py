"""Checksums of ranges of lines in one kernel, with the sums of `device_checksums.sums_of_lines`.

Imported only where CUDA and Triton are. Sums wrap, so the order in which programs add is no matter.
"""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from offload.device_checksums import LINE_BYTES, SUM_FACTOR

_LINES = 256
"""Lines of one program: 16 KiB."""


@triton.jit
def _line_sums(
    words, bounds, sums, line_count, range_count, LINES: tl.constexpr, FACTOR: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * LINES
    line = first + tl.arange(0, LINES)
    at = tl.expand_dims(line, 1) * 8 + tl.expand_dims(tl.arange(0, 8), 0)
    found = tl.load(words + at, at < line_count * 8, other=0)
    weighted = tl.sum(found, axis=1) * ((2 * line + 1) * FACTOR)
    for index in range(range_count):
        start = tl.load(bounds + 2 * index)
        stop = tl.load(bounds + 2 * index + 1)
        if (start < first + LINES) & (stop > first):
            inside = tl.where((line >= start) & (line < stop), weighted, 0)
            tl.atomic_add(sums + index, tl.sum(inside, axis=0))


def line_sums(words: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of ranges of lines, int64, shape `[ranges]`."""
    sums = torch.zeros(len(bounds), dtype=torch.int64, device=words.device)
    count = words.numel() * 8 // LINE_BYTES
    if count and len(bounds):
        with torch.cuda.device(words.get_device()):
            _line_sums[(triton.cdiv(count, _LINES),)](
                words, bounds, sums, count, len(bounds), LINES=_LINES, FACTOR=SUM_FACTOR
            )
    return sums
