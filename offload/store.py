"""This rank's shards on their tiers: parameters, gradients and optimizer state."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from aio_ops import Engine, HostArena, PinnedArena, Span, TransferFile, measure_schedule
from estimators import (
    Extent,
    MemoryPlan,
    Section,
    SubGroup,
)
from estimators.records import section_bytes, staged_offsets
from offload.arrays import clear_bytes
from offload.copies import Copies
from offload.device import (
    PASSED,
    Device,
    Fence,
    HostDevice,
    Memory,
    clear_memory,
    elements_at,
    last_of,
)
from offload.heap import HeapTrimmer
from offload.kernels import Kernels
from offload.kernels_device import DeviceKernels, load_device_kernels
from offload.ledger import Ledger
from offload.pager import Pager, PagerFailedError
from offload.residents import Residents, runs
from offload.sharing import sharing_of
from offload.slots import Slot, carve_slots
from offload.transfers import SlotTransfers
from offload.update_parts import PartPlace
from offload.whole_records import WholeRecords

_GRADIENT = frozenset({Section.GRADIENT})
_MEASURED_BYTES = 16 << 20
_SCRATCH_BYTES = 32 << 20
"""Most device memory for gradients that rest on the host while others are added to them."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SwapDirectory:
    """A directory for swap files, and the most bytes that a rank may use there."""

    path: Path
    capacity_bytes: int | None = None
    weight: float | None = None
    """Its share beside the others'; they are measured unless all have one."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A swap file that stays when the run ends, and which of its copies count."""

    file: TransferFile
    copies: Copies
    is_new: bool
    """Whether nothing was ever written to it."""


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What a store works with; made outside, so that tests can hand in a hostile engine."""

    engine: Engine
    directory: Path | None
    """Where the swap file is made; None if the plan has no swap file."""
    kernels: Kernels
    ledger: Ledger
    burst: int = 0
    """Page-outs that go together, the drive reading in between; up to 1 mixes both."""
    verify: bool = False
    """Whether what is paged in is checked against what was paged out."""
    measures_schedule: bool = False
    """Whether the drive's faster order of reads and writes is found out on the new swap file."""
    pins_slots: bool = False
    """Whether slots are locked in RAM and registered with the engine, where that is allowed."""
    device: Device = field(default_factory=HostDevice)
    """Where the model computes."""
    position: int = 0
    """Which part of the parameters the shard is, where they are kept in full."""
    stripes: tuple[SwapDirectory, ...] = ()
    """With more than one, the swap file is striped over these and `directory` is not used."""
    kept: KeptFile | None = None
    """The swap file of a durable run, which is opened already."""

    def create_file(self, size_bytes: int) -> TransferFile:
        """Make the swap file, on one drive or on several; that of a durable run is there."""
        if self.kept is not None:
            return self.kept.file
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


class SubGroupSizes:
    """Sizes of the sections of sub-groups, worked out once: every step asks for them."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._plan = plan
        self._sections: dict[int, Mapping[Section, int]] = {}
        self._staged: dict[int, Mapping[Section, int]] = {}

    def sections(self, group: SubGroup) -> Mapping[Section, int]:
        """Return the bytes of each section, unpadded."""
        if group.index not in self._sections:
            request = self._plan.request
            spec = request.segments[group.segment]
            self._sections[group.index] = section_bytes(request, spec, group.numel)
        return self._sections[group.index]

    def staged(self, group: SubGroup) -> Mapping[Section, int]:
        """Return where sections that do not rest on the device lie in a buffer of its update."""
        if group.index not in self._staged:
            request = self._plan.request
            spec = request.segments[group.segment]
            self._staged[group.index] = staged_offsets(request, spec, group)
        return self._staged[group.index]


class Store:
    """Allocates exactly what the plan says, once, and moves sections between tiers."""

    def __init__(self, plan: MemoryPlan, parts: StoreParts) -> None:
        self.plan, self.sizes = plan, SubGroupSizes(plan)
        self.ledger, self.kernels, self.device = parts.ledger, parts.kernels, parts.device
        self.device_kernels: DeviceKernels = load_device_kernels(parts.device.torch_device)
        """For what lies on a device that is not the host."""
        self.places: dict[tuple[object, ...], Sequence[PartPlace]] = {}
        """Where the parts of sub-groups are, as `UpdatePass` has found them."""
        self.heap = HeapTrimmer()
        """Who frees much of what this store's users unshard or copy says so here."""
        self.engine = parts.engine
        self.parameter_version = 0
        """Grows with every change of parameters: what was copied before is old then."""
        self.written_states: set[int] = set()
        """Sub-groups whose state on NVMe was ever written; the others' is zero and is not read."""
        self._has_gradient = [False] * len(plan.request.segments)
        self._failure: str | None = None
        self.before_change: Callable[[SubGroup], None] = _ignore
        """Called before parameters or state of a sub-group change: whoever copies them waits."""
        self.suspended: str | None = None
        """Why all work is refused until this is None again: what is here is half replaced."""
        self.is_closed = False
        self.is_restored = False
        """Whether it holds what an earlier process committed: a model's own values do not count."""
        self.pager: Pager | None = None
        self.swap_file: TransferFile | None = (
            parts.create_file(plan.swap_file_bytes) if plan.swap_file_bytes else None
        )
        self.residents = Residents(plan, parts.device, parts.position)
        self.staging: Span | None = _staging(plan, parts.device)
        """Where the processor updates what rests on a device that is not the host."""
        self.sharing = sharing_of(plan)
        self.update_fence: Fence = PASSED
        """The last copy out to host memory of an update on a device."""
        self._gradient_fences: dict[int, Fence] = {}
        """The last copy out of gradients to host memory, by segment; [Note: copies]."""
        self.slot_arena = _slot_arena(plan, parts)
        self.slots: Sequence[Slot] = ()
        self.transfers: SlotTransfers | None = None
        self.copies = parts.kept.copies if parts.kept is not None else Copies()
        _open_pager(self, parts)
        self.whole_records = _open_whole_records(self, parts)
        """What an optimizer of whole tensors keeps."""
        _describe(self.ledger, plan, parts.device)

    # Parameters

    def resident_parameters(self, segment: int) -> Memory | None:
        """Return the memory of a resident parameter shard, or None if some rests on NVMe.

        Where parameters are kept in full it is all of them.
        """
        return self.residents.whole(Section.PARAMETER, segment)

    def read_parameters(self, segment: int, target: Memory) -> Fence:
        """Copy this rank's parameter shard of a segment into `target`, see [Note: copies].

        Raises:
            PageError: if a page-in failed.
        """
        return self._read_section(Section.PARAMETER, segment, target)

    def read_ahead_parameters(self, segment: int) -> bool:
        """Start reading the parameter shard of a segment; False once no slot is spare for it."""
        groups = self.plan.by_segment[segment]
        for extent, sections in _sections_on_nvme(groups, Section.PARAMETER):
            if not self._require_pager().read_ahead(extent, sections):
                return False
        return True

    # Gradients

    def has_gradient(self, segment: int) -> bool:
        """Tell whether a segment has gradients of the current accumulation window."""
        return self._has_gradient[segment]

    def add_gradient(self, segment: int, shard: Memory) -> Fence:
        """Add a gradient shard to what the window has accumulated; `shard` receives the sum.

        `shard` is on the device or in host memory. Until the fence has passed it is being read,
        see [Note: copies].

        Raises:
            PageError: if a transfer failed.
        """
        accumulate = self._has_gradient[segment]
        groups, fence = self.plan.by_segment[segment], PASSED
        for run, stop in runs(groups, Section.GRADIENT, joins=not accumulate):
            start, size = _byte_range(self.plan, run, Section.GRADIENT)
            part, group = shard.sub(start, size), run[0]
            if group.on_nvme(Section.GRADIENT):
                slot = self._lend_gradient(groups, stop, accumulate=accumulate)
                stored = slot.section(Section.GRADIENT).sub(0, size)
                slot.fence = _accumulate(self, group, stored, part, accumulate=accumulate)
                fence = last_of(fence, slot.fence)
                self._require_pager().page_out(slot, _GRADIENT)
                continue
            resident = self.residents.stretch(Section.GRADIENT, run)
            done = _accumulate(self, group, resident, part, accumulate=accumulate)
            fence = last_of(fence, done)
            count_use(self.ledger, Section.GRADIENT, group, size)
        self._gradient_fences[segment] = fence
        self._has_gradient[segment] = True
        return fence

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
        if self.suspended is not None:
            raise PagerFailedError(f"the state cannot be used because {self.suspended}")
        if self._failure is not None:
            raise PagerFailedError(
                f"the state cannot be used because {self._failure}; start again from the last"
                " checkpoint"
            )

    def reclaim(self) -> None:
        """Bring slots and transfers to rest after an interruption."""
        self.device.settle()
        if self.pager is not None:
            self.pager.reclaim()

    def drop_gradients(self) -> None:
        """Forget all gradients of the current accumulation window."""
        self._has_gradient = [False] * len(self._has_gradient)
        self._gradient_fences.clear()
        self.residents.drop_gradients()

    def gradient_fence(self, segment: int) -> Fence:
        """Return the fence behind all that was copied out to a segment's memory on the host."""
        return last_of(self.update_fence, self._gradient_fences.get(segment, PASSED))

    def note_gradient(self, segment: int) -> None:
        """Remember that a segment has gradients, which somebody else keeps."""
        self._has_gradient[segment] = True

    def forget_gradient(self, segment: int) -> None:
        """Forget the gradients of one segment of the current accumulation window."""
        self._has_gradient[segment] = False

    def read_gradient(self, segment: int, target: Memory) -> Fence:
        """Copy the accumulated gradient shard of a segment into `target`; zeros if it has none."""
        if not self._has_gradient[segment]:
            clear_memory(target)
            return PASSED
        return self._read_section(Section.GRADIENT, segment, target)

    def close(self) -> None:
        """Wait for what is in flight and give everything back; safe to call twice."""
        self.is_closed = True
        self.device.settle()
        self.staging = None
        if self.pager is not None:
            self.pager.close()
        self.engine.close()
        if self.swap_file is not None:
            self.swap_file.close()
            self.swap_file = None
        self.slots = ()
        self.whole_records.close()
        self.slot_arena.close()
        self.residents.close()

    # Memory of sub-groups

    def section_memory(self, group: SubGroup, section: Section, slot: Slot | None) -> Memory:
        """Return the memory of a section: in its slot if it rests on NVMe, else where it rests."""
        if slot is not None and group.on_nvme(section):
            return slot.section(section)
        return self.residents.part(section, group)

    def section_bytes(self, group: SubGroup) -> Mapping[Section, int]:
        """Return the bytes of each section of a sub-group, unpadded."""
        return self.sizes.sections(group)

    # Internals

    def _read_section(self, section: Section, segment: int, target: Memory) -> Fence:
        """Copy parameters or gradients of a whole segment into `target`."""
        fence = PASSED
        is_gradient = section is Section.GRADIENT
        earlier = self.gradient_fence(segment) if is_gradient else self.update_fence
        groups = self.plan.by_segment[segment]
        for run, stop in runs(groups, section, joins=True):
            start, size = _byte_range(self.plan, run, section)
            part, group = target.sub(start, size), run[0]
            if not group.on_nvme(section):
                resident = self.residents.stretch(section, run)
                fence = last_of(fence, self.device.copy(resident, part, earlier))
                count_use(self.ledger, section, group, size)
                continue
            pager = self._require_pager()
            ahead = _sections_on_nvme(groups, section, stop)
            slot = pager.page_in(_extent(group), frozenset({section}), ahead)
            slot.fence = self.device.copy(slot.section(section).sub(0, size), part)
            fence = last_of(fence, slot.fence)
            pager.release(slot)
        return fence

    def _require_pager(self) -> Pager:
        if self.pager is None:
            raise RuntimeError("nothing of this model rests on NVMe")
        return self.pager

    def _lend_gradient(self, groups: Sequence[SubGroup], stop: int, *, accumulate: bool) -> Slot:
        """Return a slot for the gradient of the last of the groups up to `stop`.

        With the gradient so far if it has any; those that follow are read ahead then.
        """
        extent = _extent(groups[stop - 1])
        if not accumulate:
            return self._require_pager().blank(extent)
        ahead = _sections_on_nvme(groups, Section.GRADIENT, stop)
        return self._require_pager().page_in(extent, _GRADIENT, ahead)


def _accumulate(
    store: Store, group: SubGroup, stored: Memory, part: Memory, *, accumulate: bool
) -> Fence:
    """Add what is stored of the gradients of a sub-group to `part`, and store the sum."""
    if accumulate:
        element = store.plan.request.segments[group.segment].gradient
        for start in range(0, part.size_bytes, _SCRATCH_BYTES):
            size_bytes = min(_SCRATCH_BYTES, part.size_bytes - start)
            piece, earlier = part.sub(start, size_bytes), stored.sub(start, size_bytes)
            if isinstance(earlier, Span) and not isinstance(piece, Span):
                scratch = store.device.memory_of(store.device.empty(size_bytes, torch.uint8))
                before = store.gradient_fence(group.segment)
                store.device.join(store.device.copy(earlier, scratch, before))
                earlier = scratch
            numel = size_bytes // element.size_bytes
            # One rounding an element, in the gradient's type.
            elements_at(piece, element, numel).add_(elements_at(earlier, element, numel))
    return store.device.copy(part, stored)


def _open_transfers(store: Store, swap_file: TransferFile, parts: StoreParts) -> SlotTransfers:
    if parts.measures_schedule and (parts.kept is None or parts.kept.is_new):
        _measure_schedule(store.engine, swap_file, store.slot_arena)
    copies = parts.kept.copies if parts.kept is not None else None
    return SlotTransfers(store.engine, swap_file, store.ledger, verify=parts.verify, copies=copies)


def _open_pager(store: Store, parts: StoreParts) -> None:
    if store.swap_file is not None and store.plan.slots.count:
        store.slots = carve_slots(store.slot_arena, store.plan.slots)
        store.transfers = _open_transfers(store, store.swap_file, parts)
        store.pager = Pager(store.transfers, store.slots, store.ledger, burst=parts.burst)


def _open_whole_records(store: Store, parts: StoreParts) -> WholeRecords:
    io = (parts.engine, store.swap_file)
    copies = parts.kept.copies if parts.kept is not None else None
    return WholeRecords(store.plan, io, store.ledger, verify=parts.verify, copies=copies)


def _describe(ledger: Ledger, plan: MemoryPlan, device: Device) -> None:
    ledger.rates = plan.request.rates
    ledger.copied_bytes = device.copied_bytes
    ledger.parameter_numel = sum(
        group.numel for group in plan.sub_groups if group.tier(Section.STATE) is not None
    )


def _ignore(_group: SubGroup) -> None:
    """Nobody copies anything."""


def _measure_schedule(engine: Engine, file: TransferFile, arena: HostArena) -> None:
    """Let the engine take the drive's faster schedule, as far as slots and file can tell it."""
    size_bytes = min(arena.used_bytes // 8, _MEASURED_BYTES)
    size_bytes -= size_bytes % file.alignment_bytes
    if not size_bytes or file.size_bytes < 2 * size_bytes:
        _log.info("too little memory or swap file to measure the drive's schedule: it stays mixed")
        return
    whole = arena.whole()
    spans = [whole.sub(index * size_bytes, size_bytes) for index in range(8)]
    outcome = measure_schedule(engine, file, spans, seconds=1.0)
    _log.info("schedule of the drive: %s", outcome.describe())
    clear_bytes(whole)


def pages_parameters(store: Store, segment: int) -> bool:
    """Tell whether some of a segment's parameters rest on NVMe."""
    return any(group.on_nvme(Section.PARAMETER) for group in store.plan.by_segment[segment])


def _staging(plan: MemoryPlan, device: Device) -> Span | None:
    return device.arena(plan.staging_bytes).whole() if plan.staging_bytes else None


def _slot_arena(plan: MemoryPlan, parts: StoreParts) -> HostArena:
    """Return the memory of the slots, pinned for a device, or if asked for and allowed."""
    size_bytes = max(plan.slots.total_bytes, 1)
    if not parts.device.is_host and plan.swap_file_bytes:
        arena = parts.device.arena(size_bytes)
        if isinstance(arena, PinnedArena):
            arena.register_with(parts.engine)
        return arena
    if not (parts.pins_slots and plan.swap_file_bytes):
        return HostArena(size_bytes)
    try:
        arena = PinnedArena(size_bytes)
    except OSError as error:
        warnings.warn(
            f"the slots are not pinned: {error.strerror}. Training goes on with pageable slots",
            RuntimeWarning,
            stacklevel=2,
        )
        return HostArena(size_bytes)
    arena.register_with(parts.engine)
    return arena


def _sections_on_nvme(
    groups: Sequence[SubGroup], section: Section, start: int = 0
) -> Iterator[tuple[Extent, frozenset[Section]]]:
    """Yield what to read, in order, of the sub-groups from one on whose section rests on NVMe."""
    for at in range(start, len(groups)):
        group = groups[at]
        if group.extent is not None and group.on_nvme(section):
            yield group.extent, frozenset({section})


def _byte_range(plan: MemoryPlan, run: Sequence[SubGroup], section: Section) -> tuple[int, int]:
    """Return where consecutive sub-groups lie in a shard of parameters or gradients, in bytes."""
    spec = plan.request.segments[run[0].segment]
    element = spec.gradient if section is Section.GRADIENT else spec.element
    start, stop = run[0].start, run[-1].stop
    return start * element.size_bytes, (stop - start) * element.size_bytes


def count_use(ledger: Ledger, section: Section, group: SubGroup, size_bytes: int) -> None:
    """Count the bytes of a section that were used where they rest, in memory."""
    tier = group.tier(section)
    if tier is not None:
        ledger.used_in_place(tier, section, size_bytes)


def _extent(group: SubGroup) -> Extent:
    if group.extent is None:
        raise RuntimeError(f"sub-group {group.segment} [{group.start}, {group.stop}) has no extent")
    return group.extent
