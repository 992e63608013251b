"""This rank's shards on their tiers: parameters, gradients and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aio_ops import Engine, HostArena, Span, TransferFile
from estimators import (
    ElementType,
    Extent,
    MemoryPlan,
    Section,
    SegmentSpec,
    SubGroup,
    Tier,
    record_layout,
)
from offload.arrays import clear_bytes, copy_bytes, tensor_at
from offload.kernels import Kernels
from offload.ledger import Ledger
from offload.pager import Pager, PagerFailedError
from offload.slots import Slot, carve_slots

_GRADIENT = frozenset({Section.GRADIENT})
_PARAMETER = frozenset({Section.PARAMETER})


@dataclass(frozen=True, slots=True)
class SwapDirectory:
    """A directory for swap files, and the most bytes that a rank may use there."""

    path: Path
    capacity_bytes: int | None = None
    weight: float | None = None
    """Its share beside the others'; they are measured unless all have one."""


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What a store works with; made outside, so that tests can hand in a hostile engine."""

    engine: Engine
    directory: Path | None
    """Where the swap file is made; None if the plan has no swap file."""
    kernels: Kernels
    ledger: Ledger
    stripes: tuple[SwapDirectory, ...] = ()
    """With more than one, the swap file is striped over these and `directory` is not used."""

    def create_file(self, size_bytes: int) -> TransferFile:
        """Make the swap file, on one drive or on several."""
        if len(self.stripes) > 1:
            weights = [each.weight for each in self.stripes if each.weight is not None]
            return self.engine.create_striped_file(
                [each.path for each in self.stripes],
                size_bytes,
                weights=weights if len(weights) == len(self.stripes) else "auto",
                capacities=[each.capacity_bytes for each in self.stripes],
            )
        if self.directory is None:
            raise ValueError(f"the plan needs {size_bytes} bytes of NVMe but no path")
        return self.engine.create_file(self.directory, size_bytes)


class Store:
    """Allocates exactly what the plan says, once, and moves sections between tiers."""

    def __init__(self, plan: MemoryPlan, parts: StoreParts) -> None:
        self.plan = plan
        self.ledger = parts.ledger
        self.kernels = parts.kernels
        self._engine = parts.engine
        self._parameters: dict[int, Span] = {}
        self._gradients: dict[int, Span] = {}
        self._states: dict[int, Span] = {}
        self.written_states: set[int] = set()
        """Sub-groups whose state on NVMe was ever written; the others' is zero and is not read."""
        self._has_gradient = [False] * len(plan.request.segments)
        self._failure: str | None = None
        self.is_closed = False
        self._file: TransferFile | None = None
        self.pager: Pager | None = None
        if plan.swap_file_bytes:
            self._file = parts.create_file(plan.swap_file_bytes)
        # Only slots take part in transfers; a forked DataLoader worker may read what is resident.
        self.device_arena, self.host_arena = (
            HostArena(max(_resident_bytes(plan, tier), 1), inherited=True)
            for tier in (Tier.DEVICE, Tier.HOST)
        )
        self.slot_arena = HostArena(max(plan.slots.total_bytes, 1))
        self._allocate_resident()
        if self._file is not None:
            slots = carve_slots(self.slot_arena, plan.slots)
            self.pager = Pager(self._engine, self._file, slots, self.ledger)

    # Parameters

    def resident_parameters(self, segment: int) -> Span | None:
        """Return the memory of a resident parameter shard, or None if it rests on NVMe."""
        return self._parameters.get(segment)

    def read_parameters(self, segment: int, target: Span) -> None:
        """Copy this rank's parameter shard of a segment into `target`.

        Raises:
            PageError: if a page-in failed.
        """
        resident = self._parameters.get(segment)
        if resident is not None:
            copy_bytes(resident, target, resident.size_bytes)
            return
        groups = self.plan.by_segment[segment]
        for position, group in enumerate(groups):
            for ahead in groups[position + 1 :]:
                if not self.read_ahead(ahead, _PARAMETER):
                    break
            slot = self._require_pager().page_in(_extent(group), _PARAMETER)
            start, size = self._byte_range(group, Section.PARAMETER)
            copy_bytes(slot.section(Section.PARAMETER), target.sub(start, size), size)
            self._require_pager().release(slot)

    def read_ahead_parameters(self, segment: int) -> None:
        """Start reading the parameter shard of a segment into spare slots."""
        for group in self.plan.by_segment[segment]:
            if not group.on_nvme(Section.PARAMETER) or not self.read_ahead(group, _PARAMETER):
                return

    # Gradients

    def has_gradient(self, segment: int) -> bool:
        """Tell whether a segment has gradients of the current accumulation window."""
        return self._has_gradient[segment]

    def add_gradient(self, segment: int, shard: Span) -> None:
        """Add a gradient shard to what the window has accumulated; `shard` receives the sum.

        Raises:
            PageError: if a transfer failed.
        """
        spec = self.plan.request.segments[segment]
        accumulate = self._has_gradient[segment]
        resident = self._gradients.get(segment)
        if resident is not None:
            if accumulate:
                _add(spec.gradient, resident, shard)
            copy_bytes(shard, resident, resident.size_bytes)
        else:
            for group in self.plan.by_segment[segment]:
                self._page_gradient(spec, group, shard, accumulate=accumulate)
        self._has_gradient[segment] = True

    def fail(self, reason: str) -> None:
        """Refuse all further work, whatever tier it is on: `reason` says what is torn."""
        self._failure = reason
        if self.pager is not None:
            self.pager.fail(reason)

    def require_intact(self) -> None:
        """Raise if an update was torn, because some sub-groups are a step ahead of others.

        Raises:
            PagerFailedError: saying what is torn.
        """
        if self._failure is not None:
            raise PagerFailedError(
                f"the state cannot be used because {self._failure}; start again from the last"
                " checkpoint"
            )

    def reclaim(self) -> None:
        """Bring slots and transfers to rest after an interruption."""
        if self.pager is not None:
            self.pager.reclaim()

    def drop_gradients(self) -> None:
        """Forget all gradients of the current accumulation window."""
        self._has_gradient = [False] * len(self._has_gradient)

    def read_gradient(self, segment: int, target: Span) -> None:
        """Copy the accumulated gradient shard of a segment into `target`; zeros if it has none."""
        if not self._has_gradient[segment]:
            clear_bytes(target)
            return
        resident = self._gradients.get(segment)
        if resident is not None:
            copy_bytes(resident, target, resident.size_bytes)
            return
        for group in self.plan.by_segment[segment]:
            slot = self._require_pager().page_in(_extent(group), _GRADIENT)
            start, size = self._byte_range(group, Section.GRADIENT)
            copy_bytes(slot.section(Section.GRADIENT), target.sub(start, size), size)
            self._require_pager().release(slot)

    def close(self) -> None:
        """Wait for what is in flight and give everything back; safe to call twice."""
        self.is_closed = True
        if self.pager is not None:
            self.pager.close()
        self._engine.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    # Memory of sub-groups

    def section_span(self, group: SubGroup, section: Section, slot: Slot | None) -> Span:
        """Return the memory of a section: in its slot if it rests on NVMe, else where it rests."""
        if slot is not None and group.on_nvme(section):
            return slot.section(section)
        if section is Section.STATE:
            return self._states[group.index]
        start, size = self._byte_range(group, section)
        resident = self._parameters if section is Section.PARAMETER else self._gradients
        return resident[group.segment].sub(start, size)

    def read_ahead(self, group: SubGroup, sections: frozenset[Section]) -> bool:
        """Start a read if the sub-group has something to read; False once no slot is spare."""
        if group.extent is None or not sections:
            return True
        return self._require_pager().read_ahead(group.extent, sections)

    # Internals

    def _allocate_resident(self) -> None:
        arenas = {Tier.DEVICE: self.device_arena, Tier.HOST: self.host_arena}
        for index, spec in enumerate(self.plan.request.segments):
            groups = self.plan.by_segment[index]
            numel = sum(group.numel for group in groups)
            for section, target, element in (
                (Section.PARAMETER, self._parameters, spec.element),
                (Section.GRADIENT, self._gradients, spec.gradient),
            ):
                tier = self.plan.segment_tier(index, section)
                if tier in arenas:
                    target[index] = arenas[tier].carve(numel * element.size_bytes)
                elif tier is None and section is Section.PARAMETER:
                    target[index] = Span(0, 0, None)  # only parameters without elements
            for group in groups:
                tier = group.tier(Section.STATE)
                if tier in arenas:
                    layout = record_layout(
                        self.plan.request.state_format, spec.element, group.numel
                    )
                    self._states[group.index] = arenas[tier].carve(layout.size_bytes)

    def _require_pager(self) -> Pager:
        if self.pager is None:
            raise RuntimeError("nothing of this model rests on NVMe")
        return self.pager

    def _byte_range(self, group: SubGroup, section: Section) -> tuple[int, int]:
        """Return where a sub-group lies in its shard of parameters or gradients, in bytes."""
        spec = self.plan.request.segments[group.segment]
        element = spec.gradient if section is Section.GRADIENT else spec.element
        element_bytes = element.size_bytes
        return group.start * element_bytes, group.numel * element_bytes

    def _page_gradient(
        self, spec: SegmentSpec, group: SubGroup, shard: Span, *, accumulate: bool
    ) -> None:
        pager = self._require_pager()
        extent = _extent(group)
        slot = pager.page_in(extent, _GRADIENT) if accumulate else pager.blank(extent)
        start, size = self._byte_range(group, Section.GRADIENT)
        part = shard.sub(start, size)
        if accumulate:
            _add(spec.gradient, slot.section(Section.GRADIENT).sub(0, size), part)
        copy_bytes(part, slot.section(Section.GRADIENT), size)
        pager.page_out(slot, _GRADIENT)


def _resident_bytes(plan: MemoryPlan, tier: Tier) -> int:
    return sum(plan.resident_section_bytes(tier, section) for section in Section)


def _extent(group: SubGroup) -> Extent:
    if group.extent is None:
        raise RuntimeError(f"sub-group {group.segment} [{group.start}, {group.stop}) has no extent")
    return group.extent


def _add(element: ElementType, earlier: Span, target: Span) -> None:
    """Add `earlier` to `target` in place, one rounding an element, in the gradient's type."""
    numel = target.size_bytes // element.size_bytes
    tensor_at(target, element, numel).add_(tensor_at(earlier, element, numel))
