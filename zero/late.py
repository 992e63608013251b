"""Writes that only checksums show, and when a device is asked for them.

[Note: late comparison] To compare checksums that lie on a device, the host would have to wait for
it at the end of each window. So there they are compared on the device, what differs is kept, and
the host asks at the step, where it waits for the norm anyway, before anything is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from offload import Device

if TYPE_CHECKING:
    from zero.unit import Segment
    from zero.units import ManagedParameter

Checksums: TypeAlias = list[int] | torch.Tensor
"""One of each parameter; on a device they stay there until they are compared."""


def differing(segment: Segment, old: Checksums, positions: Sequence[int]) -> list[int]:
    """Return at which of some positions the checksum is another one now."""
    if not len(old):
        return []
    new = segment.checksums(positions)
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        before = old if len(positions) == len(old) else old[list(positions)]
        found = (before != new).tolist()
    else:
        found = [old[each] != value for each, value in zip(positions, new, strict=True)]
    return [each for each, is_new in zip(positions, found, strict=True) if is_new]


def differing_members(segment: Segment, checksums: Checksums) -> list[ManagedParameter]:
    """Return the parameters whose values have another checksum now."""
    positions = range(len(segment.members))
    return [segment.members[each] for each in differing(segment, checksums, positions)]


def begin_late_comparison(segments: Sequence[Segment], device: Device) -> Callable[[], None]:
    """Ask whether parameters on a device were written in a window that has ended.

    The call returned waits for the answer.

    Raises:
        RuntimeError: by that call, naming the parameters, because the change is lost.
    """
    waiting = [(each, each.late_differences) for each in segments]
    found = [(each, flags) for each, flags in waiting if flags is not None]
    if not found:
        return lambda: None
    fetched = device.fetch(torch.cat([flags for _, flags in found]))
    names = [member.name for segment, _ in found for member in segment.members]

    def finish() -> None:
        written = fetched().tolist()
        for segment, _ in found:
            segment.late_differences = None
        lost = [name for name, is_written in zip(names, written, strict=True) if is_written]
        if lost:
            raise RuntimeError(
                f"parameters {', '.join(lost)} were changed in place (by `.data` or an alias) while"
                " their unit was unsharded, and the change is lost; change them inside"
                " `with zero.GatheredParameters(parameters, modifier_rank=0):`"
            )

    return finish


def known_checksums(segment: Segment) -> torch.Tensor | None:
    """Return checksums, on a device, of the values that a segment's masters have, if it has any."""
    known = segment._checksums if segment._has_masters else None
    return known if isinstance(known, torch.Tensor) and len(known) else None
