"""Updates of sub-groups on the host, beside the copies that they need and those they make.

[Note: host visits] What rests on the device of a sub-group is copied to a buffer on the host, aside
from all that the device does meanwhile. Its kernels are submitted once these copies were seen to be
over, and what the kernels have changed is copied back once they were. So Python waits for nothing,
and visits are in order at each stage: one is updated while those before and behind it are copied.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from aio_ops import Span
from estimators import Section, SubGroup
from estimators.records import HOST_BUFFER_COUNT, aligned_offsets
from offload.arrays import array_at, clear_bytes
from offload.device import PASSED, Fence, Memory
from offload.kernel_queue import UpdateQueue, open_queue
from offload.ledger import Activity
from offload.state import state_arrays
from offload.update_pass import GradientPieces, UpdatePass

_CHANGED = (Section.PARAMETER, Section.STATE)
_REST_SECONDS = 1e-4
"""How long Python waits at most before it looks again at what has ended."""


@dataclass(eq=False)
class _Buffer:
    span: Span | None
    free_after: Fence = PASSED
    """The last copy from it to the device."""


@dataclass(eq=False)
class _Visit:
    """A sub-group on its way."""

    group: SubGroup
    buffer: _Buffer
    spans: dict[Section, Span] = field(default_factory=dict)
    """Where its sections are on the host."""
    staged: list[Section] = field(default_factory=list)
    """Those of them that rest on the device."""
    pieces: GradientPieces | None = None
    brought: Fence = PASSED
    tickets: tuple[int, int] = (0, 0)
    """The first and the last of its kernels."""


class HostUpdate:
    """The part of one update that the host does, see [Note: host visits].

    No copy of an earlier update may be in flight.
    """

    def __init__(
        self,
        pass_: UpdatePass,
        queue: UpdateQueue,
        on_update: Callable[[SubGroup], None],
        segments: Iterable[int],
    ) -> None:
        self._pass = pass_
        self._store = store = pass_.store
        self._queue = queue
        self._on_update = on_update
        self._pieces = {segment: pass_.pieces_of(segment) for segment in segments}
        whole = store.staging
        size_bytes = whole.size_bytes // HOST_BUFFER_COUNT if whole is not None else 0
        self._free = collections.deque(
            _Buffer(whole.sub(index * size_bytes, size_bytes) if whole is not None else None)
            for index in range(HOST_BUFFER_COUNT)
        )
        self._coming: collections.deque[_Visit] = collections.deque()
        self._running: collections.deque[_Visit] = collections.deque()
        self._last_in: Fence = PASSED
        self.numel = 0
        """Elements that were updated."""
        self.seconds = 0.0
        """What their kernels took."""
        store.device.start_aside()

    @property
    def has_room(self) -> bool:
        """Whether a buffer is free."""
        return bool(self._free)

    @property
    def is_busy(self) -> bool:
        """Whether something that was taken is not updated."""
        return bool(self._coming or self._running)

    @property
    def waiting_numel(self) -> int:
        """Elements that were taken and not updated."""
        return sum(each.group.numel for each in (*self._coming, *self._running))

    def take(self, group: SubGroup) -> None:
        """Start to copy to the host what is not there."""
        self._store.before_change(group)
        visit = _Visit(group, self._free.popleft())
        with self._store.device.marking(f"copy out sub-group {group.index}"):
            self._bring(visit)
        self._coming.append(visit)

    def advance(self) -> bool:
        """Submit and give back what can be, and tell whether anything could."""
        has_moved = False
        while self._running and self._queue.wait(self._running[0].tickets[1]):
            self._give_back(self._running.popleft())
            has_moved = True
        while self._coming and self._coming[0].brought.done():
            self._submit(self._coming.popleft())
            has_moved = True
        return has_moved

    def rest(self) -> None:
        """Let some time pass, until a kernel has ended at most."""
        if not self._running:
            time.sleep(_REST_SECONDS)
            return
        with self._store.ledger.timing(Activity.UPDATE):
            self._queue.wait(self._running[0].tickets[1], _REST_SECONDS)

    def finish(self) -> None:
        """Update all that was taken; what was changed is on the device before later work."""
        while self.is_busy:
            if not self.advance():
                self.rest()
        self._store.device.join(self._last_in)

    def _bring(self, visit: _Visit) -> None:
        store, group = self._store, visit.group
        sizes = store.section_bytes(group)
        has_gradient = store.has_gradient(group.segment)
        pieces = self._pieces[group.segment]
        memories = {
            section: store.section_memory(group, section, None)
            for section in sizes
            if section is not Section.GRADIENT or pieces is None
        }
        for section in sizes:
            memory = memories.get(section)
            if isinstance(memory, Span):
                visit.spans[section] = memory
            else:
                visit.staged.append(section)
        offsets = aligned_offsets({each: sizes[each] for each in visit.staged})
        pairs: list[tuple[Memory, Memory]] = []
        for section in visit.staged:
            target = self._part(visit.buffer, offsets[section], sizes[section])
            visit.spans[section] = target
            if section is Section.GRADIENT and pieces is not None:
                pairs += self._piece_pairs(visit, pieces, target)
            elif section is not Section.GRADIENT or has_gradient:
                pairs.append((memories[section], target))
        visit.brought = store.device.copy_all(pairs, visit.buffer.free_after, aside=True)
        if not has_gradient:
            visit.buffer.free_after.wait()
            clear_bytes(visit.spans[Section.GRADIENT])

    def _part(self, buffer: _Buffer, start: int, size_bytes: int) -> Span:
        if buffer.span is None:
            raise RuntimeError("no host memory was planned for what the host updates")
        return buffer.span.sub(start, size_bytes)

    def _piece_pairs(
        self, visit: _Visit, pieces: GradientPieces, target: Span
    ) -> list[tuple[Memory, Memory]]:
        """Return what brings to the host the gradients that their caller keeps on the device."""
        group = visit.group
        pairs: list[tuple[Memory, Memory]] = []
        element = self._store.plan.request.segments[group.segment].gradient
        found = []
        for start, values in pieces:
            low, high = max(start, group.start), min(start + len(values), group.stop)
            if low >= high:
                continue
            first, size_bytes = (low - group.start), (high - low) * element.size_bytes
            part = target.sub(first * element.size_bytes, size_bytes)
            pairs.append((self._store.device.memory_of(values[low - start : high - start]), part))
            found.append((low, array_at(part, element, high - low)))
        visit.pieces = found
        return pairs

    def _submit(self, visit: _Visit) -> None:
        store, group = self._store, visit.group
        spec = store.plan.request.segments[group.segment]
        parameter = array_at(visit.spans[Section.PARAMETER], spec.element, group.numel)
        state = state_arrays(store.plan, spec, group, visit.spans[Section.STATE])
        pieces: GradientPieces | None = visit.pieces
        if pieces is None:
            gradient = array_at(visit.spans[Section.GRADIENT], spec.gradient, group.numel)
            pieces = [(group.start, gradient)]
        first = self._queue.last_ticket + 1
        with store.device.marking(f"update sub-group {group.index} on the host"):
            self._pass.update(self._queue.kernels, group, (parameter, state), pieces)
        visit.tickets = first, self._queue.last_ticket
        self._running.append(visit)

    def _give_back(self, visit: _Visit) -> None:
        store, group, buffer = self._store, visit.group, visit.buffer
        pairs = [
            (visit.spans[section], store.section_memory(group, section, None))
            for section in _CHANGED
            if section in visit.staged
        ]
        if pairs:
            buffer.free_after = self._last_in = store.device.copy_all(pairs, aside=True)
        self._free.append(buffer)
        times = self._queue.times(*visit.tickets)
        if times is not None:
            self.seconds += times[1] - times[0]
            store.ledger.ran_beside(f"update sub-group {group.index}", *times)
        self.numel += group.numel
        self._on_update(group)


def update_on_host(
    pass_: UpdatePass, on_update: Callable[[SubGroup], None], groups: Sequence[SubGroup]
) -> None:
    """Update all sub-groups of a device's model on the host; none rests on NVMe."""
    pass_.store.device.settle()
    with open_queue(pass_.store.kernels, spares_a_core=False) as queue:
        host = HostUpdate(pass_, queue, on_update, {group.segment for group in groups})
        for group in groups:
            while not host.has_room:
                if not host.advance():
                    host.rest()
            host.take(group)
            host.advance()
        host.finish()
