"""Will it fit, where, and how fast: the whole answer as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from estimators.activations import Activations, activations
from estimators.inputs import DeviceKind, PlanInputs, placement_request, rank_budget
from estimators.moments import device_moments, host_moments
from estimators.placement import in_play_bytes, minimum_host_bytes, plan_placement
from estimators.records import Section
from estimators.segments import Tier
from estimators.step_time import Moved, StepTime, Wear, moved, operations, step_time, wear
from estimators.summary import (
    COLLECTIVE_SCRATCH,
    GRADIENT_SCRATCH,
    START_EXCESS,
    MemoryPlan,
    StepTraffic,
)
from estimators.update_share import fit_sharing

CUDA_CONTEXT_BYTES = 600 << 20
"""What a process takes of a GPU before its first tensor: context, kernels, libraries."""
CUDA_WORKSPACE_BYTES = 64 << 20
"""What matrix products keep for themselves, allocated through torch: 32 MiB for the thread of the
forward, as much for autograd's."""
ALLOCATOR_SLACK = 0.05
"""Share of what comes and goes on a GPU that its allocator may lose to fragments."""
PROCESS_BYTES = 420 << 20
"""What Python with torch takes of host memory, a rank; measured for CPU builds."""


@dataclass(frozen=True, slots=True)
class Line:
    """One category on one tier, of one rank."""

    tier: Tier
    what: str
    size_bytes: int
    at_peak: bool = True
    """Whether it is there when the tier holds most; the others come and go at other moments."""


@dataclass(frozen=True)
class Estimate:
    """What each rank of a job takes; all ranks take the same, shards being padded."""

    inputs: PlanInputs
    memory: MemoryPlan
    activations: Activations | None
    time: StepTime
    wear: Wear
    moved: Moved

    @property
    def traffic(self) -> StepTraffic:
        """What one rank reads from NVMe and writes there in a step."""
        return self.moved.traffic

    @cached_property
    def passing(self) -> dict[str, dict[str, int]]:
        """What comes and goes on the device, by what it is, at each moment that can be the highest.

        See `estimators/moments.py`.
        """
        found = self.activations or _NOTHING
        moments_of = device_moments if self._is_cuda else host_moments
        return moments_of(
            self.memory,
            found,
            keeps_gradients=self.keeps_gradients,
            accumulates=self.inputs.accumulation_steps > 1,
        )

    @cached_property
    def moments(self) -> dict[str, int]:
        """Bytes of what comes and goes at each moment."""
        return {moment: sum(parts.values()) for moment, parts in self.passing.items()}

    @cached_property
    def keeps_gradients(self) -> bool:
        """Whether all gradients stay the tensors that autograd made: see `zero/kept.py`."""
        return all(map(self.memory.keeps_gradients, range(len(self.memory.request.segments))))

    @property
    def peak_moment(self) -> str:
        """When the device holds most."""
        return max(self.moments.items(), key=lambda item: item[1])[0]

    @property
    def tensor_bytes(self) -> int:
        """Most bytes of tensors on the device: what torch calls allocated."""
        memory, resident = self.memory, self.moved.device_resident_bytes
        if self.keeps_gradients or self._is_cuda:  # the moments have them
            resident -= memory.resident_section_bytes(Tier.DEVICE, Section.GRADIENT)
        workspace = CUDA_WORKSPACE_BYTES if self._is_cuda else 0
        return resident + workspace + max(self.moments.values())

    @property
    def device_bytes(self) -> int:
        """Most bytes of the device, with context and slack on a GPU."""
        if not self._is_cuda:
            return self.tensor_bytes
        slack = int(ALLOCATOR_SLACK * max(self.moments.values()))
        return self.tensor_bytes + slack + CUDA_CONTEXT_BYTES

    @property
    def host_bytes(self) -> int:
        """Most bytes of host memory that one rank takes, Python and torch included."""
        device = 0 if self._is_cuda else self.device_bytes
        return PROCESS_BYTES + self.memory.host_bytes + device

    @property
    def nvme_bytes(self) -> int:
        """Bytes of one rank's swap file."""
        return self.memory.swap_file_bytes

    @property
    def _is_cuda(self) -> bool:
        return self.inputs.node.device is DeviceKind.CUDA

    def lines(self) -> list[Line]:
        """Return every category on every tier of one rank, empty ones left out."""
        sizes: dict[str, int] = {}
        for parts in self.passing.values():
            for what, size in parts.items():
                sizes[what] = max(size, sizes.get(what, 0))
        at_peak = self.passing[self.peak_moment]
        sizes |= at_peak
        skipped = {START_EXCESS, GRADIENT_SCRATCH, COLLECTIVE_SCRATCH, *sizes}
        lines = [
            Line(row.tier, row.what, row.size_bytes)
            for row in self.memory.rows()
            if row.tier is not Tier.DEVICE or row.what not in skipped
        ]
        lines += [Line(Tier.DEVICE, what, size, what in at_peak) for what, size in sizes.items()]
        lines += self._margins()
        order = list(Tier)
        return sorted(
            (line for line in lines if line.size_bytes), key=lambda line: order.index(line.tier)
        )

    def _margins(self) -> list[Line]:
        lines = [Line(Tier.HOST, "Python and torch", PROCESS_BYTES)]
        if self._is_cuda:
            slack = int(ALLOCATOR_SLACK * max(self.moments.values()))
            lines += [
                Line(Tier.DEVICE, "workspace of matrix products", CUDA_WORKSPACE_BYTES),
                Line(Tier.DEVICE, f"allocator slack ({ALLOCATOR_SLACK:.0%})", slack),
                Line(Tier.DEVICE, "CUDA context", CUDA_CONTEXT_BYTES),
            ]
        return lines

    def problems(self) -> list[str]:
        """Return why it does not fit; empty if it does."""
        node, found = self.inputs.node, []
        if (
            node.device_bytes is not None
            and self._is_cuda
            and self.device_bytes > node.device_bytes
        ):
            again = "" if self.inputs.batch.checkpointing else ", use activation checkpointing"
            found.append(
                f"each GPU needs {self.device_bytes} bytes at its peak ({self.peak_moment}), it has"
                f" {node.device_bytes}: lower the batch or the sequence{again}{self._more}"
            )
        if (
            node.host_memory_bytes is not None
            and self.host_bytes * node.gpus > node.host_memory_bytes
        ):
            found.append(self._host_problem(node.host_memory_bytes))
        if node.nvme_bytes is not None and self.nvme_bytes * node.gpus > node.nvme_bytes:
            found.append(
                f"a node's swap files need {self.nvme_bytes * node.gpus} bytes, its drives have"
                f" {node.nvme_bytes}"
            )
        return found

    def _host_problem(self, memory_bytes: int) -> str:
        budget = self.memory.host_bytes
        said = (
            f"a node needs {self.host_bytes * self.inputs.node.gpus} bytes of host memory, it has"
            f" {memory_bytes}: a rank's tiers take {budget}, Python and torch {PROCESS_BYTES}"
        )
        if self._is_cuda:
            return f"{said}; lower tiers.host_memory"
        again = "" if self.inputs.batch.checkpointing else ", use activation checkpointing"
        return (
            f"{said}, and {self.device_bytes} what a device would hold ({self.peak_moment}); lower"
            f" tiers.host_memory, the batch or the sequence{again}{self._more}"
        )

    @property
    def _more(self) -> str:
        """What else helps: where everything is offloaded already, only more memory."""
        if {self.inputs.parameter_tier, self.inputs.optimizer_tier} != {Tier.NVME}:
            return ", or offload more"
        return ", or take a larger GPU" if self._is_cuda else ", or take more memory"

    @property
    def tokens_per_second(self) -> float | None:
        """Expected pace of the whole job; None where what it computes is not known."""
        seconds = self.time.expected
        return self.tokens_per_step / seconds if seconds and self.inputs.model.stacks else None

    @property
    def spare_device_bytes(self) -> int | None:
        """What is left of each GPU; None where its size is not known, or there is none."""
        room = self.inputs.node.device_bytes
        return room - self.device_bytes if room is not None and self._is_cuda else None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step of all ranks."""
        batch = self.inputs.batch
        return (
            batch.samples
            * self.inputs.model.tokens(batch.sequence)
            * self.inputs.accumulation_steps
            * self.inputs.node.world_size
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data."""
        inputs, node = self.inputs, self.inputs.node
        done = operations(inputs)
        return {
            "model": {
                "name": inputs.model.name,
                "family": inputs.model.family,
                "parameters": inputs.model.numel,
                "active_parameters": inputs.model.active_numel,
                "units": 1 + len(inputs.model.blocks),
            },
            "world_size": node.world_size,
            "fits": not self.problems(),
            "problems": self.problems(),
            "rank": {
                "device_bytes": self.device_bytes,
                "device_tensor_bytes": self.tensor_bytes,
                "device_peak_at": self.peak_moment,
                "host_bytes": self.host_bytes,
                "host_arena_bytes": self.memory.host_bytes,
                "nvme_bytes": self.nvme_bytes,
                "slots": self.memory.slots.count,
                "slot_bytes": self.memory.slots.size_bytes,
                "sub_groups": len(self.memory.sub_groups),
                "lines": [
                    {
                        "tier": line.tier.value,
                        "what": line.what,
                        "bytes": line.size_bytes,
                        "at_peak": line.at_peak,
                    }
                    for line in self.lines()
                ],
            },
            "node": {
                "host_bytes": self.host_bytes * node.gpus,
                "nvme_bytes": self.nvme_bytes * node.gpus,
                "nvme_read_bytes_per_step": self.traffic.total_read_bytes * node.gpus,
                "nvme_written_bytes_per_step": self.traffic.total_written_bytes * node.gpus,
            },
            "step": {
                "lower_bound_s": self.time.lower_bound,
                "binding": self.time.binding,
                "parts_s": dict(self.time.parts),
                "expected_s": self.time.expected if inputs.model.stacks else None,
                "tokens": self.tokens_per_step,
                "flops_per_micro_batch": done.total if done is not None else None,
            },
            "wear": {
                "written_bytes_per_step": self.wear.written_bytes_per_step,
                "drive_writes_per_day": self.wear.drive_writes_per_day,
                "steps_until_worn": self.wear.steps_until_worn,
                "days_until_worn": self.wear.days_until_worn,
            },
        }


_NOTHING = Activations(0, 0, 0, 0, 0)


def estimate(inputs: PlanInputs) -> Estimate:
    """Return what each rank takes of each tier, and how long a step is at least.

    Limits of device and drives are not enforced: see `Estimate.problems`.

    Raises:
        PlanError: if the host budget cannot hold what must rest there; it names the smallest one
            that can.
    """
    return estimate_placed(inputs, place(inputs))


def place(inputs: PlanInputs) -> MemoryPlan:
    """Return what rests where; it does not depend on the batch, but on its number of parts.

    Raises:
        PlanError: if the host budget cannot hold what must rest there.
    """
    request = placement_request(inputs)
    everything = max(in_play_bytes(request), minimum_host_bytes(request))
    budget = rank_budget(inputs, everything)
    return plan_placement(fit_sharing(request, budget.host_bytes), budget)


def estimate_placed(inputs: PlanInputs, memory: MemoryPlan, known: Moved | None = None) -> Estimate:
    """Return the estimate of inputs that are placed already.

    Args:
        inputs: what is planned.
        memory: where it rests.
        known: what a step moves, if that was found out before.
    """
    known = known or moved(memory, inputs.accumulation_steps, inputs.commit_steps)
    time = step_time(inputs, memory, known)
    return Estimate(
        inputs=inputs,
        memory=memory,
        activations=activations(inputs.model, inputs.batch, inputs.element),
        time=time,
        wear=wear(inputs, known, time),
        moved=known,
    )
