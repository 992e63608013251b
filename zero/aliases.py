"""Memory of ended windows that users have kept: readable for ever, but a write to it is lost.

A segment whose buffer somebody still views leaves it to them and takes a new one. What they write
there later nobody would see, so the values are summed up when they are left and whenever the
segment is used again. The memory is known by a weak reference: it goes when its users let it go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from estimators import FlatLayout, SegmentSpec
from offload import DeviceChecksums, tensor_span
from zero.late import Checksums

if TYPE_CHECKING:
    from zero.unit import Segment


def checksums(
    flat: torch.Tensor,
    layout: FlatLayout,
    positions: Sequence[int] | None = None,
    device_checksums: DeviceChecksums | None = None,
) -> Checksums:
    """Return a checksum of the values of each parameter of a buffer, or of some of them.

    Args:
        flat: the buffer.
        layout: where each parameter is in it.
        positions: which parameters; all by default.
        device_checksums: `checksums_of(flat, layout)`, if it is at hand, for a buffer on a device.
    """
    chosen = range(len(layout.numels)) if positions is None else positions
    if device_checksums is not None or flat.device.type != "cpu":
        found = (device_checksums or checksums_of(flat, layout)).of(flat)
        return found if len(chosen) == len(layout.numels) else found[list(chosen)]
    memory = tensor_span(flat).view() if flat.numel() else memoryview(b"")
    size = flat.element_size()
    return [
        xxhash.xxh3_64_intdigest(memory[offset * size : (offset + numel) * size])
        for offset, numel in ((layout.offsets[each], layout.numels[each]) for each in chosen)
    ]


def checksums_of(flat: torch.Tensor, layout: FlatLayout) -> DeviceChecksums:
    """Return what computes the checksums of buffers of this layout on their device."""
    ranges = [(at, at + numel) for at, numel in zip(layout.offsets, layout.numels, strict=True)]
    return DeviceChecksums(flat, ranges)


def device_checksums(segment: Segment) -> DeviceChecksums:
    """Return what sums up the values of a segment where they are, on a device."""
    if segment._device_checksums is None:
        segment._device_checksums = checksums_of(segment.flat, segment.layout)
    return segment._device_checksums


class LateAliases:
    """The abandoned buffers of one segment."""

    def __init__(self, spec: SegmentSpec, layout: FlatLayout) -> None:
        self._spec = spec
        self._layout = layout
        self._kept: list[tuple[StorageWeakRef, torch.dtype, Checksums]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, flat: torch.Tensor) -> None:
        """Remember a buffer that is left to its users."""
        reference = StorageWeakRef(flat.untyped_storage())  # type: ignore[no-untyped-call]
        self._kept.append((reference, flat.dtype, checksums(flat, self._layout)))

    def require_unwritten(self) -> None:
        """Refuse to go on if memory that a user kept was written; each write is told once.

        Raises:
            RuntimeError: naming the parameters, because the change is lost.
        """
        if not self._kept:
            return
        alive = []
        written: set[int] = set()
        for reference, dtype, before in self._kept:
            flat = _flat_of(reference, dtype)
            if flat is None:
                continue
            now = checksums(flat, self._layout)
            written |= {at for at, old in enumerate(before) if old != now[at]}
            alive.append((reference, dtype, now))
        self._kept = alive
        if written:
            names = ", ".join(self._spec.names[position] for position in sorted(written))
            raise RuntimeError(
                f"memory of parameters {names} was kept from a window of unit {self._spec.unit}"
                " that has ended (by `.data`, detach() or a view) and written since, and the change"
                " is lost; write to the parameters themselves, or take the alias anew"
            )


def _flat_of(reference: StorageWeakRef, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the whole of a buffer that still lives, or None."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    if storage is None:
        return None
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
