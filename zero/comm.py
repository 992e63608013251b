"""Collectives over the ranks that share a model; world size 1 has none and needs no launcher.

[Note: two groups] What ranks tell each other (norms, texts, what is wanted) lies in host memory
and goes over gloo; parameters and gradients go over NCCL where they lie on GPUs. A collective of
NCCL is work of the device, in the order of what is issued: the host waits for none, and none can
tell that a rank is missing. So the ranks meet on the host before each, see [Note: rendezvous].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zero.errors import ConfigError
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

    Where torch finds GPUs, the group is of gloo and NCCL, and the one that LOCAL_RANK names becomes
    torch's current device.

    Args:
        backend: what `torch.distributed.init_process_group` is given instead.

    Returns:
        True if this call made the process group, so that its maker can destroy it.
    """
    if not dist.is_available() or dist.is_initialized():
        return False
    if any(name not in os.environ for name in _LAUNCHER_VARIABLES):
        return False
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    chosen = backend or ("cpu:gloo,cuda:nccl" if has_gpus else "gloo")
    if has_gpus and "nccl" in chosen:
        torch.cuda.set_device(local_gpu())
    dist.init_process_group(chosen)
    return True


def local_gpu() -> int:
    """Return the index of this rank's GPU: LOCAL_RANK's, if it sees several, else torch's own."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    if not local_rank.isdigit() or torch.cuda.device_count() == 1:
        return torch.cuda.current_device()
    index = int(local_rank)
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"LOCAL_RANK is {index}, but torch finds {torch.cuda.device_count()} CUDA devices;"
            ' start as many ranks a node as it has devices, or set tiers.device to "cpu"'
        )
    return index


def _backend_for(kind: str) -> str:
    """Return which backend of the default process group moves tensors of a kind of device."""
    pairs = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(",") if ":" in pair)
    return pairs.get(kind, "")


class Communicator:
    """The ranks that share one model; every method is a collective, and free for one rank."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self._made_groups: list[dist.ProcessGroup] = []
        self._host_group = self._group_of("gloo", "cpu") if joined else None
        self._device_group: dist.ProcessGroup | None = None
        """For tensors on GPUs, once `use_gpu` was called; None is the default group."""
        self._exchanged = 0
        """Collectives so far. NCCL knows them by their order alone, so ranks compare it."""
        self.rank = dist.get_rank() if joined else 0
        self.world_size = dist.get_world_size() if joined else 1
        self.before_meeting: Callable[[], Callable[[], None] | None] = lambda: None
        """Gives what must be done before the ranks meet, if anything, see [Note: turns]."""
        self.rendezvous = Rendezvous(self.rank, self.world_size)
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        self.local_world_size = int(local) if joined and local.isdigit() else self.world_size

    def _group_of(self, backend: str, kind: str) -> dist.ProcessGroup | None:
        """Return a group that moves tensors of a kind: the default one, or a new one."""
        if _backend_for(kind) == backend:
            return None
        group: dist.ProcessGroup = dist.new_group(backend=backend)
        self._made_groups.append(group)
        return group

    def use_gpu(self) -> None:
        """Make ready to move what lies on GPUs; a collective.

        Raises:
            ConfigError: if this torch cannot.
        """
        if self.world_size == 1 or self._device_group is not None:
            return
        if not dist.is_nccl_available():
            raise ConfigError(
                f"{self.world_size} ranks on GPUs need NCCL, which torch {torch.__version__} was"
                ' built without; start one rank, or set tiers.device to "cpu"'
            )
        self._device_group = self._group_of("nccl", "cuda")

    @contextmanager
    def _mixing(self, tensor: torch.Tensor) -> Iterator[dist.ProcessGroup | None]:
        """Give the group that moves a tensor; the others can ask meanwhile what this rank does."""
        self._exchanged += 1
        with self.rendezvous.mixing():
            yield self._device_group if tensor.is_cuda else self._host_group

    def all_gather_in_place(self, flat: torch.Tensor) -> None:
        """Fill `flat`, shape `[world_size * n]`, from the slice that each rank already holds.

        [Note: gathers of gloo] Its all-gather copies everything into a buffer that one of its
        threads allocates, and the heaps of threads keep what was freed: three times `flat` were
        seen. A broadcast moves each slice in place, so large gathers are one from each rank.
        """
        if self.world_size == 1 or not flat.numel():
            return
        with self._mixing(flat) as group:
            if flat.is_cuda or flat.nbytes < LARGE_GATHER_BYTES:
                _all_gather(flat, self.own_slice(flat), group=group)
                return
            works = [
                dist.broadcast(part, rank, group=group, async_op=True)
                for rank, part in enumerate(flat.chunk(self.world_size))
            ]
            for work in works:
                if work is not None:
                    work.wait()

    def reduce_scatter_in_place(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the sum of `flat` over the ranks; `flat` is overwritten.

        [Note: order of sums] More than two summands have more than one sum. That of gloo or NCCL
        depends on where an element lies in `flat`, and with it on the parameters around it. So each
        rank receives its slice from all others and adds in rank order, which takes as much memory
        and moves no more bytes.
        """
        own = self.own_slice(flat)
        if self.world_size == 1 or not flat.numel():
            return own
        with self._mixing(flat) as group:
            if self.world_size == 2:
                _reduce_scatter(own, flat, group=group)
                return own
            received = torch.empty_like(flat)
            dist.all_to_all_single(received, flat, group=group)
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
        rows = torch.empty(self.world_size, row.numel(), dtype=row.dtype, device="cpu")
        rows[self.rank] = row
        self.all_gather_in_place(rows.view(-1))
        return rows

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, which may differ in length."""
        raw = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
        lengths = self.gather_rows(torch.tensor([raw.numel()], device="cpu")).reshape(-1).tolist()
        row = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        row[: raw.numel()] = raw
        rows = self.gather_rows(row)
        return [
            bytes(each[: length - 1].tolist()).decode()
            for each, length in zip(rows, lengths, strict=True)
        ]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor`, contiguous, with the values of rank `source`."""
        if self.world_size > 1 and tensor.numel():
            with self._mixing(tensor) as group:
                dist.broadcast(tensor, source, group=group)

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
        """Come to no further meeting of the ranks, and give up the groups that were made."""
        self.rendezvous.close()
        while self._made_groups and dist.is_initialized():
            dist.destroy_process_group(self._made_groups.pop())

    def union(self, place: int, wanted: Sequence[bool], what: str) -> list[bool]:
        """Return what any rank wants; all ranks must be at the same place.

        Raises:
            RankError: if another rank is elsewhere.
        """
        if self.world_size == 1:
            return list(wanted)
        self._prepare()
        rows = self.gather_rows(torch.tensor([place, self._exchanged, *wanted], device="cpu"))
        places = rows[:, :2].tolist()
        if any(other != places[0] for other in places):
            numbers = ", ".join(f"rank {rank}: {at}" for rank, (at, _) in enumerate(places))
            counts = ", ".join(f"rank {rank}: {done}" for rank, (_, done) in enumerate(places))
            raise RankError(
                f"rank {self.rank} is at {what}, but the ranks are at other numbers ({numbers}) or"
                f" have exchanged other things before ({counts}): all ranks must use the same parts"
                " of the model in the same order"
            )
        return [bool(any_rank) for any_rank in rows[:, 2:].any(0).tolist()]

    def raise_together(self, error: Exception | None, what: str) -> None:
        """Raise what failed on this rank, or a `RankError` if it failed on another one.

        Raises:
            RankError: naming the ranks.
        """
        rows = self.gather_rows(torch.tensor([error is not None], device="cpu")).reshape(-1)
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
            with self.rendezvous.mixing():
                dist.barrier(group=self._host_group)
