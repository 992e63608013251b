"""Memory that torch takes elsewhere behind a tensor's back.

[Note: shared memory] `share_memory_`, and sending a tensor to another process, give its storage
other memory, with the same values. Parameters that rest in place are updated by their address, so
they come back to where they rest before anything reads or writes them there.
"""

from __future__ import annotations

import warnings

import torch

from estimators import SegmentSpec
from offload import Memory
from offload.device import elements_at


def returned(flat: torch.Tensor, memory: Memory | None, spec: SegmentSpec) -> torch.Tensor | None:
    """Return the flat buffer where it rests, with its values, if it is not there; else None.

    Args:
        flat: shape `[padded numel]`, wherever it is.
        memory: where it rests; None if it is nowhere else.
        spec: the segment.
    """
    if memory is None or not flat.numel():
        return None
    here = elements_at(memory, spec.element, flat.numel())
    if here.data_ptr() == flat.data_ptr():
        return None
    here.copy_(flat)
    warnings.warn(
        f"parameters of {spec.unit} were moved to shared memory, as share_memory() and sending them"
        " to another process do; the engine has taken their values back, and whoever shares them"
        " will not see later ones",
        RuntimeWarning,
        stacklevel=2,
    )
    return here
