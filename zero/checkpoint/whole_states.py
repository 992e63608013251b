"""Load what optimizers of whole tensors keep: each owner saves its own, and new owners read it.

The state is in the run state of the rank that owned it, tensors among that rank's small ones, each
as torch made it. So it fits any number of ranks, and a rank reads what it owns now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zero.checkpoint.manifest import STATE, Manifest, PieceEntry, RankEntry
from zero.errors import CheckpointError
from zero.plain import from_plain
from zero.whole import WholeOptimizer

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

ReadPiece = Callable[[PieceEntry], torch.Tensor]


class WholeStates:
    """The saved states of whole tensors that an engine goes on with."""

    def __init__(self, engine: ZeroEngine, manifest: Manifest, names: Mapping[str, str]) -> None:
        """Find them; nothing is read.

        Raises:
            CheckpointError: if one is missing.
        """
        self._whole = engine.optimizer.fused if engine.optimizer is not None else None
        self._found: dict[int, tuple[RankEntry, Any]] = {}
        if not isinstance(self._whole, WholeOptimizer):
            return
        saved = {
            name: (rank, state)
            for rank in manifest.ranks
            for name, state, _ in rank.run.get("whole", [])
        }
        steps = {each.name: each.steps for each in manifest.tensors}
        for segment in engine._runtime.segments:
            for member in segment.members:
                name = names.get(member.name, "")
                if name in saved:
                    self._found[id(member.parameter)] = saved[name]
                elif segment.spec.trainable and steps.get(name) and member.parameter.numel():
                    raise CheckpointError(
                        f"the checkpoint has no state of {self._whole.name} for {name}, which has"
                        f" had {steps[name]} updates; take another checkpoint, or load the weights"
                        " alone with load_optimizer_states=False"
                    )

    def adopt(self, read: ReadPiece) -> None:
        """Let this rank go on with what it owns, and with nothing else."""
        if isinstance(self._whole, WholeOptimizer):
            self._whole.forget()
            for key, (rank, state) in self._found.items():
                if self._whole.owns(key):
                    self._whole.keep(key, from_plain(state, _Tensors(rank, read)))
            self._whole.records.settle()


class _Tensors(Mapping[str, torch.Tensor]):
    """The small tensors of a rank, each read when it is asked for."""

    def __init__(self, rank: RankEntry, read: ReadPiece) -> None:
        self._pieces = {each.name: each for each in rank.file.pieces if each.section == STATE}
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(self._pieces[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
