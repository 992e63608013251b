"""A loader of micro-batches that knows where it stands, so that a resumed run reads on there.

[Note: position] A pass over the data goes through one permutation, which follows from its seed and
its number alone, so the position is a pass and the samples that all ranks have taken of it. Another
number of ranks shares out what is left. A batch counts as taken when it is handed out, not when a
worker prepares it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from zero.comm import Communicator
from zero.errors import ConfigError
from zero.settings import Settings


class ResumableSampler(DistributedSampler[Any]):
    """This rank's part of each pass, in the order of torch's DistributedSampler."""

    def __init__(self, data: Dataset[Any], world_size: int, rank: int) -> None:
        super().__init__(data, num_replicas=world_size, rank=rank)
        self.taken = 0
        """Samples of the pass that all ranks together have taken."""
        self.is_fresh = True
        """Whether the pass that is next is the one at the position."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of a pass; naming the one that is under way changes nothing."""
        if epoch != self.epoch:
            self.epoch, self.taken = epoch, 0
        self.is_fresh = True

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator, device="cpu").tolist()  # type: ignore[arg-type]
        left = order[self.taken :]
        if left:
            missing = -len(left) % self.num_replicas
            left += (order * (missing // len(order) + 1))[:missing]
        return iter(left[self.rank :: self.num_replicas])

    def begin_pass(self) -> None:
        """Go on to the next pass, unless the one at the position has not begun or was resumed."""
        if not self.is_fresh:
            self.epoch, self.taken = self.epoch + 1, 0
        self.is_fresh = False

    def end_pass(self) -> None:
        """Go to the start of the next pass."""
        self.epoch, self.taken, self.is_fresh = self.epoch + 1, 0, True


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` with a position, see [Note: position]."""

    sampler: ResumableSampler

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self.sampler
        sampler.begin_pass()
        # Of its own: beginning a pass must not move the generator that the model draws from.
        self.generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
        step = (self.batch_size or 1) * sampler.num_replicas
        with torch.device("cpu"):  # that of the generator, from which torch draws a number here
            batches = super().__iter__()
        for batch in batches:
            sampler.taken = min(sampler.taken + step, len(sampler.dataset))  # type: ignore[arg-type]
            yield batch
        sampler.end_pass()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        sampler = self.sampler
        return {
            "epoch": sampler.epoch,
            "taken": sampler.taken,
            "is_fresh": sampler.is_fresh,
            "seed": sampler.seed,
            "samples": len(sampler.dataset),  # type: ignore[arg-type]
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a position; the next pass over this loader goes on there."""
        sampler = self.sampler
        sampler.seed = int(state_dict["seed"])
        sampler.epoch, sampler.taken = int(state_dict["epoch"]), int(state_dict["taken"])
        sampler.is_fresh = True


def make_loader(
    data: Dataset[Any],
    collate_fn: Callable[[list[Any]], Any] | None,
    settings: Settings,
    communicator: Communicator,
) -> ResumableLoader:
    """Return a loader of micro-batches; several ranks read disjoint parts."""
    if not isinstance(data, Sized):
        raise ConfigError(
            f"training_data is a {type(data).__name__} without a length; give a dataset with"
            " __len__ and __getitem__, or make a DataLoader of your own"
        )
    return ResumableLoader(
        data,
        batch_size=settings.batch.micro_batch_size,
        sampler=ResumableSampler(data, communicator.world_size, communicator.rank),
        collate_fn=collate_fn,
        drop_last=settings.drop_last_batch,
    )
