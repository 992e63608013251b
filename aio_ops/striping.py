"""How one file is laid out over several: stripes in proportion to weights, and pieces of requests.

[Note: stripes]
A member gets whole sectors in proportion to its weight (largest remainder), unless its capacity is
less; then the others share what is left. Its bytes are cut into stripes of one unit, the last of
which may be short. In the file the stripes of all members come in the order of how far through its
member the middle of each one is. So every part of the file that is longer than a few units is
spread like the whole, and a member's stripes come in the order in which they lie in it. Two in a
row are one piece.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from aio_ops.memory import align_up

DEFAULT_UNIT_BYTES = 4 << 20
MOST_STRIPES = 1 << 18  # of what a unit makes more it grows: the table stays small
_MOST_BYTES = 1 << 62
_MOST_MEMBERS = 1024


@dataclass(frozen=True, slots=True)
class StripePiece:
    """Bytes of a request that lie in one member without a gap."""

    member: int
    offset: int
    """Where they begin in the member."""
    start: int
    """Where they begin in the request."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StripeLayout:
    """Which byte of a striped file is where; made by `plan_stripes`."""

    size_bytes: int
    unit_bytes: int
    member_bytes: tuple[int, ...]
    """The size of each member, which is 0 where a share is less than a sector."""
    starts: Sequence[int]
    """Where each stripe begins in the file, in order."""
    members: Sequence[int]
    offsets: Sequence[int]
    """Where each stripe begins in its member."""

    def pieces(self, offset: int, size_bytes: int) -> list[StripePiece]:
        """Return where the bytes of a request are, in order; they tile it."""
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self.size_bytes:
            raise ValueError(
                f"bytes {offset} to {offset + size_bytes} are not inside a striped file of "
                f"{self.size_bytes} bytes"
            )
        pieces: list[StripePiece] = []
        stripe = bisect_right(self.starts, offset) - 1
        position, stop = offset, offset + size_bytes
        while position < stop:
            member, first = self.members[stripe], position
            member_offset = self.offsets[stripe] + position - self.starts[stripe]
            while position < stop and self._member_of(stripe) == member:
                stripe += 1
                position = min(stop, self._start_of(stripe))
            pieces.append(StripePiece(member, member_offset, first - offset, position - first))
        return pieces

    def _member_of(self, stripe: int) -> int | None:
        return self.members[stripe] if stripe < len(self.members) else None

    def _start_of(self, stripe: int) -> int:
        return self.starts[stripe] if stripe < len(self.starts) else self.size_bytes


def plan_stripes(
    size_bytes: int,
    weights: Sequence[float],
    *,
    alignment_bytes: int,
    unit_bytes: int = DEFAULT_UNIT_BYTES,
    capacities: Sequence[int | None] | None = None,
) -> StripeLayout:
    """Return the layout of a file over members, each with a share in proportion to its weight.

    Stripes begin at multiples of `alignment_bytes`, in the file and in its members. No share is
    larger than its member's capacity. A file of more than 262,144 units gets larger ones.
    Raises ValueError for what cannot be laid out.
    """
    limits = list(capacities) if capacities is not None else [None] * len(weights)
    _check(size_bytes, weights, alignment_bytes, unit_bytes, limits)
    unit_bytes = max(unit_bytes, align_up(-(-size_bytes // MOST_STRIPES), alignment_bytes))
    sectors = _apportion(
        -(-size_bytes // alignment_bytes),
        [Fraction(weight) for weight in weights],
        [None if limit is None else limit // alignment_bytes for limit in limits],
    )
    shares = [count * alignment_bytes for count in sectors]
    order = sorted(  # [Note: stripes]
        ((offset + min(unit_bytes, share - offset) / 2) / share, member, offset)
        for member, share in enumerate(shares)
        for offset in range(0, share, unit_bytes)
    )
    starts, members, offsets = array("Q"), array("H"), array("Q")
    start = 0
    for _, member, offset in order:
        starts.append(start)
        members.append(member)
        offsets.append(offset)
        start += min(unit_bytes, shares[member] - offset)
    shares[members[-1]] -= start - size_bytes  # the last sector of the file may be short
    return StripeLayout(size_bytes, unit_bytes, tuple(shares), starts, members, offsets)


def check_weights(weights: Sequence[float]) -> None:
    """Raise ValueError unless every weight is a positive number."""
    for member, weight in enumerate(weights):
        if not math.isfinite(weight) or weight <= 0:
            raise ValueError(
                f"the weight of member {member} must be a positive number, got {weight}; leave a "
                "directory out that is to get nothing"
            )


def _check(
    size_bytes: int,
    weights: Sequence[float],
    alignment_bytes: int,
    unit_bytes: int,
    limits: Sequence[int | None],
) -> None:
    if not 0 < size_bytes < _MOST_BYTES:
        raise ValueError(f"a striped file cannot have {size_bytes} bytes")
    if not 1 <= len(weights) <= _MOST_MEMBERS:
        raise ValueError(
            f"a striped file has 1 to {_MOST_MEMBERS} members, {len(weights)} weights were given"
        )
    check_weights(weights)
    if alignment_bytes <= 0 or unit_bytes <= 0 or unit_bytes % alignment_bytes:
        raise ValueError(
            f"unit_bytes must be a multiple of the members' alignment of {alignment_bytes}, got "
            f"{unit_bytes}"
        )
    if len(limits) != len(weights):
        raise ValueError(f"{len(limits)} capacities were given for {len(weights)} members")
    if any(limit is not None and limit < 0 for limit in limits):
        raise ValueError(f"a capacity cannot be negative, got {list(limits)}")
    known = [limit for limit in limits if limit is not None]
    room_bytes = sum(limit // alignment_bytes * alignment_bytes for limit in known)
    if len(known) == len(limits) and room_bytes < size_bytes:
        raise ValueError(
            f"a file of {size_bytes} bytes does not fit in members with capacities of "
            f"{list(limits)} bytes, which hold {room_bytes} in whole sectors of {alignment_bytes}"
        )


def _apportion(
    total: int, weights: Sequence[Fraction], limits: Sequence[int | None]
) -> Sequence[int]:
    """Return whole shares of `total`: each in proportion to its weight, none above its limit."""
    shares = [0] * len(weights)
    left = total
    sharing = list(range(len(weights)))
    while True:
        weight = sum((weights[member] for member in sharing), Fraction(0))
        ideal = {member: left * weights[member] / weight for member in sharing}
        full = [
            member
            for member in sharing
            if (limit := limits[member]) is not None and ideal[member] >= limit
        ]
        if not full:
            break
        for member in full:
            shares[member] = limits[member] or 0
            left -= shares[member]
            sharing.remove(member)
        if not sharing:
            return shares
    for member in sharing:
        shares[member] = math.floor(ideal[member])
    missing = left - sum(shares[member] for member in sharing)
    by_remainder = sorted(sharing, key=lambda member: (shares[member] - ideal[member], member))
    for member in by_remainder[:missing]:
        shares[member] += 1
    return shares
