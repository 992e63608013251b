"""Loading what others wrote: DeepSpeed, or `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero.checkpoint.deepspeed import PeerLoading
from zero.checkpoint.save import agree
from zero.errors import CheckpointError, ResumeWarning, RunStateError

if TYPE_CHECKING:
    from zero.engine import ZeroEngine


def load_peer(
    engine: ZeroEngine, path: Path, open_files: Callable[[], PeerLoading], *, stacklevel: int
) -> Any:
    """Open a checkpoint on all ranks or on none, load it, and return its client state.

    Args:
        engine: what it is loaded into.
        path: where it is.
        open_files: opens it and checks all that can be known without reading weights.
        stacklevel: of the `ResumeWarning`, that names the caller's line.

    Raises:
        CheckpointError: if it is damaged or of another model on any rank; nothing has changed.
    """
    problem: Exception | None = None
    loading: PeerLoading | None = None
    try:
        loading = open_files()
    except (CheckpointError, RunStateError, OSError) as error:
        problem = error
    agree(engine._runtime.communicator, problem, "open the checkpoint")
    if loading is None:
        raise RuntimeError("no rank failed, and there is nothing to load")
    client, notes = loading.run()
    engine._runtime.store.heap.trim()
    engine.resume_report = tuple(notes)
    if notes and engine.global_rank == 0:
        text = "\n".join(f"- {note}" for note in notes)
        warnings.warn(
            f"{path} was loaded into a run that differs:\n{text}",
            ResumeWarning,
            stacklevel=stacklevel,
        )
    return client
