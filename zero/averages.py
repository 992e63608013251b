"""An exponential moving average of a model's weights, kept by the shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from offload import Field, Spool, SpooledArray
from zero.errors import ShardedAccessError
from zero.materialize import outside_inference_mode
from zero.parameter import reference_of
from zero.planning import open_spool_engine
from zero.settings import NvmeSettings
from zero.source import OwnedPiece, ShardSource, StoreSource, share_pieces

PIECE_NUMEL = 4 << 20
"""Elements that are in memory at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Average:
    """This rank's piece of the average of one parameter."""

    parameter: nn.Parameter
    values: SpooledArray
    shape: torch.Size
    pieces: Sequence[OwnedPiece]
    """How the ranks shared the parameter when the average was made."""


class ShardedAverage:
    """Averages the fp32 values of all trained parameters; each rank has its own pieces.

    No rank ever gathers anything to update it. The average rests in host memory, or in unnamed
    files of `directory`.
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.999, directory: str | Path | None = None
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be between 0 and 1, got {decay}")
        self.decay = decay
        nvme = NvmeSettings(Path(directory)) if directory is not None else None
        self._spool = Spool(lambda: open_spool_engine(nvme), nvme.path if nvme else None)
        self._averages: list[_Average] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if reference_of(parameter) is None:
                raise ShardedAccessError(
                    f"parameter {name} belongs to no engine; give the model to zero.initialize"
                )
            source, field = _source_of(parameter)
            with outside_inference_mode():
                values = self._spool.put(source.read_own(field).float().cpu())
            self._averages.append(_Average(parameter, values, source.shape, source.pieces()))

    def update(self) -> None:
        """Move the average towards the current values, `decay` of the old one stays."""
        for source, field, average in self._matched():
            values = source.read_own(field).float().cpu()
            for start in range(0, average.numel, PIECE_NUMEL):
                stop = min(start + PIECE_NUMEL, average.numel)
                old = average.read(start, stop)
                average.write(start, old * self.decay + values[start:stop] * (1 - self.decay))

    def full(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the whole average of one parameter, fp32; a collective."""
        for known in self._averages:
            if known.parameter is parameter:
                source, _ = _match(known)
                source.communicator.join(f"reading the average of {source.name}")
                full = torch.empty(source.shape, dtype=torch.float32, device=source.device)
                source.assemble(full, known.values.read())
                return full
        raise ShardedAccessError(
            f"there is no average of a parameter of shape {tuple(parameter.shape)}; it was frozen"
            " or is of another model"
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange values and averages for a `with` block, for example to evaluate."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for source, field, average in self._matched():
            values = source.read_own(field)
            source.write_own(field, average.read().to(values.dtype))
            average.write(0, values.float().cpu())
            source.after_write(field)
            share_pieces(source)

    def _matched(self) -> list[tuple[ShardSource, Field, SpooledArray]]:
        """Return where each parameter's values are, with its average: all of them, or an error."""
        return [(*_match(average), average.values) for average in self._averages]


def _match(average: _Average) -> tuple[ShardSource, Field]:
    """Return where the values of an average's parameter are.

    Raises:
        ShardedAccessError: if the ranks share it in another way than when the average was made.
    """
    source, field = _source_of(average.parameter)
    if source.shape != average.shape or source.pieces() != average.pieces:
        raise ShardedAccessError(
            f"parameter {source.name} has shape {tuple(source.shape)} now, in other pieces than its"
            f" average of shape {tuple(average.shape)}; the engine was planned anew: make a new"
            " average"
        )
    return source, field


def _source_of(parameter: nn.Parameter) -> tuple[ShardSource, Field]:
    reference = reference_of(parameter)
    if reference is None:
        raise ShardedAccessError("the engine of this model is gone, and its average with it")
    source = reference.source
    if isinstance(source, StoreSource) and source.live() is not None:
        raise ShardedAccessError(
            f"the average cannot be used while {source.name} is gathered; leave the"
            " zero.GatheredParameters block first"
        )
    return source, Field.MASTER if source.has(Field.MASTER) else Field.PARAMETER
