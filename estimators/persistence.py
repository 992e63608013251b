"""Which small parameters every rank keeps in full, on the device, for the whole run.

[Note: persistent parameters] A persistent parameter rests as all parameters do in stages 0 to 2:
each rank has all of it in place, updates its part of it and takes over the other parts after the
update, once a step instead of twice a micro-batch. Its gradient and its state are those of any
other parameter. All persistent parameters belong to the root unit, in segments of their own, so
that they are reduced and gathered as one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from estimators.segments import Tier


@dataclass(frozen=True, slots=True)
class Persistence:
    """How small a parameter must be to stay, and how many elements may stay in all."""

    numel: int = 0
    total_numel: int = sys.maxsize

    def choose(self, numels: Sequence[int]) -> list[bool]:
        """Tell of each parameter, in model order, whether it stays."""
        left = self.total_numel
        chosen = []
        for numel in numels:
            stays = 0 < numel <= min(self.numel, left)
            left -= numel if stays else 0
            chosen.append(stays)
        return chosen

    def where(
        self, *, stage: int, world_size: int, parameter_tier: Tier, device_is_host: bool
    ) -> Persistence:
        """Return these limits, or none to stay where all parameters rest in place anyway."""
        rests = parameter_tier is Tier.DEVICE or (device_is_host and parameter_tier is Tier.HOST)
        return self if stage == 3 and (world_size > 1 or not rests) else NOTHING_STAYS


NOTHING_STAYS = Persistence()
