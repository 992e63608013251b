"""A time line of transfers and waits, in the JSON that Perfetto and chrome://tracing read."""

from __future__ import annotations

import time

_TRAINING_THREAD = 1
_KERNEL_THREAD = 2
_MICROSECONDS = 1e6


class Trace:
    """Records events up to a limit; what comes after it is counted and left out."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a trace needs room for at least one event, got a limit of {limit}")
        self._limit = limit
        self._origin = time.perf_counter()
        self._events: list[dict[str, object]] = []
        self._left_out = 0
        self._next_id = 0
        self._open: dict[tuple[str, str], list[int]] = {}

    def add_span(self, name: str, begin: float, seconds: float, *, beside: bool = False) -> None:
        """Record what the training thread, or kernels beside it, did from `begin` on.

        `begin` is a time of `time.perf_counter`.
        """
        self._add(
            {
                "name": name,
                "ph": "X",
                "ts": (begin - self._origin) * _MICROSECONDS,
                "dur": seconds * _MICROSECONDS,
                "tid": _KERNEL_THREAD if beside else _TRAINING_THREAD,
            }
        )

    def begin_transfer(self, verb: str, record: str) -> None:
        """Record that a transfer was submitted."""
        self._next_id += 1
        self._open.setdefault((verb, record), []).append(self._next_id)
        self._add_transfer("b", verb, record, self._next_id)

    def end_transfer(self, verb: str, record: str) -> None:
        """Record that a transfer is known to be over; one that began before the trace is not."""
        identities = self._open.get((verb, record))
        if identities:
            self._add_transfer("e", verb, record, identities.pop(0))
            if not identities:
                del self._open[verb, record]

    def to_dict(self, process: str) -> dict[str, object]:
        """Return everything recorded, ready for `json.dump`."""
        names: list[dict[str, object]] = [
            {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": process}}
        ]
        for thread, name in (
            (_TRAINING_THREAD, "training thread"),
            (_KERNEL_THREAD, "kernels on the host"),
        ):
            arguments = {"name": name}
            names.append(
                {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": arguments}
            )
        return {
            "displayTimeUnit": "ms",
            "otherData": {"events left out": self._left_out},
            "traceEvents": [*names, *self._events],
        }

    def _add_transfer(self, phase: str, verb: str, record: str, identity: int) -> None:
        self._add(
            {
                "name": record,
                "cat": f"nvme {verb}",
                "ph": phase,
                "id": identity,
                "ts": (time.perf_counter() - self._origin) * _MICROSECONDS,
                "tid": _TRAINING_THREAD,
            }
        )

    def _add(self, event: dict[str, object]) -> None:
        if len(self._events) >= self._limit:
            self._left_out += 1
            return
        self._events.append({"pid": 0, **event})
