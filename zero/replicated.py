"""Parameters that every rank has in full: stages 0 to 2, and small ones that stay on the device.

[Note: replicated] Each rank's shard is a part of its own flat buffer, so updating the shard changes
the model, and whatever else is written there is a change in place. After an update each rank takes
over the others' shards. So between steps all ranks hold the same bits, provided that what users
write in place they write on all ranks; what one rank alone may write (a piece) is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload import Ledger
from offload.ledger import GATHERED, Activity

if TYPE_CHECKING:
    from zero.unit import Segment


def gather_values(segment: Segment, ledger: Ledger) -> None:
    """Take over what each rank has in its shard where all values rest in place; a collective.

    Where they do, the values count as unchanged from then on.
    """
    gather_shards(segment, ledger)
    if segment.is_in_place:
        segment.accept_changes()


def gather_shards(segment: Segment, ledger: Ledger) -> None:
    """Take over what the others have in their shards where all values rest in place."""
    communicator = segment.communicator
    if segment.is_replicated:
        with ledger.timing(Activity.COLLECTIVE):
            communicator.agree(segment.index, f"the new values of unit {segment.spec.unit}")
            communicator.all_gather_in_place(segment.flat)
        ledger.exchanged(GATHERED, segment.flat.nbytes, communicator.world_size)
