"""Values that were written to a full flat buffer, on their way to the shards."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from offload import Field, Store, write_parameters, write_parameters_on_device, write_range

if TYPE_CHECKING:
    from zero.unit import Segment
    from zero.units import ManagedParameter


def write_members(segment: Segment, store: Store, members: Collection[ManagedParameter]) -> None:
    """Store this rank's pieces of some parameters of a full flat buffer, and their masters.

    [Note: whoever writes a parameter writes its residual]
    """
    own = segment.communicator.own_slice(segment.flat).detach()
    if len(members) == len(segment.members):
        if store.device.is_host:
            write_parameters(store, segment.index, own.float().clone().numpy())
        else:
            write_parameters_on_device(store, segment.index, own.float().clone())
        return
    wanted = {member.order for member in members}
    for piece in segment.pieces:
        if segment.members[piece.index].order in wanted and piece.numel:
            values = own[piece.start : piece.start + piece.numel].clone()
            write_range(store, segment.index, Field.PARAMETER, piece.start, values)
