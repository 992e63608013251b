"""Checksums of ranges of lines in one kernel, with the sums of `device_checksums.sums_of_lines`.

Imported only where CUDA and Triton are. Sums wrap, so the order in which programs add is no matter.
"""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN202, N803

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from offload.device_checksums import LINE_BYTES, SUM_FACTOR
from offload.launches import alike, offsets_from_first, on_device

_LINES = 256
"""Lines of one program: 16 KiB."""


@triton.jit
def _add_lines(
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


@triton.jit
def _line_sums(
    words, bounds, sums, line_count, range_count, LINES: tl.constexpr, FACTOR: tl.constexpr
):  # fmt: skip
    _add_lines(words, bounds, sums, line_count, range_count, LINES, FACTOR)


@triton.jit
def _line_sums_of(words, bounds, sums, table, LINES: tl.constexpr, FACTOR: tl.constexpr):
    """Sum up several buffers; a row has where one begins, its lines, and its ranges."""
    row = table + tl.program_id(1) * 4
    line_count = tl.load(row + 1)
    if tl.program_id(0).to(tl.int64) * LINES < line_count:
        range_start = tl.load(row + 2)
        range_count = tl.load(row + 3).to(tl.int32)
        words += tl.load(row)
        bounds += 2 * range_start
        _add_lines(words, bounds, sums + range_start, line_count, range_count, LINES, FACTOR)


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


def line_sums_of(buffers: Sequence[torch.Tensor], bounds: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of ranges of several buffers of words, one after another."""
    starts = offsets_from_first(buffers)
    if starts is None:
        raise ValueError("buffers must be of one type, at addresses that are multiples of it")
    counts = [each.numel() * 8 // LINE_BYTES for each in buffers]
    ranges = [len(each) for each in bounds]
    ends = list(itertools.accumulate(ranges))
    rows = [
        (start, count, end - size, size)
        for start, count, end, size in zip(starts, counts, ends, ranges, strict=True)
    ]
    launches = alike([count * LINE_BYTES for count in counts])
    device = buffers[0].device
    table = on_device([rows[at] for each in launches for at in each], device)
    sums = torch.zeros(ends[-1], dtype=torch.int64, device=device)
    together = torch.cat(list(bounds))
    with torch.cuda.device(device):
        for each in launches:
            grid = (triton.cdiv(counts[each[0]], _LINES), len(each))
            if grid[0]:
                _line_sums_of[grid](
                    buffers[0], together, sums, table, LINES=_LINES, FACTOR=SUM_FACTOR
                )
            table = table[len(each) :]
    return sums
