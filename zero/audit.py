"""Look for changes in place of all segments at once, so that the host waits for a device once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload import Device, Ledger, checksums_of_all
from zero.aliases import device_checksums
from zero.gradients import GradientReducer
from zero.late import begin_late_comparison, known_checksums
from zero.replicated import gather_shards
from zero.runtime import Runtime
from zero.unit import Segment


def begin_audit(segments: Sequence[Segment], device: Device) -> Callable[[], None]:
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
    fetched = device.fetch(differs)

    def finish() -> None:
        found = fetched().tolist()
        start = 0
        for segment, sums in zip(compared, known, strict=True):
            stop = start + len(sums)
            segment.audited = [at for at, is_new in enumerate(found[start:stop]) if is_new]
            start = stop

    return finish


def accept_updated(segments: Sequence[Segment], ledger: Ledger) -> None:
    """Take over what each rank has in its shards, and count all values as unchanged; a collective.

    Checksums of what rests in place on a device are issued at once.
    """
    for segment in segments:
        gather_shards(segment, ledger)
    summed, sizes = [], []
    for segment in segments:
        sums = known_checksums(segment)
        if not segment.is_in_place:
            continue
        if sums is None:
            segment.accept_changes()
            continue
        summed.append(segment)
        sizes.append(len(sums))
    if summed:
        found = checksums_of_all([(device_checksums(each), each.flat) for each in summed])
        for segment, sums in zip(summed, torch.split(found, sizes), strict=True):
            segment.accept_changes(sums=sums)


def norm_and_audit(runtime: Runtime, reducer: GradientReducer) -> float:
    """Return the norm of the gradients, and see to what was written in place, before an update.

    All of it is issued before the host waits, which it does once: the norm is fetched last. The
    segments are told last: a step that is refused must not leave them answers that grow old.

    Raises:
        RuntimeError: naming the parameters whose change is lost.
    """
    device = runtime.store.device
    finish_norm = reducer.begin_norm()
    finish_audit = begin_audit(runtime.segments, device)
    finish_comparison = begin_late_comparison(runtime.segments, device)
    norm = finish_norm()
    finish_comparison()
    finish_audit()
    return norm
