"""What comes and goes on the device in a step, at each moment that can be the highest.

[Note: heap slack] Tensors on a CPU run live in the C library's heap. They are counted to a few
per cent: where every block of 64 KiB or more is mapped by itself
(`MALLOC_MMAP_THRESHOLD_=65536`), a process takes what its tensors take. By default glibc keeps
freed blocks of up to 32 MiB for later, and what it keeps depends on the order in which blocks of
different sizes come and go: in 12 models 2 to 90 % of the tensors that were there at once, most
where activations are many and small. So the margin is fitted, not derived: kept activations and
gradients that rest on the device are counted as if both were there as a whole, 15 % come on top,
and with checkpointing what one block kept in its forward, which the heap still holds when the
block runs again.

[Note: moments of a backward] On a GPU torch counts every tensor, so the moments are told apart. At
the loss the root unit is unsharded, and what is kept for the backward; all activations are kept,
beside copies of the logits. The logits leave before the head's weight has its gradient, while the
parameters of the last block may be on their way. In the backward of the last block its own
parameters and its gradients are there, what else was kept, and those of the root unit, into whose
gradients' buffer the head's have gone. Between two blocks the parameters of both are there, what
the first one kept is not; then its gradients may still be on their way while those of the next are
collected, when its parameters are gone, which is as much. A table that is head and embedding has
two gradients: autograd holds the head's till the other comes.
"""

from __future__ import annotations

from estimators.activations import Activations
from estimators.records import DEVICE_BUFFER_COUNT, Section
from estimators.segments import Tier
from estimators.summary import (
    COLLECTIVE_SCRATCH,
    GRADIENT_SCRATCH,
    LIVE_PARAMETERS,
    MemoryPlan,
)

HEAP_SLACK = 0.15
"""Share of what comes and goes on a CPU run that the C library's heap keeps beyond it: see
[Note: heap slack]."""
KEPT = "activations kept for the backward"
RECOMPUTED = "one block run again"
WORKING = "gradients of activations"
LOSS = "logits and loss"
START = "setting parameters at the start"
GRADIENTS = "gradients resident"
BUFFERS = "buffers of the update"
ROOT_GRADIENTS = "gradients of the root unit"
TIED = "gradient of the tied head"
HEAP = "heap slack"

Moments = dict[str, dict[str, int]]
"""Bytes by what they are, at each moment."""


def device_moments(
    memory: MemoryPlan, found: Activations, *, keeps_gradients: bool, accumulates: bool
) -> Moments:
    """Return the moments of a GPU: see [Note: moments of a backward].

    Gradients that autograd made and nothing copies are there at the end of the backward only, those
    of the root unit (the head) from its start. Where only some stay so (`keeps_gradients` tells of
    all), they are counted from the backward of the first block on. A window of several
    micro-batches (`accumulates`) has those of the first at every moment.
    """
    moments = _device_moments(memory, found, keeps_gradients=keeps_gradients)
    resident = memory.resident_section_bytes(Tier.DEVICE, Section.GRADIENT)
    kept = sum(map(memory.kept_gradient_bytes, range(len(memory.request.segments))))
    for parts in moments.values():
        if accumulates:
            parts.pop(ROOT_GRADIENTS, None)
            parts[GRADIENTS] = resident
        else:
            parts[GRADIENTS] = parts.get(GRADIENTS, 0) + resident - kept
    return moments


def _device_moments(memory: MemoryPlan, found: Activations, *, keeps_gradients: bool) -> Moments:
    """Return the moments of the first micro-batch, with the gradients that autograd made alone."""
    left = found.kept_bytes - found.logits_bytes
    work = {RECOMPUTED: found.recomputed_bytes, TIED: found.tied_bytes}
    work[WORKING] = found.working_bytes
    ahead, one, two = (
        {LIVE_PARAMETERS: memory.live_bytes(others, with_ahead=True)} for others in range(3)
    )
    between = {**two, KEPT: left - found.block_bytes, **work}
    at_loss = {LIVE_PARAMETERS: memory.live_bytes_at_loss}
    for early in (ahead, one):
        early[LIVE_PARAMETERS] = max(early[LIVE_PARAMETERS], memory.live_bytes_at_loss)
    moments = {
        "loss": {**at_loss, KEPT: found.kept_bytes, LOSS: found.loss_bytes},
        "head": {**ahead, KEPT: left, WORKING: found.head_bytes},
    }
    if memory.device_buffer_bytes:
        moments["update"] = {BUFFERS: DEVICE_BUFFER_COUNT * memory.device_buffer_bytes}
    if keeps_gradients:
        size = memory.resident_section_bytes(Tier.DEVICE, Section.GRADIENT)
        root = {ROOT_GRADIENTS: memory.gradient_bytes(0)}
        moments["head"] |= root
        moments["backward"] = {**two, KEPT: left, **work, **root}
        moments["end of the backward"] = {**two, **work, GRADIENTS: size}
        if "update" in moments:
            moments["update"][GRADIENTS] = size
        return moments
    segments = memory.request.segments
    kept = {index: memory.kept_gradient_bytes(index) for index in range(len(segments))}
    root = {GRADIENTS: sum(size for index, size in kept.items() if segments[index].unit_index == 0)}
    most = {GRADIENTS: sum(kept.values())}
    none, some = _scratch(memory, 0), _scratch(memory, 1)
    moments["head"] |= none | root
    moments["backward"] = {**one, KEPT: left, **work, **some, **most}
    moments["backward between blocks"] = {**between, **some, **most}
    if "update" in moments:
        moments["update"] |= most
    return moments


def _scratch(memory: MemoryPlan, others: int) -> dict[str, int]:
    collective = memory.collective_scratch_bytes
    return {GRADIENT_SCRATCH: memory.gradient_bytes(others), COLLECTIVE_SCRATCH: collective}


def host_moments(
    memory: MemoryPlan, found: Activations, *, keeps_gradients: bool, accumulates: bool
) -> Moments:
    """Return the moments of a CPU run: see [Note: heap slack].

    Gradients that autograd made (`keeps_gradients`) are there at the loss if others were before.
    """
    live = {LIVE_PARAMETERS: memory.live_parameter_bytes}
    kept = {KEPT: found.kept_bytes}
    block = {RECOMPUTED: found.recomputed_bytes}
    block[WORKING] = max(found.working_bytes, found.head_bytes)
    scratch = {GRADIENT_SCRATCH: memory.gradient_scratch_bytes}
    scratch[COLLECTIVE_SCRATCH] = memory.collective_scratch_bytes
    if keeps_gradients:
        scratch = {GRADIENTS: memory.resident_section_bytes(Tier.DEVICE, Section.GRADIENT)}
    earlier = scratch if keeps_gradients and accumulates else {}
    moments = {
        "start": {START: memory.request.start_bytes},
        "loss": {**live, **kept, LOSS: found.loss_bytes, **earlier},
        "backward": {**live, **kept, **block, **scratch},
    }
    for parts in moments.values():
        parts[HEAP] = parts.get(RECOMPUTED, 0) + int(HEAP_SLACK * sum(parts.values()))
    return moments
