"""What one launch of a kernel works on at once, and the table that tells it where that is.

[Note: launches] The host issues a launch in about the time in which a few million elements are
updated, and parameters have fewer. So the parts of a sub-group are updated at once: a launch has a
row of programs for each, as many as the largest needs, and a table on the device has where a part
begins in the sub-group and in its gradient (counted in elements from the first gradient of the
sub-group, which lies anywhere), its size, and the words of its key. All tables of an update go
there in one copy. Parts of very different sizes have launches of their own, so that few programs
find nothing to do. The squares of gradients, which a step begins with, are summed in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.kernels_device import PartsAndGradients
from offload.update_parts import GroupParts, UpdatePart

ROW_NUMEL = 6
"""Numbers of a row: five and one that makes rows begin at multiples of 16 bytes."""
_START_MULTIPLE = 32
_GRADIENT_MULTIPLE = 8
_ALIGNMENT_BYTES = 16
_SPREAD = 8
_FEW_NUMEL = 1 << 22
_MOST_ROWS = 65_535
"""As many rows of programs as a launch may have."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Parts that are updated at once."""

    rows: Tensor
    """Of the table, int64, shape `[parts, ROW_NUMEL]`."""
    numels: tuple[int, ...]
    """Elements of each part."""


def prepare_launches(groups: Sequence[PartsAndGradients], device: torch.device) -> list[GroupParts]:
    """Return the parts of each sub-group with their launches, whose table is on the device.

    Sub-groups of one part, and those whose parts do not begin where a launch could find them, have
    no launches.
    """
    rows: list[tuple[int, ...]] = []
    planned: list[list[Sequence[UpdatePart]]] = []
    for parts, grads in groups:
        starts = _gradient_starts(parts, grads)
        planned.append([])
        if starts is None:
            continue
        for positions in alike([part.numel for part in parts]):
            chosen = [parts[at] for at in positions]
            planned[-1].append(chosen)
            rows.extend(_row(part, starts[part.piece]) for part in chosen)
    tables = iter(
        torch.split(on_device(rows, device), [len(each) for some in planned for each in some])
        if rows
        else ()
    )
    return [
        GroupParts(
            parts, [Launch(next(tables), tuple(part.numel for part in each)) for each in some]
        )
        for (parts, _), some in zip(groups, planned, strict=True)
    ]


def alike(sizes: Sequence[int]) -> Sequence[Sequence[int]]:
    """Divide positions so that in each division programs for the largest are not too many for all.

    Args:
        sizes: elements of what is at each position.
    """
    return _alike(tuple(sizes))


@functools.lru_cache(maxsize=4096)  # every step asks for the same ones
def _alike(sizes: tuple[int, ...]) -> Sequence[Sequence[int]]:
    divisions = []
    left = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    while left:
        largest = sizes[left[0]]
        count = len(left)
        if count * largest > 2 * sum(sizes[at] for at in left) + _FEW_NUMEL:
            count = sum(sizes[at] * _SPREAD > largest for at in left)
        count = min(count, _MOST_ROWS)
        divisions.append(left[:count])
        left = left[count:]
    return divisions


def offsets_from_first(tensors: Sequence[Tensor]) -> Sequence[int] | None:
    """Return where tensors begin, in elements from the first; None if types or addresses forbid."""
    origin, size, dtype = tensors[0].data_ptr(), tensors[0].element_size(), tensors[0].dtype
    addresses = [each.data_ptr() - origin for each in tensors]
    is_fit = all(address % size == 0 for address in addresses)
    if not is_fit or any(each.dtype is not dtype for each in tensors):
        return None
    return [address // size for address in addresses]


def on_device(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return a table of int64, shape `[row, number]`, on a device; the host does not wait."""
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    if device.type != "cuda" or not rows:
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


def _gradient_starts(
    parts: Sequence[UpdatePart], grads: Sequence[Tensor] | None
) -> Sequence[int] | None:
    """Return where each gradient begins, in elements from the first; None if a launch cannot."""
    if len(parts) < 2:
        return None
    if any(part.start % _START_MULTIPLE or part.offset % _GRADIENT_MULTIPLE for part in parts):
        return None
    if grads is None:
        return (0,)
    starts = offsets_from_first(grads)
    is_odd = starts is None or any(start % _GRADIENT_MULTIPLE for start in starts)
    return None if is_odd or grads[0].data_ptr() % _ALIGNMENT_BYTES else starts


def _row(part: UpdatePart, gradient_start: int) -> tuple[int, ...]:
    key = part.key
    word, high = (key.group_word, key.high) if key is not None else (0, 0)
    return part.start, gradient_start + part.offset, part.numel, word, high, 0
