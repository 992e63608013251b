"""Where an update is sooner over: on the device that computes, or on the host beside the state."""

from __future__ import annotations

from dataclasses import dataclass

from estimators.records import Section, lowest_tiers, section_bytes
from estimators.segments import PlacementRequest, Tier
from estimators.update_share import may_share

HOST_MARGIN = 2.5
"""How much sooner the host must be: the device copies and updates at once, a host that pages by
turns, and was measured to take 2.6 times what its kernel and its copies take by themselves."""

SHARING_MARGIN = 8.0
"""How much sooner the host must be to update what it could share: beyond it the device would take
less than a ninth of the update off the host."""


@dataclass(frozen=True, slots=True)
class UpdateRates:
    """What a machine does a second, as it was measured."""

    host_numel_per_s: float
    """Elements that the host's kernel updates, state and all."""
    in_bytes_per_s: float
    """Bytes that are copied to the device."""
    out_bytes_per_s: float
    """Bytes that are copied from it; both directions go at once."""


def update_seconds(request: PlacementRequest, rates: UpdateRates) -> tuple[float, float]:
    """Return the least time of an update of all that is trained: on the host, on the device.

    The device has what rests elsewhere copied in, and parameters and state copied out again. The
    host copies nothing but parameters that rest on the device; gradients come to it during the
    backward. The device's own kernel takes next to nothing of either.
    """
    numel = copied_in = copied_out = returned = 0
    for segment in request.segments:
        if not segment.trainable:
            continue
        lowest = lowest_tiers(request, segment)
        shard_numel = segment.layout(request.world_size).shard_numel
        sizes = section_bytes(request, segment, shard_numel)
        elsewhere = {
            section: 0 if lowest[section] is Tier.DEVICE else size
            for section, size in sizes.items()
        }
        numel += shard_numel
        copied_in += sum(elsewhere.values())
        copied_out += elsewhere[Section.PARAMETER] + elsewhere[Section.STATE]
        returned += sizes[Section.PARAMETER] - elsewhere[Section.PARAMETER]
    on_host = numel / rates.host_numel_per_s + returned / rates.in_bytes_per_s
    on_device = max(copied_in / rates.in_bytes_per_s, copied_out / rates.out_bytes_per_s)
    return on_host, on_device


def device_is_sooner(request: PlacementRequest, rates: UpdateRates | None) -> bool:
    """Tell whether the device should update, or share the update; without rates it should."""
    if rates is None or request.optimizer_tier is Tier.DEVICE or not request.trains:
        return True
    on_host, on_device = update_seconds(request, rates)
    margin = SHARING_MARGIN if may_share(request) else HOST_MARGIN
    return on_device <= margin * on_host
