"""The least time of a step: what each resource needs, and which one binds.

[Note: lower bound] Every resource is taken to do nothing but its share, at its full rate. An update
begins when the norm of all gradients is known, so what computes and copies in forward and backward
and what computes and copies in the update follow each other; the drive and the network are taken to
work all the time, since state is read ahead and written behind. No step can be shorter than the
longest of these three. An update that host and device share is taken to keep both busy until its
end. Kernels that are launched, small copies and a program that is interpreted are not counted:
where they take longer than what is counted, a step takes many times its bound. What a schedule
adds shows in `expected`, where no phase overlaps another and the device updates alone: whether
sharing gains anything is found out where it trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from estimators.inputs import DeviceKind, PlanInputs
from estimators.models import ModelShape
from estimators.records import Section, section_bytes
from estimators.segments import Tier
from estimators.summary import MemoryPlan, StepTraffic, step_traffic

_KEPT_UNITS = 3
"""As many are unsharded at once beside the root unit, one of them on its way to a device."""

_EXPECTED_SHARE = 0.5
"""Share of a device's data-sheet rate that training usually reaches."""

_SECONDS_OF_A_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one rank in a step that follow from its plan alone, whatever the batch."""

    traffic: StepTraffic
    link_bytes: int
    pass_link_bytes: int
    """Those of forward and backward alone."""
    update_link_bytes: int
    """Those of the update alone."""
    host_update_bytes: int
    shared_update_bytes: int
    """What the host would update of an update that it shares, if it did all that it can."""
    device_update_bytes: int
    device_resident_bytes: int
    commit_bytes: float
    """What commits of a durable run write beside, on average of a step."""


def moved(plan: MemoryPlan, micro_batches: int, commit_steps: int = 1) -> Moved:
    """Return what a step of `micro_batches` moves."""
    whole, passes, update = _link_bytes(plan, micro_batches)
    return Moved(
        traffic=step_traffic(plan, micro_batches),
        link_bytes=whole,
        pass_link_bytes=passes,
        update_link_bytes=update,
        host_update_bytes=0
        if plan.request.update_on_device
        else _updated_bytes(plan, (Tier.HOST, Tier.NVME)),
        shared_update_bytes=_updated_bytes(plan, (Tier.HOST,)) if plan.request.shares_update else 0,
        device_update_bytes=_updated_bytes(plan, (Tier.DEVICE,)),
        device_resident_bytes=sum(
            plan.resident_section_bytes(Tier.DEVICE, section) for section in Section
        ),
        commit_bytes=plan.commit_bytes / commit_steps,
    )


@dataclass(frozen=True, slots=True)
class Operations:
    """Floating-point operations of one forward and backward of one rank."""

    matmul: float
    attention: float
    recomputed: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.matmul + self.attention + self.recomputed


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, by resource."""

    compute: float
    """Forwards and backwards on the device, at its full rate."""
    link: float
    """Between host and device, the busier direction."""
    drive: float
    """Reads and writes of all ranks of a node."""
    host: float
    """Updates in host memory."""
    device: float
    """Updates in device memory."""
    network: float
    """Collectives."""
    pass_link: float
    """The link's share in forward and backward."""
    update_link: float
    """The link's share in the update."""
    expected: float
    """Forward and backward, then the update, at the rates that training usually reaches."""

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds of each resource, by what it is."""
        return {
            "compute": self.compute,
            "device link": self.link,
            "drive": self.drive,
            "host memory": self.host,
            "device memory": self.device,
            "network": self.network,
        }

    @property
    def phases(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Seconds of each resource in forward and backward, and in the update that follows."""
        passes = {"compute": self.compute, "device link": self.pass_link}
        update = {
            "host memory": self.host,
            "device memory": self.device,
            "device link": self.update_link,
        }
        return passes, update

    @property
    def lower_bound(self) -> float:
        """No step is shorter."""
        return max(self.drive, self.network, sum(max(each.values()) for each in self.phases))

    @property
    def binding(self) -> str:
        """The resource that most of the lower bound comes from."""
        whole = {"drive": self.drive, "network": self.network}
        name, seconds = max(whole.items(), key=lambda item: item[1])
        if seconds >= self.lower_bound and seconds:
            return name
        totals: dict[str, float] = {}
        for phase in self.phases:
            longest = max(phase, key=lambda each: phase[each])
            totals[longest] = totals.get(longest, 0.0) + phase[longest]
        return max(totals, key=lambda each: totals[each])


@dataclass(frozen=True, slots=True)
class Wear:
    """What training does to the drives of a node."""

    written_bytes_per_step: int
    drive_writes_per_day: float | None
    """At the pace of the expected step; None where the drives' size is not known."""
    steps_until_worn: float | None
    """Steps until the rated bytes are written; None where nothing is written or rated."""
    days_until_worn: float | None


def operations(inputs: PlanInputs) -> Operations | None:
    """Return the operations of one micro-batch of one rank; None if only sizes are known."""
    model, batch = inputs.model, inputs.batch
    if not model.stacks:
        return None
    sequence = model.tokens(batch.sequence)
    tokens = batch.samples * sequence
    blocks = sum(each.count * each.active_numel for each in model.stacks)
    scores = 0.0
    for stack in model.stacks:
        for each in stack.attention:
            seen = (sequence + 1) / 2 if each.causal else sequence
            scores += stack.count * 4.0 * each.query_width * seen
    passes = _passes(inputs)
    again = 1.0 if inputs.batch.checkpointing and inputs.trains else 0.0
    return Operations(
        matmul=passes * 2.0 * tokens * (blocks + _head_numel(model)),
        attention=passes * tokens * scores,
        recomputed=again * tokens * (2.0 * blocks + scores),
    )


def _passes(inputs: PlanInputs) -> float:
    """Return how often each matrix product is computed, forward and backward together.

    A backward is one for the gradient of what came in, which nothing needs below the first
    parameter that is trained, and one for the gradient of each weight that is.
    """
    model = inputs.model
    if not inputs.trains:
        return 1.0
    first = {"", *model.blocks[:1]}
    reaches = any(each.is_trainable for each in model.parameters if each.block in first)
    return 1.0 + reaches + model.trainable_numel / model.numel


def _head_numel(model: ModelShape) -> int:
    """Return the parameters that logits are computed with, tied or not."""
    return model.vocabulary * model.hidden if model.vocabulary else 0


def step_time(inputs: PlanInputs, plan: MemoryPlan, bytes_moved: Moved) -> StepTime:
    """Return the least time of one step of `inputs`, placed as `plan` says."""
    node, rates = inputs.node, inputs.node.bandwidths
    micro = inputs.accumulation_steps
    done = operations(inputs)
    compute = micro * done.total / rates.flops if done is not None else 0.0
    traffic = bytes_moved.traffic
    drive = _drive_seconds(
        inputs, traffic, bytes_moved.commit_bytes, _kept_bytes(plan, traffic, micro)
    )
    link_rate = rates.link_bytes_per_s if node.device is DeviceKind.CUDA else float("inf")
    link = bytes_moved.link_bytes / link_rate
    host = bytes_moved.host_update_bytes * node.gpus / rates.host_bytes_per_s
    device = bytes_moved.device_update_bytes / rates.device_bytes_per_s
    network = _network_bytes(inputs, plan) / rates.network_bytes_per_s
    update_share = _update_share(traffic)
    copied = bytes_moved.pass_link_bytes / link_rate
    passes = max(compute / _EXPECTED_SHARE, copied, network, drive * (1 - update_share))
    streamed = bytes_moved.update_link_bytes / link_rate
    expected = passes + max(host, device, streamed, drive * update_share)
    shared = bytes_moved.shared_update_bytes / rates.host_bytes_per_s
    if shared and streamed:  # both sides work all the time, each at its full rate
        host = streamed = shared * streamed / (shared + streamed)
        link = copied + streamed
    return StepTime(compute, link, drive, host, device, network, copied, streamed, expected)


def _drive_seconds(
    inputs: PlanInputs, traffic: StepTraffic, commit_bytes: float, kept_bytes: int
) -> float:
    ranks = inputs.node.gpus
    read = traffic.total_read_bytes - kept_bytes
    written = traffic.total_written_bytes + commit_bytes
    return inputs.node.bandwidths.drive_seconds(read * ranks, written * ranks)


def _kept_bytes(plan: MemoryPlan, traffic: StepTraffic, micro_batches: int) -> int:
    """Return the most that need not be read because units are kept from one use to the next.

    `max_reuse_distance` lets the last units of a forward stay for its backward, in the room for the
    units that are unsharded at once; each is read at least once a micro-batch all the same.
    """
    units: dict[int, int] = {}
    for segment in plan.request.segments:
        size = segment.layout(plan.request.world_size).shard_numel * segment.element.size_bytes
        units[segment.unit_index] = units.get(segment.unit_index, 0) + size
    window = sum(sorted(units.values(), reverse=True)[:_KEPT_UNITS])
    return min(micro_batches * window, traffic.read_bytes[Section.PARAMETER] // 2)


def _update_share(traffic: StepTraffic) -> float:
    """Return how much of the drive's bytes move in the update: state, and parameters written."""
    total = traffic.total_read_bytes + traffic.total_written_bytes
    state = traffic.read_bytes[Section.STATE] + traffic.written_bytes[Section.STATE]
    own = traffic.written_bytes[Section.PARAMETER]
    return (state + own) / total if total else 0.0


def _link_bytes(plan: MemoryPlan, micro_batches: int) -> tuple[int, int, int]:
    """Return the bytes that pass to a device or back from it in a step, the larger direction.

    Shards that rest below the device come up for each forward and backward; gradients go down once
    a micro-batch. A device that updates gets what rests below it, and gives it back.

    Returns:
        Those of the whole step, of forward and backward, and of the update.
    """
    up = down = update_up = update_down = 0
    for group in plan.sub_groups:
        spec = plan.request.segments[group.segment]
        if group.tier(Section.PARAMETER) is not Tier.DEVICE:
            up += 2 * micro_batches * group.numel * spec.element.size_bytes
        if group.tier(Section.GRADIENT) in (Tier.HOST, Tier.NVME):
            down += micro_batches * group.numel * spec.gradient.size_bytes
        if plan.request.update_on_device and group.tier(Section.STATE) is not None:
            sizes = section_bytes(plan.request, spec, group.numel)
            below = [each for each in sizes if group.tier(each) is not Tier.DEVICE]
            update_up += sum(sizes[each] for each in below)
            update_down += sum(sizes[each] for each in below if each is not Section.GRADIENT)
    whole = max(up + update_up, down + update_down)
    return whole, max(up, down), max(update_up, update_down)


def _updated_bytes(plan: MemoryPlan, tiers: tuple[Tier, ...]) -> int:
    """Return the bytes that an update reads and writes where its state rests on one of `tiers`."""
    total = 0
    for group in plan.sub_groups:
        if group.tier(Section.STATE) in tiers:
            spec = plan.request.segments[group.segment]
            state = section_bytes(plan.request, spec, group.numel)[Section.STATE]
            total += 2 * (state + group.numel * spec.element.size_bytes)
            total += group.numel * spec.gradient.size_bytes
    return total


def _network_bytes(inputs: PlanInputs, plan: MemoryPlan) -> float:
    """Return the bytes that a rank receives in a step.

    Sharded parameters are gathered twice a micro-batch, replicated ones once a step; gradients are
    reduced once a micro-batch.
    """
    world_size, micro = inputs.node.world_size, inputs.accumulation_steps
    if world_size == 1:
        return 0.0
    total = 0
    for spec in plan.request.segments:
        gathers = 1 if plan.request.replicates or spec.persistent else 2 * micro
        numel = spec.layout(world_size).padded_numel
        total += gathers * numel * spec.element.size_bytes
        if spec.trainable and plan.request.trains:
            total += micro * numel * plan.request.reduction_of(spec).size_bytes
    return total * (world_size - 1) / world_size


def wear(inputs: PlanInputs, bytes_moved: Moved, time: StepTime) -> Wear:
    """Return what steps of `time` do to the drives of each node."""
    node = inputs.node
    written = bytes_moved.traffic.total_written_bytes + bytes_moved.commit_bytes
    written = round(written * node.gpus)
    size = node.drive_bytes if node.drive_bytes is not None else node.nvme_bytes
    knows = time.expected and inputs.model.stacks  # else the pace is not known
    daily = _SECONDS_OF_A_DAY / time.expected if knows else 0.0
    per_day = written * daily / size if size and (daily or not written) else None
    steps = node.rated_written_bytes / written if node.rated_written_bytes and written else None
    return Wear(written, per_day, steps, steps / daily if steps is not None and daily else None)
