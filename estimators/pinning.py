"""What rests on which tier: the spending of the budgets, see [Note: placement]."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from estimators.layout import SHARD_ALIGNMENT_NUMEL, align_down
from estimators.rates import ASSUMED_RATES
from estimators.records import Section, lowest_tiers, section_bytes
from estimators.segments import PlacementRequest, Tier
from estimators.summary import RESIDENT_ALIGNMENT_BYTES, moves_per_step, resident_bytes

_PINNING_ORDER = (Section.PARAMETER, Section.GRADIENT, Section.STATE)
"""Which section is pinned first where two save the same."""


class Part:
    """A sub-group in the making."""

    def __init__(self, segment: int, start: int, stop: int) -> None:
        self.segment = segment
        self.start = start
        self.stop = stop
        self.tiers: dict[Section, Tier] = {}

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    def split(self, numel: int) -> Part:
        """Keep the first `numel` elements and return the rest, with the same tiers so far."""
        rest = Part(self.segment, self.start + numel, self.stop)
        rest.tiers = dict(self.tiers)
        self.stop = self.start + numel
        return rest


class Pinning:
    """Spends the budgets on the sections that save most, see [Note: placement]."""

    def __init__(self, request: PlacementRequest, host_bytes: int, device_bytes: int) -> None:
        self._request = request
        self._left_bytes = host_bytes
        self._device_left_bytes = device_bytes
        self._lowest = [lowest_tiers(request, segment) for segment in request.segments]
        cap = request.max_host_parameter_numel
        self._parameters_left_numel = cap if request.parameter_tier is Tier.NVME else None

    @property
    def left_bytes(self) -> int:
        """Host bytes that nothing has taken."""
        return self._left_bytes

    def run(self, parts: list[list[Part]]) -> None:
        """Set the tiers of all parts of all segments; some part may be cut in two."""
        for section, segment in self._classes():
            is_there = self._lowest[segment][section] is Tier.DEVICE
            found = parts[segment]
            count = len(found) if is_there else self._spend_device(section, segment, found)
            for part in found[:count]:
                part.tiers[section] = Tier.DEVICE
            self._pin(section, segment, found, count)

    def _spend_device(self, section: Section, segment: int, parts: list[Part]) -> int:
        """Spend spare device memory on a section of a segment; return how many parts fit."""
        spec = self._request.segments[segment]
        held_bytes = count = taken_bytes = 0
        for part in parts:
            held_bytes += section_bytes(self._request, spec, part.numel)[section]
            if resident_bytes(held_bytes) > self._device_left_bytes:
                break
            count, taken_bytes = count + 1, resident_bytes(held_bytes)
        if section is not Section.STATE and count < len(parts):
            return 0
        self._device_left_bytes -= taken_bytes
        return count

    def _classes(self) -> Iterator[tuple[Section, int]]:
        """Yield `(section, segment)`: what must rest on the host, then what saves most per byte."""
        rates = self._request.rates or ASSUMED_RATES
        ordered = []
        for index, spec in enumerate(self._request.segments):
            updated = spec.trainable and self._request.trains
            for section in section_bytes(self._request, spec, 0):
                moves = moves_per_step(section, self._request.micro_batches, updated=updated)
                is_optional = self._lowest[index][section] is Tier.NVME
                rank = _PINNING_ORDER.index(section)
                ordered.append((is_optional, -rates.seconds(*moves), rank, index, section))
        for _, _, _, index, section in sorted(ordered):
            yield section, index

    def _pin(self, section: Section, segment: int, parts: list[Part], position: int) -> None:
        """Let as much of a section of a segment rest on the host as the budget holds.

        The parts before `position` rest elsewhere.
        """
        spec = self._request.segments[segment]
        held_bytes = 0
        while position < len(parts):
            part = parts[position]
            position += 1
            room_bytes = (
                align_down(resident_bytes(held_bytes) + self._left_bytes, RESIDENT_ALIGNMENT_BYTES)
                - held_bytes
            )
            numel = fitting_numel(
                lambda numel: section_bytes(self._request, spec, numel)[section] <= room_bytes,  # noqa: B023
                part.numel,
            )
            if section is Section.PARAMETER and self._parameters_left_numel is not None:
                numel = min(numel, align_down(self._parameters_left_numel, SHARD_ALIGNMENT_NUMEL))
            if numel < part.numel:
                if numel:
                    parts.insert(position, part.split(numel))
                else:
                    part.tiers[section] = self._lowest[segment][section]
                    continue
            size_bytes = section_bytes(self._request, spec, numel)[section]
            self._left_bytes -= resident_bytes(held_bytes + size_bytes) - resident_bytes(held_bytes)
            held_bytes += size_bytes
            if section is Section.PARAMETER and self._parameters_left_numel is not None:
                self._parameters_left_numel -= numel
            part.tiers[section] = Tier.HOST


def fitting_numel(fits: Callable[[int], bool], cap: int) -> int:
    """Return the most elements up to `cap`, itself or whole cache lines, that fit (0 if none)."""
    if fits(cap):
        return cap
    if not fits(SHARD_ALIGNMENT_NUMEL):  # as for all that come after a budget is spent
        return 0
    low, high = 0, cap // SHARD_ALIGNMENT_NUMEL
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * SHARD_ALIGNMENT_NUMEL):
            low = middle
        else:
            high = middle - 1
    return low * SHARD_ALIGNMENT_NUMEL
