"""The update on a device: records stream through it, in and out at once.

[Note: streamed update] Sub-groups pass through a few buffers on the device, in order: copied in,
updated, copied out. A sub-group is copied in before the update of the one ahead of it is issued, so
that the copy waits for nothing but its buffer. What rests on the device is updated in place, and
last (`in_order`): it is issued while copies go on. The host issues all this and waits only where a
slot is used: for what NVMe brings, and before the slot is written, while the drive reads the next
ones.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from estimators import Section, SubGroup, Tier
from estimators.records import DEVICE_BUFFER_COUNT
from offload.device import PASSED, DeviceMemory, Fence, Memory, elements_at, last_of
from offload.kernels_device import PartsAndGradients
from offload.slots import Slot
from offload.state import kernel_scalars, state_tensors
from offload.update_parts import GroupParts
from offload.update_pass import UpdatePass, pieces_in

_CHANGED = (Section.PARAMETER, Section.STATE)
_PREPARED_COUNT = 32
"""Sub-groups whose parts are prepared at once: few enough that copies do not wait for it."""

Lend = Callable[[int], Slot | None]
"""Lends a slot with what rests on NVMe of the sub-group at a position."""


@dataclass(eq=False)
class _Staged:
    """A sub-group on its way."""

    group: SubGroup
    slot: Slot | None
    memory: dict[Section, DeviceMemory]
    """Where its sections are on the device."""
    buffer: int
    brought: Fence = PASSED
    blank: list[Section] = field(default_factory=list)
    """Sections that were never written: they are zero."""
    taken: Fence = PASSED


def in_order(groups: Sequence[SubGroup]) -> list[SubGroup]:
    """Return sub-groups in the order of a streamed update: those that rest on the device last."""
    return sorted(groups, key=lambda group: all(tier is Tier.DEVICE for _, tier in group.tiers))


class StreamedUpdate:
    """One update of all sub-groups, see [Note: streamed update]."""

    def __init__(
        self,
        pass_: UpdatePass,
        groups: Sequence[SubGroup],
        on_update: Callable[[SubGroup], None],
    ) -> None:
        self._pass = pass_
        self._groups = groups
        self._position_of = {group.index: at for at, group in enumerate(groups)}
        self._store = store = pass_.store
        self._on_update = on_update
        size_bytes = store.plan.device_buffer_bytes
        self._buffers = [
            store.device.memory_of(store.device.empty(size_bytes, torch.uint8))
            for _ in range(DEVICE_BUFFER_COUNT if size_bytes else 0)
        ]
        self._free_after: list[Fence] = [PASSED] * DEVICE_BUFFER_COUNT
        """The last copy out of each buffer."""
        self._next_buffer = 0
        self._coming: collections.deque[_Staged] = collections.deque()
        self._leaving: collections.deque[Fence] = collections.deque()
        """Copies out that were not seen to be over."""
        self._last_out: Fence = PASSED
        self._parts: dict[int, GroupParts] = {}

    def run(self, lend: Lend) -> Fence:
        """Update all sub-groups in order; the fence is behind all that is copied out."""
        for position, group in enumerate(self._groups):
            self.take(group, lend(position))
        return self.finish()

    @property
    def waiting_count(self) -> int:
        """How many sub-groups are on their way; one more than there are buffers keeps all busy."""
        while self._leaving and self._leaving[0].done():
            self._leaving.popleft()
        return len(self._leaving) + len(self._coming)

    def take(self, group: SubGroup, slot: Slot | None) -> None:
        """Start to copy a sub-group in, and issue the update of the one before."""
        if slot is not None:
            self._finish_coming()
        with self._store.device.marking(f"copy in sub-group {group.index}"):
            self._coming.append(self._bring(group, slot))
        if slot is not None:
            self._finish_coming()
        elif len(self._coming) > 1:
            self._update(self._coming.popleft())

    def finish(self) -> Fence:
        """Issue what is left; the fence is behind all that is copied out."""
        self._finish_coming()
        for fence in self._free_after:
            self._store.device.join(fence)  # the buffers are freed now
        return self._last_out

    def _prepared(self, group: SubGroup) -> GroupParts:
        """Return the parts of a sub-group, prepared together with those of the next ones."""
        if group.index not in self._parts:
            first = self._position_of[group.index]
            self._prepare(self._groups[first : first + _PREPARED_COUNT])
        return self._parts[group.index]

    def _prepare(self, groups: Sequence[SubGroup]) -> None:
        wanted: list[PartsAndGradients] = []
        for group in groups:
            pieces = self._pass.pieces_of(group.segment)
            if pieces is None:
                wanted.append((self._pass.parts_of(group, [(group.start, group.numel)]), None))
            else:
                pieces = pieces_in(group, pieces)
                spans = [(start, len(each)) for start, each in pieces]
                parts = self._pass.parts_of(group, spans)
                wanted.append((parts, [each for _, each in pieces]))
        store = self._store
        prepared = store.device_kernels.prepare(wanted, store.device.torch_device)
        self._parts |= {group.index: each for group, each in zip(groups, prepared, strict=True)}

    def _finish_coming(self) -> None:
        while self._coming:
            self._update(self._coming.popleft())

    def _bring(self, group: SubGroup, slot: Slot | None) -> _Staged:
        """Start to copy to the device what is not there."""
        store, device = self._store, self._store.device
        staged = _Staged(group, slot, {}, self._next_buffer)
        offsets = store.sizes.staged(group)
        sizes = store.section_bytes(group)
        pairs: list[tuple[Memory, Memory]] = []
        for section, size_bytes in sizes.items():
            if section is Section.GRADIENT and self._pass.pieces_of(group.segment) is not None:
                continue  # its caller keeps it, on the device
            memory = store.section_memory(group, section, slot)
            if isinstance(memory, DeviceMemory):
                staged.memory[section] = memory
                continue
            target = self._buffer(staged.buffer).sub(offsets[section], size_bytes)
            staged.memory[section] = target
            if self._is_blank(group, section):
                staged.blank.append(section)
                continue
            pairs.append((memory.sub(0, size_bytes), target))
        before = last_of(store.gradient_fence(group.segment), self._free_after[staged.buffer])
        staged.brought = device.copy_all(pairs, before)
        if offsets:
            self._next_buffer = (self._next_buffer + 1) % DEVICE_BUFFER_COUNT
        return staged

    def _buffer(self, index: int) -> DeviceMemory:
        buffer = self._buffers[index]
        if not isinstance(buffer, DeviceMemory):
            raise TypeError("the device of a streamed update is the host")
        return buffer

    def _is_blank(self, group: SubGroup, section: Section) -> bool:
        if section is Section.GRADIENT:
            return not self._store.has_gradient(group.segment)
        return (
            section is Section.STATE
            and group.on_nvme(section)
            and group.index not in self._store.written_states
        )

    def _update(self, staged: _Staged) -> None:
        """Issue the update of a sub-group, and the copies out behind it."""
        with self._store.device.marking(f"update sub-group {staged.group.index}"):
            self._issue(staged)
        self._on_update(staged.group)
        self._write_back(staged)

    def _issue(self, staged: _Staged) -> None:
        store, device, group = self._store, self._store.device, staged.group
        spec = store.plan.request.segments[group.segment]
        device.join(staged.brought)
        if staged.blank:
            device.join(self._free_after[staged.buffer])
        for section in staged.blank:
            staged.memory[section].bytes.zero_()
        if not store.has_gradient(group.segment):
            staged.memory[Section.GRADIENT].bytes.zero_()
        parameter = elements_at(staged.memory[Section.PARAMETER], spec.element, group.numel)
        layout = store.plan.request.record_of(spec, group.numel)
        state = state_tensors(layout, staged.memory[Section.STATE].bytes)
        pieces = self._pass.pieces_of(group.segment)
        if pieces is None:
            gradient = elements_at(staged.memory[Section.GRADIENT], spec.gradient, group.numel)
            pieces = [(group.start, gradient)]
        gradients = [each for _, each in pieces_in(group, pieces)]
        scalars = kernel_scalars(self._pass.scalars_of(group))
        prepared = self._prepared(group)
        store.device_kernels.update_parts(parameter, gradients, state, scalars, prepared)
        pairs: list[tuple[Memory, Memory]] = []
        for section in _CHANGED:
            memory: Memory = store.section_memory(group, section, staged.slot)
            if not isinstance(memory, DeviceMemory):
                source = staged.memory[section]
                pairs.append((source, memory.sub(0, source.size_bytes)))
        staged.taken = device.copy_all(pairs)
        if staged.taken is not PASSED:
            self._free_after[staged.buffer] = self._last_out = staged.taken
            self._leaving.append(staged.taken)

    def _write_back(self, staged: _Staged) -> None:
        """Give a slot back, to be written where something in it has changed.

        That is waited for: a slot that waits is one less for what is read ahead, and the drive is
        the slower link.
        """
        slot, pager = staged.slot, self._store.pager
        if slot is None or pager is None:
            return
        slot.fence = last_of(staged.brought, staged.taken)
        slot.settle()
        changed = frozenset(each for each in _CHANGED if staged.group.on_nvme(each))
        if not changed:
            pager.release(slot)
            return
        pager.page_out(slot, changed)
        if Section.STATE in changed:
            self._store.written_states.add(staged.group.index)
