"""Look for changes in place of all segments at once, so that the host waits for a device once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload import checksums_of_all
from zero.aliases import device_checksums
from zero.late import known_checksums
from zero.unit import Segment


def begin_audit(segments: Sequence[Segment]) -> Callable[[], None]:
    """Issue the comparison of what rests in place on a device; the call returned waits for it.

    Until parameters are accepted anew, or the step ends, `Segment.changed` then knows without
    asking the device.
    """
    compared, known = [], []
    for segment in segments:
        sums = known_checksums(segment)
        if sums is not None:
            compared.append(segment)
            known.append(sums)
    if not compared:
        return lambda: None
    differs = torch.cat(known) != checksums_of_all(
        [(device_checksums(segment), segment.flat) for segment in compared]
    )

    def finish() -> None:
        found = differs.tolist()
        start = 0
        for segment, sums in zip(compared, known, strict=True):
            stop = start + len(sums)
            segment.audited = [at for at, is_new in enumerate(found[start:stop]) if is_new]
            start = stop

    return finish
