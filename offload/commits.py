"""What a commit does with the bytes of one store: write, sync, and later find them again.

[Note: one rank's commit] `write` puts everything that rests in memory beside what rests on NVMe,
each into the place that the last commit does not use [Note: two places]; `sync` makes it last.
Then whoever calls writes a manifest with `entries` and, once every rank has one, calls `release`:
only from then on may the places of the commit before be written. `restore` does not believe a
manifest: it reads every byte that it names and compares checksums.
"""

from __future__ import annotations

import errno
import hashlib
from collections import deque
from collections.abc import Iterator, Sequence

from aio_ops import Span, Ticket, TransferFile
from estimators import Extent, MemoryPlan, ResidentCopy, Section
from offload.copies import Copies, CopyEntry, checksum_of
from offload.device import Memory
from offload.ledger import Activity, Link
from offload.store import Store
from offload.transfers import CorruptionError

_KEPT = (Section.PARAMETER, Section.STATE)


def layout_digest(plan: MemoryPlan) -> str:
    """Return a number that plans share whose swap files have everything at the same place."""
    groups = [(each.segment, each.start, each.stop, each.extent) for each in plan.sub_groups]
    segments = plan.request.segments
    whole = (plan.request.whole, plan.whole)
    described = repr((segments, plan.request.world_size, groups, plan.resident_copies, whole))
    state = f"{plan.request.state_format.value} {plan.request.rule}"
    return hashlib.blake2b((described + state).encode(), digest_size=16).hexdigest()


class StoreCommits:
    """Commits and restores what one store holds."""

    def __init__(self, store: Store, copies: Copies) -> None:
        self._store = store
        self._copies = copies
        self._plan = store.plan

    def write(self) -> int:
        """Write what rests in memory and has changed, and return its bytes.

        Raises:
            PagerFailedError: if the state is torn.
            OSError: if a write failed; the last commit still counts.
        """
        store = self._store
        store.require_intact()
        with store.ledger.timing(Activity.COMMIT):
            if store.pager is not None:
                store.pager.drain()
            store.whole_records.settle()
            tickets: list[tuple[ResidentCopy, Ticket]] = []
            try:
                for copy in self._plan.resident_copies:
                    if not isinstance(
                        store.residents.memory(copy.tier, copy.section, copy.segment), Span
                    ):
                        store.engine.drain()  # one copy of what rests on a device at a time
                    ticket = self._write_resident(copy)
                    if ticket is not None:
                        tickets.append((copy, ticket))
            finally:
                store.engine.drain()
            return self._finish_all(tickets)

    def sync(self) -> None:
        """Return once everything that was written will be there after a crash."""
        if self._store.swap_file is not None:
            with self._store.ledger.timing(Activity.COMMIT):
                self._store.swap_file.sync()

    def entries(self) -> list[CopyEntry]:
        """Return what a manifest says of every section."""
        return self._copies.entries()

    def release(self) -> None:
        """Let the places of the commit before be written: every rank has this one."""
        self._copies.commit()

    def restore(self, entries: Sequence[CopyEntry]) -> int:
        """Read all that a commit names, take it as what the store holds, and return its bytes.

        Raises:
            CorruptionError: if anything is not what was written, or is missing.
            OSError: if a read failed. In both cases another commit can be tried.
        """
        by_place = {entry.place: entry for entry in entries}
        residents = [(copy, self._entry(by_place, copy)) for copy in self._plan.resident_copies]
        sections = list(self._sections(by_place))
        moved, problem = self._store.whole_records.restore(by_place)
        if problem:
            raise self._corrupt(problem)
        if by_place:
            raise self._corrupt(f"it names {len(by_place)} places that the plan does not have")
        moved += sum(self._read_resident(copy, entry) for copy, entry in residents)
        moved += self._check_sections(sections)
        self._copies.restore(entries)
        self._store.written_states.clear()
        groups = {id(group.extent): group for group in self._plan.sub_groups}
        for extent, section, entry in sections:
            if section is Section.STATE:
                self._store.written_states.add(groups[id(extent)].index)
            if self._store.transfers is not None:
                self._store.transfers.recall(extent, section, entry.checksum)
        return moved

    def _write_resident(self, copy: ResidentCopy) -> Ticket | None:
        """Start to write one resident copy; None if it is as the last commit has it."""
        span = self._on_host(self._store.residents.memory(copy.tier, copy.section, copy.segment))
        checksum = checksum_of(span)
        place = copy.offsets[0]
        known = self._copies.current(place)
        if known is not None and known.checksum == checksum:
            return None
        chosen = self._copies.begin_write(place, checksum)
        try:
            ticket = self._store.engine.submit_write(self._file, copy.offsets[chosen], span)
        except BaseException:
            self._copies.forget(place)
            raise
        self._store.ledger.submitted(Link.WRITE, copy.name)
        return ticket

    def _finish_all(self, tickets: Sequence[tuple[ResidentCopy, Ticket]]) -> int:
        """Note what came of every write, and raise the first failure; return the bytes."""
        moved_bytes = 0
        failure: OSError | None = None
        for copy, ticket in tickets:
            try:
                moved_bytes += self._finish(copy, ticket)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return moved_bytes

    def _finish(self, copy: ResidentCopy, ticket: Ticket) -> int:
        try:
            ticket.wait()
        except OSError:
            self._store.ledger.ended(Link.WRITE, copy.name)
            self._copies.forget(copy.offsets[0])
            raise
        self._store.ledger.completed(Link.WRITE, copy.name, {copy.section: copy.size_bytes})
        return copy.size_bytes

    @property
    def _file(self) -> TransferFile:
        if self._store.swap_file is None:
            raise RuntimeError("a durable store has no swap file: the plan keeps nothing")
        return self._store.swap_file

    def _entry(self, by_place: dict[int, CopyEntry], copy: ResidentCopy) -> CopyEntry:
        entry = by_place.pop(copy.offsets[0], None)
        if entry is None:
            raise self._corrupt(f"it does not have {copy.name}")
        return entry

    def _sections(
        self, by_place: dict[int, CopyEntry]
    ) -> Iterator[tuple[Extent, Section, CopyEntry]]:
        """Yield every section of an extent that a commit has, in the order of the file."""
        for group in self._plan.sub_groups:
            extent = group.extent
            for section in _KEPT:
                if extent is None or not extent.holds(section):
                    continue
                entry = by_place.pop(extent.copy_offset(section, 0), None)
                if entry is not None:
                    yield extent, section, entry
                elif section is Section.PARAMETER:  # state that was never written is zero
                    raise self._corrupt(f"it does not have the parameters of {extent.name}")

    def _read_resident(self, copy: ResidentCopy, entry: CopyEntry) -> int:
        memory = self._store.residents.memory(copy.tier, copy.section, copy.segment)
        span = self._on_host(memory)
        self._store.engine.submit_read(self._file, copy.offsets[entry.copy], span).wait()
        if checksum_of(span) != entry.checksum:
            raise self._corrupt(f"{copy.name} at {copy.offsets[entry.copy]} has another checksum")
        if not isinstance(memory, Span):
            self._store.device.copy(span, memory).wait()
        return copy.size_bytes

    def _on_host(self, memory: Memory) -> Span:
        """Return the memory itself, or a copy on the host of what rests on another device."""
        if isinstance(memory, Span):
            return memory
        device = self._store.device
        device.settle()
        span = device.arena(memory.size_bytes).whole()
        device.copy(memory, span).wait()
        return span

    def _check_sections(self, sections: Sequence[tuple[Extent, Section, CopyEntry]]) -> int:
        """Read sections through the slots, several at a time, and compare their checksums."""
        reads: deque[tuple[Extent, Section, CopyEntry, Span, Ticket]] = deque()
        moved = 0
        slots = self._store.slots
        try:
            for number, (extent, section, entry) in enumerate(sections):
                if len(reads) == len(slots):
                    self._compare(*reads.popleft())
                size = extent.bytes_of(frozenset({section}))[section]
                span = slots[number % len(slots)].span.sub(0, size)
                place = extent.copy_offset(section, entry.copy)
                ticket = self._store.engine.submit_read(self._file, place, span)
                reads.append((extent, section, entry, span, ticket))
                moved += size
            while reads:
                self._compare(*reads.popleft())
        finally:
            self._store.engine.drain()
        return moved

    def _compare(
        self, extent: Extent, section: Section, entry: CopyEntry, span: Span, ticket: Ticket
    ) -> None:
        ticket.wait()
        if checksum_of(span) != entry.checksum:
            place = extent.copy_offset(section, entry.copy)
            raise self._corrupt(
                f"the {section.name.lower()} of {extent.name} at {place} has another checksum"
            )

    def _corrupt(self, what: str) -> CorruptionError:
        return CorruptionError(errno.EIO, f"a commit in {self._file.path} is not whole: {what}")
