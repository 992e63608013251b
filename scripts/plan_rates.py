"""Rates of the machine for `plan_check.py`: the best that it shows, time and again.

A least time follows from the highest rates. A shared disk drifts by a fifth in minutes, so rates
are sampled in the process that trains, before, between and after its steps, with the engine that
pages, in blocks like the pager's: reads, writes, and both at once, as an update moves them. The
best of each counts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from aio_ops import HostArena, Ticket, open_engine
from estimators import DriveRates
from estimators.hardware import Bandwidths, bandwidths_of

TRANSFER_BYTES = 4 << 20
IN_FLIGHT = 16
REPEATS = 4
MATRIX = {"cpu": (1024,), "cuda": (4096, 8192)}
OTHER_SHAPES = 1.1
"""Matrix products of other shapes may be faster than the probe's."""
THREADS = 4.0
"""One thread copies host memory; updates have several."""


class DriveProbe:
    """A file of its own beside the swap file, read and written for a tenth of a second a sample."""

    def __init__(self, directory: Path, file_bytes: int) -> None:
        self._io = open_engine("auto", directory=directory)
        self._file = self._io.create_file(directory, file_bytes)
        self._arena = HostArena(2 * IN_FLIGHT * TRANSFER_BYTES)
        carved = [self._arena.carve(TRANSFER_BYTES) for _ in range(2 * IN_FLIGHT)]
        self._reads, self._writes = carved[:IN_FLIGHT], carved[IN_FLIGHT:]
        for span in carved:
            span.view()[:] = os.urandom(4096) * (TRANSFER_BYTES // 4096)
        self._offsets = range(0, file_bytes, TRANSFER_BYTES)
        self._rate(self._transfers("write"))  # the file's blocks are there from now on

    def sample(self) -> tuple[float, float, float]:
        """Return bytes a second: read, written, and both at once."""
        read = self._rate(self._transfers("read"))
        written = self._rate(self._transfers("write"))
        return read, written, self._rate(self._mixed())

    def close(self) -> None:
        """Give file and memory back."""
        self._io.drain()
        self._file.close()
        self._arena.close()
        self._io.close()

    def _transfers(self, kind: str) -> Iterator[Callable[[], Ticket]]:
        spans = self._reads if kind == "read" else self._writes
        submit = self._io.submit_read if kind == "read" else self._io.submit_write
        for index, offset in enumerate(self._offsets):
            yield _bound(submit, self._file, offset, spans[index % IN_FLIGHT])

    def _mixed(self) -> Iterator[Callable[[], Ticket]]:
        """Read one half of the file while the other is written, a transfer of each in turn."""
        half = len(self._offsets) // 2
        for index in range(half):
            there, here = self._offsets[index], self._offsets[half + index]
            yield _bound(self._io.submit_read, self._file, there, self._reads[index % IN_FLIGHT])
            yield _bound(self._io.submit_write, self._file, here, self._writes[index % IN_FLIGHT])

    def _rate(self, transfers: Iterator[Callable[[], Ticket]]) -> float:
        under_way: collections.deque[Ticket] = collections.deque()
        count = 0
        begun = time.perf_counter()
        for start in transfers:
            if len(under_way) == IN_FLIGHT:
                under_way.popleft().wait()
            under_way.append(start())
            count += 1
        while under_way:
            under_way.popleft().wait()
        return count * TRANSFER_BYTES / (time.perf_counter() - begun)


def _bound(submit: Callable[..., Ticket], *arguments: object) -> Callable[[], Ticket]:
    return lambda: submit(*arguments)


class MachineRates:
    """The best rates that this machine has shown so far."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._best: dict[str, float] = {}
        self._block = torch.empty(32 << 20, dtype=torch.uint8)
        if device != "cpu":
            self._block = self._block.pin_memory()

    def sample(self, drive: DriveProbe | None) -> None:
        """Look again."""
        for size in MATRIX[self._device]:
            left = torch.randn(size, size, dtype=self._dtype, device=self._device)
            self._note("flops", 2.0 * size**3, functools.partial(torch.matmul, left, left))
        other = torch.empty_like(self._block, device="cpu")
        size_bytes = self._block.numel()
        self._note("host", 2.0 * size_bytes, lambda: other.copy_(self._block))
        if self._device != "cpu":
            there = self._block.to(self._device)
            again = torch.empty_like(there)
            self._note("link", size_bytes, lambda: there.copy_(self._block, non_blocking=True))
            self._note("link", size_bytes, lambda: self._block.copy_(there, non_blocking=True))
            self._note("device", 2.0 * size_bytes, lambda: again.copy_(there))
        if drive is not None:
            for name, rate in zip(("read", "write", "mix"), drive.sample(), strict=True):
                self._best[name] = max(rate, self._best.get(name, 0.0))

    def _note(self, name: str, amount: float, work: Callable[[], object]) -> None:
        for _ in range(REPEATS):
            begun = time.perf_counter()
            work()
            if self._device != "cpu":
                torch.cuda.synchronize()
            rate = amount / (time.perf_counter() - begun)
            self._best[name] = max(rate, self._best.get(name, 0.0))

    def bandwidths(self) -> Bandwidths:
        """Return the best of everything, in the form that a plan takes."""
        best, assumed = self._best, bandwidths_of(None)
        found = dataclasses.replace(
            assumed,
            flops=OTHER_SHAPES * best["flops"],
            host_bytes_per_s=THREADS * best["host"],
            link_bytes_per_s=best.get("link", assumed.link_bytes_per_s),
            device_bytes_per_s=max(best.get("device", 0.0), best["host"]),
        )
        if "read" not in best:
            return found
        drive = DriveRates(best["read"], best["write"], "measured")
        return dataclasses.replace(found, drive=drive, mixed_bytes_per_s=best["mix"])
