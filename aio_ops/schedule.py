"""In which order reads and writes go to the kernel: windows, and bursts that alternate.

[Note: mixed or alternating]
Some devices are fastest when reads and writes mix, others when bursts of one kind alternate with
bursts of the other (DESIGN 9). Mixed: whichever kind has fewer bytes with the kernel goes next,
reads first, so that a page-in does not wait behind a queue of page-outs. Alternating: one kind goes
until it has had its burst or has nothing left, then the other, once what is with the kernel is
over. A window bounds the bytes of a kind that are with the kernel at once; one block always fits.

The native engines have the same `Chooser` in csrc/schedule.h.
"""

from dataclasses import dataclass

from aio_ops.transfer import Operation

_NO_LIMIT = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """How reads and writes share a device; None is no limit, and no bursts."""

    read_window_bytes: int | None = None
    write_window_bytes: int | None = None
    burst_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("read_window_bytes", "write_window_bytes", "burst_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < _NO_LIMIT:
                raise ValueError(f"{name} must be a positive number of bytes or None, got {value}")

    def window_bytes(self, operation: Operation) -> int:
        """Return the most bytes of a kind that may be with the kernel at once."""
        reads = operation is Operation.READ
        window = self.read_window_bytes if reads else self.write_window_bytes
        return _NO_LIMIT if window is None else window

    def describe(self) -> str:
        """Return the schedule in words."""
        if self.burst_bytes is None:
            return "reads and writes mixed"
        return f"reads and writes in bursts of {self.burst_bytes} bytes"


class Chooser:
    """Says which kind of block goes to the kernel next; whoever uses it holds a lock."""

    def __init__(self, schedule: Schedule) -> None:
        self._with_kernel_bytes = dict.fromkeys(Operation, 0)
        self._direction = Operation.READ
        self.set(schedule)

    def set(self, schedule: Schedule) -> None:
        """Go on by another schedule."""
        self._schedule = schedule
        self._burst_left_bytes = schedule.burst_bytes or 0

    def choose(self, read_bytes: int, write_bytes: int) -> Operation | None:
        """Return the kind of the next block, or None while something has to be over first.

        The arguments are the sizes of the next block of each kind, 0 where none waits.
        """
        waiting = {Operation.READ: read_bytes, Operation.WRITE: write_bytes}
        if self._schedule.burst_bytes is None:
            ready = [kind for kind in Operation if self._fits(kind, waiting[kind])]
            return min(ready, key=self._with_kernel_bytes.__getitem__, default=None)
        return self._choose_alternating(waiting)

    def taken(self, operation: Operation, size_bytes: int) -> None:
        """Count a block that goes to the kernel."""
        self._with_kernel_bytes[operation] += size_bytes
        if operation is self._direction:
            self._burst_left_bytes = max(self._burst_left_bytes - size_bytes, 0)

    def over(self, operation: Operation, size_bytes: int) -> None:
        """Count a block that is over."""
        self._with_kernel_bytes[operation] -= size_bytes

    def _fits(self, operation: Operation, size_bytes: int) -> bool:
        used_bytes = self._with_kernel_bytes[operation]
        window_bytes = self._schedule.window_bytes(operation)
        return size_bytes > 0 and (used_bytes == 0 or used_bytes + size_bytes <= window_bytes)

    def _choose_alternating(self, waiting: dict[Operation, int]) -> Operation | None:
        present = self._direction
        other = Operation.WRITE if present is Operation.READ else Operation.READ
        if waiting[other] and (not self._burst_left_bytes or not waiting[present]):
            if self._with_kernel_bytes[present]:
                return None
            self._direction = present = other
            self._burst_left_bytes = self._schedule.burst_bytes or 0
        return present if self._fits(present, waiting[present]) else None
