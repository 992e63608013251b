"""Which parts of sub-groups one launch updates, and the table that tells a launch where they are.

[Note: launches] The host issues a launch in about the time in which a few million elements are
updated, and parameters have fewer. So the parts of a sub-group are updated at once: a launch has a
row of programs for each, as many as the largest needs, and a table on the device has where a part
begins in the sub-group and in its gradient (counted in elements from the first gradient of the
sub-group, which lies anywhere), its size, and the words of its key. All tables of an update go
there in one copy. Parts of very different sizes have launches of their own, so that few programs
find nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        for each in alike(parts):
            planned[-1].append(each)
            rows.extend(_row(part, starts[part.piece]) for part in each)
    table = _on_device(rows, device)
    found, end = [], 0
    for (parts, _), launches in zip(groups, planned, strict=True):
        made = []
        for each in launches:
            made.append(Launch(table[end : end + len(each)], tuple(part.numel for part in each)))
            end += len(each)
        found.append(GroupParts(parts, made))
    return found


def alike(parts: Sequence[UpdatePart]) -> Iterator[Sequence[UpdatePart]]:
    """Divide parts so that in each division programs for the largest are not too many for all."""
    left = sorted(parts, key=lambda part: part.numel, reverse=True)
    while left:
        largest = left[0].numel
        count = len(left)
        if count * largest > 2 * sum(part.numel for part in left) + _FEW_NUMEL:
            count = sum(part.numel * _SPREAD > largest for part in left)
        yield left[:count]
        left = left[count:]


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
    origin, size = grads[0].data_ptr(), grads[0].element_size()
    addresses = [each.data_ptr() - origin for each in grads]
    is_fit = all(
        address % (_GRADIENT_MULTIPLE * size) == 0 and each.dtype is grads[0].dtype
        for address, each in zip(addresses, grads, strict=True)
    )
    if origin % _ALIGNMENT_BYTES or not is_fit:
        return None
    return [address // size for address in addresses]


def _row(part: UpdatePart, gradient_start: int) -> tuple[int, ...]:
    key = part.key
    first, high = (key.first + key.low, key.high) if key is not None else (0, 0)
    return part.start, gradient_start + part.offset, part.numel, first & 0xFFFF_FFFF, high, 0


def _on_device(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    table = torch.tensor(rows, dtype=torch.int64).view(-1, ROW_NUMEL)
    if device.type != "cuda" or not rows:
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
