"""What an engine knows of updates that host and device share."""

from __future__ import annotations

from dataclasses import dataclass, field

from estimators import MemoryPlan, ShareRates, ShareTrial


@dataclass(eq=False)
class Sharing:
    """Whether the next update is shared, and by which rates."""

    trial: ShareTrial = field(default_factory=ShareTrial)
    rates: ShareRates | None = None
    """As measured in the last update that was shared."""
    host_count: int | None = None
    """How many sub-groups the host takes, whatever is sooner; None where that decides."""

    @property
    def is_next(self) -> bool:
        """Whether the next update is shared."""
        return self.trial.shares if self.host_count is None else self.host_count > 0


def sharing_of(plan: MemoryPlan) -> Sharing | None:
    """Return what updates of a plan are shared by, or None if the device updates alone."""
    return Sharing() if plan.request.shares_update else None
