"""One rank's share of what a node gives: budgets as written, or decided from the machine.

[Note: margins of "auto"] `host_memory: "auto"` is 80 % of what the node still has (MemAvailable,
and no more than any memory cgroup around the process leaves), divided over the node's ranks, less
what the plan puts on the device, which on a CPU run is host memory too. `capacity: "auto"` is all
that is free on the drive, without a margin: the space is reserved before training. Both are read
once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from aio_ops import Engine
from estimators import (
    Budget,
    DriveRates,
    MemoryPlan,
    PlacementRequest,
    PlanError,
    Tier,
    minimum_host_bytes,
    plan_placement,
    start,
)
from estimators.placement import in_play_bytes
from estimators.start import StartTensor
from offload import measure_rates
from zero import machine
from zero.settings import Settings
from zero.swap_paths import nvme_budget
from zero.units import UnitBlueprint


def node_budget(
    request: PlacementRequest, settings: Settings, local_world_size: int
) -> tuple[Budget, str]:
    """Return one rank's share of the node's budgets, and where the host budget comes from."""
    tiers = settings.tiers
    device = tiers.device_memory_bytes
    shares = (
        device // local_world_size if device is not None else None,
        nvme_budget(tiers.nvme, local_world_size, request.alignment_bytes),
    )
    if tiers.host_memory_bytes is not None:
        host = tiers.host_memory_bytes // local_world_size
        return Budget(host, *shares, ranks=local_world_size), "tiers.host_memory"
    available = machine.available_host_bytes()
    share = int(available * machine.HOST_MEMORY_MARGIN) // local_world_size
    if not request.device_is_host:
        return Budget(share, *shares, ranks=local_world_size), (
            f"auto: {machine.HOST_MEMORY_MARGIN:.0%} of {available} bytes available (MemAvailable"
            f" within the cgroups' limits), for each of {local_world_size} ranks"
        )
    host, window = _host_beside_device(request, share)
    if host < (least := minimum_host_bytes(request)):
        raise PlanError(
            f'host_memory "auto" is {machine.HOST_MEMORY_MARGIN:.0%} of the {available} bytes'
            f" available, {share} for each of {local_world_size} ranks: what is on the device,"
            f" which is host memory here, takes {window} of them"
            + (f", and at least {least} are needed beside" if least else "")
            + "; free memory, let optimizer and parameters rest on nvme, or make the largest unit"
            " smaller",
            needed_bytes=least,
        )
    return Budget(host, *shares, ranks=local_world_size), (
        f"auto: {machine.HOST_MEMORY_MARGIN:.0%} of {available} bytes available (MemAvailable"
        f" within the cgroups' limits), for each of {local_world_size} ranks, less {window} on the"
        " device"
    )


def _host_beside_device(request: PlacementRequest, share_bytes: int) -> tuple[int, int]:
    """Return the host budget that leaves room for the device's line, and that line's bytes.

    The more rests on the host, the less is unsharded at a time: so the device's line grows as the
    budget shrinks from all that there is, and both meet after a few plans. The least budgets are
    not planned: they cut the state of a large model into more sub-groups than memory holds.
    """
    smallest = minimum_host_bytes(request)
    host = max(in_play_bytes(request), smallest)
    window = plan_placement(request, Budget(host)).device_bytes
    while (host := share_bytes - window) >= smallest:
        needed = plan_placement(request, Budget(host)).device_bytes
        if needed <= window:
            return host, window
        window = needed
    return host, window


def warn_if_beyond_machine(plan: MemoryPlan, local_world_size: int) -> None:
    """Warn if what all ranks of the node will take is more than there is."""
    device_bytes = plan.device_bytes if plan.request.device_is_host else 0
    wanted = (plan.host_bytes + device_bytes) * local_world_size
    available = machine.available_host_bytes()
    if wanted > available:
        most = plan.host_budget_bytes * local_world_size - (wanted - available)
        if most >= minimum_host_bytes(plan.request) * local_world_size:
            advice = f"set tiers.host_memory to at most {most}"
        elif Tier.HOST in (plan.request.parameter_tier, plan.request.optimizer_tier):
            advice = 'let what is offloaded to "cpu" rest on "nvme"'
        else:
            advice = "use fewer ranks on this node, or smaller units"
        warnings.warn(
            f"the plan takes {wanted} bytes of host memory on this node, device included, but"
            f" {available} are available (MemAvailable within the cgroups' limits): the process"
            f" may be killed; {advice}",
            RuntimeWarning,
            stacklevel=4,
        )


def drive_rates(settings: Settings, engine: Engine, local_world_size: int) -> DriveRates | None:
    """Return one rank's share of what the drive does, as given or measured by all ranks at once."""
    nvme = settings.tiers.nvme
    given = [
        (each.read_bytes_per_s, each.write_bytes_per_s)
        for each in nvme
        if each.read_bytes_per_s is not None and each.write_bytes_per_s is not None
    ]
    if nvme and len(given) == len(nvme):
        return DriveRates(
            sum(read for read, _ in given) / local_world_size,
            sum(write for _, write in given) / local_world_size,
            "given",
        )
    pages = Tier.NVME in (settings.parameter_offload.tier, settings.optimizer_offload.tier)
    if not (nvme and settings.tiers.measures_bandwidth and pages):
        return None
    measured = [measure_rates(engine, each.path) for each in nvme]
    if len(measured) == 1:
        return measured[0]
    return DriveRates(
        sum(each.read_bytes_per_s for each in measured),
        sum(each.write_bytes_per_s for each in measured),
        measured[0].source,
    )


def start_bytes(units: Sequence[UnitBlueprint], world_size: int) -> int:
    """Return the most bytes that setting the parameters takes."""
    tensors = [
        [
            StartTensor(
                member.parameter.numel(),
                member.parameter.numel() * member.parameter.element_size(),
                member.parameter.is_meta,
            )
            for _, members in unit.segments
            for member in members
        ]
        for unit in units
    ]
    shards = [spec.layout(world_size).shard_numel for unit in units for spec, _ in unit.segments]
    return start.start_bytes(tensors, shards, world_size)
