"""Memory of ended windows that users have kept: readable for ever, but a write to it is lost.

A segment whose buffer somebody still views leaves it to them and takes a new one. What they write
there later nobody would see, so the values are summed up when they are left and whenever the
segment is used again. The memory is known by a weak reference: it goes when its users let it go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Checksums = Sequence[int] | torch.Tensor
Sums = Callable[[torch.Tensor], Checksums]


class LateAliases:
    """The abandoned buffers of one segment."""

    def __init__(self) -> None:
        self._kept: list[tuple[StorageWeakRef, torch.dtype, Checksums]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, storage: torch.UntypedStorage, dtype: torch.dtype, sums: Checksums) -> None:
        """Remember a buffer that is left to its users, with the checksums of its parameters."""
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._kept.append((reference, dtype, sums))

    def written(self, sums: Sums) -> list[int]:
        """Return positions of parameters whose kept memory was written; each is told once."""
        if not self._kept:
            return []
        alive = []
        positions: set[int] = set()
        for reference, dtype, before in self._kept:
            flat = _flat_of(reference, dtype)
            if flat is None:
                continue
            now = sums(flat)
            positions |= {
                at for at, (old, new) in enumerate(zip(before, now, strict=True)) if old != new
            }
            alive.append((reference, dtype, now))
        self._kept = alive
        return sorted(positions)


def _flat_of(reference: StorageWeakRef, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the whole of a buffer that still lives, or None."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    if storage is None:
        return None
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
