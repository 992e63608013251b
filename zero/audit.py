"""Look for changes in place of all segments at once, so that the host waits for a device once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zero.late import differences
from zero.unit import Segment


def begin_audit(segments: Sequence[Segment]) -> Callable[[], None]:
    """Issue the comparison of what rests in place on a device; the call returned waits for it.

    Until parameters are accepted anew, or the step ends, `Segment.changed` then knows without
    asking the device.
    """
    compared = [(segment, differences(segment)) for segment in segments]
    pending = [(segment, flags) for segment, flags in compared if flags is not None]

    def finish() -> None:
        if not pending:
            return
        found = torch.cat([flags for _, flags in pending]).tolist()
        start = 0
        for segment, flags in pending:
            stop = start + len(flags)
            segment.audited = [at for at, is_new in enumerate(found[start:stop]) if is_new]
            start = stop

    return finish
