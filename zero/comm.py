"""Collectives over the ranks that share a model; world size 1 has none and needs no launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from zero.rendezvous import RankError, Rendezvous

__all__ = ["Communicator", "RankError", "init_distributed"]

# The names changed between torch 2.11 and 2.13; the old ones warn in the new release.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LARGE_GATHER_BYTES = 1 << 20
"""From here on a gather is made of broadcasts, see [Note: gathers of gloo]."""

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(backend: str | None = None) -> bool:
    """Join the process group that a launcher describes; without a launcher do nothing.

    Returns:
        True if this call made the process group, so that its maker can destroy it.
    """
    if not dist.is_available() or dist.is_initialized():
        return False
    if any(name not in os.environ for name in _LAUNCHER_VARIABLES):
        return False
    dist.init_process_group(backend or "gloo")  # all that is communicated lies on the CPU
    return True


def _cpu_group() -> dist.ProcessGroup | None:
    """Return a group that moves CPU tensors: the default one if it does, else one of gloo."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


class Communicator:
    """The ranks that share one model; every method is a collective, and free for one rank."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self._group = _cpu_group() if joined else None
        self.rank = dist.get_rank() if joined else 0
        self.world_size = dist.get_world_size() if joined else 1
        self.before_meeting: Callable[[], Callable[[], None] | None] = lambda: None
        """Gives what must be done before the ranks meet, if anything, see [Note: turns]."""
        self.rendezvous = Rendezvous(self.rank, self.world_size)
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        self.local_world_size = int(local) if joined and local.isdigit() else self.world_size

    def all_gather_in_place(self, flat: torch.Tensor) -> None:
        """Fill `flat`, shape `[world_size * n]`, from the slice that each rank already holds.

        [Note: gathers of gloo] Its all-gather copies everything into a buffer that one of its
        threads allocates, and the heaps of threads keep what was freed: three times `flat` were
        seen. A broadcast moves each slice in place, so large gathers are one from each rank.
        """
        if self.world_size == 1 or not flat.numel():
            return
        if flat.nbytes < LARGE_GATHER_BYTES:
            _all_gather(flat, self.own_slice(flat), group=self._group)
            return
        works = [
            dist.broadcast(part, rank, group=self._group, async_op=True)
            for rank, part in enumerate(flat.chunk(self.world_size))
        ]
        for work in works:
            if work is not None:
                work.wait()

    def reduce_scatter_in_place(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the sum of `flat` over the ranks; `flat` is overwritten.

        [Note: order of sums] More than two summands have more than one sum. gloo's depends on
        where an element lies in `flat`, and with it on the parameters around it. So each rank
        receives its slice from all others and adds in rank order, which takes as much memory
        and moves half the bytes.
        """
        own = self.own_slice(flat)
        if self.world_size == 1 or not flat.numel():
            return own
        if self.world_size == 2:
            _reduce_scatter(own, flat, group=self._group)
            return own
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=self._group)
        first, *others = received.chunk(self.world_size)
        own.copy_(first)
        for other in others:
            own.add_(other)
        return own

    def own_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of `flat` that this rank owns, shape `[numel / world_size]`."""
        numel = flat.numel() // self.world_size
        return flat[self.rank * numel : (self.rank + 1) * numel]

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, shape `[world_size, n]`."""
        rows = torch.empty(self.world_size, row.numel(), dtype=row.dtype)
        rows[self.rank] = row
        self.all_gather_in_place(rows.view(-1))
        return rows

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, which may differ in length."""
        raw = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
        lengths = self.gather_rows(torch.tensor([raw.numel()])).reshape(-1).tolist()
        row = torch.zeros(max(lengths), dtype=torch.uint8)
        row[: raw.numel()] = raw
        rows = self.gather_rows(row)
        return [
            bytes(each[: length - 1].tolist()).decode()
            for each, length in zip(rows, lengths, strict=True)
        ]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor`, contiguous, with the values of rank `source`."""
        if self.world_size > 1 and tensor.numel():
            dist.broadcast(tensor, source, group=self._group)

    def join(self, what: str) -> None:
        """Wait for all ranks to ask for the same thing, where a user's code may differ by rank.

        Raises:
            RankError: naming the ranks that do something else, or will not come.
        """
        if self.world_size > 1:
            self._prepare()
            self.rendezvous.meet(what)

    def agree(self, number: int, what: str, *, is_ready: bool = False) -> bool:
        """Check that all ranks are about to do the same thing, before they mix its bytes.

        Returns whether all of them are ready without it.

        Raises:
            RankError: naming the ranks that do something else, or will not come.
        """
        if self.world_size > 1:
            self._prepare()
            return self.rendezvous.meet(f"{what} (number {number})", is_ready=is_ready)
        return is_ready

    def close(self) -> None:
        """Come to no further meeting of the ranks."""
        self.rendezvous.close()

    def union(self, place: int, wanted: Sequence[bool], what: str) -> list[bool]:
        """Return what any rank wants; all ranks must be at the same place.

        Raises:
            RuntimeError: if another rank is elsewhere.
        """
        if self.world_size == 1:
            return list(wanted)
        self._prepare()
        rows = self.gather_rows(torch.tensor([place, *wanted]))
        places = rows[:, 0].tolist()
        if any(other != place for other in places):
            raise RuntimeError(
                f"rank {self.rank} is at {what} (number {place}), but the ranks are at numbers"
                f" {places}: all ranks must use the same parts of the model in the same order"
            )
        return [bool(any_rank) for any_rank in rows[:, 1:].any(0).tolist()]

    def raise_together(self, error: Exception | None, what: str) -> None:
        """Raise what failed on this rank, or a `RankError` if it failed on another one.

        Raises:
            RankError: naming the ranks.
        """
        rows = self.gather_rows(torch.tensor([error is not None])).reshape(-1)
        if error is not None:
            raise error
        failed = torch.nonzero(rows).reshape(-1).tolist()
        if failed:
            raise RankError(
                f"rank {self.rank}: {what} went well here, but failed on ranks {failed}, whose"
                " errors say why"
            )

    def _prepare(self) -> None:
        finish = self.before_meeting()
        if finish is not None:
            finish()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier(group=self._group)
