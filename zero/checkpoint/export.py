"""The full weights of a live engine in one file, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offload import Field
from zero.buffers import other_state
from zero.checkpoint.export_files import ExportEntry, write_file
from zero.checkpoint.folders import make_folder
from zero.checkpoint.save import agree, describe_tensors
from zero.errors import CheckpointError
from zero.parameter import reference_of

if TYPE_CHECKING:
    from zero.engine import ZeroEngine
    from zero.source import ShardSource


def save_16bit_model(engine: ZeroEngine, path: Path, *, exclude_frozen: bool) -> None:
    """Write the parameters as they train, each with its own bits; a collective.

    Raises:
        CheckpointError: if a rank failed.
        OSError: if the file cannot be written; nothing is left.
    """
    communicator = engine._runtime.communicator
    communicator.join(f"saving the model to {path}")
    tensors = describe_tensors(engine, exclude_frozen=exclude_frozen)
    parameters = dict(engine.module.named_parameters())
    others = {
        name: value.detach()
        for name, value in other_state(engine.module)
        if isinstance(value, torch.Tensor)
        and not (exclude_frozen and isinstance(value, torch.nn.Parameter))
    }
    sources = {each.name: _source(parameters[each.name]) for each in tensors}
    entries = [
        ExportEntry((each.name, *each.aliases), each.shape, parameters[each.name].dtype)
        for each in tensors
    ]
    entries += [
        ExportEntry((name,), tuple(each.shape), each.dtype) for name, each in others.items()
    ]
    gathered: list[str] = []

    def values(entry: ExportEntry) -> Iterator[torch.Tensor]:
        name = entry.names[0]
        if name in sources:
            gathered.append(name)
            yield sources[name].read(Field.PARAMETER).contiguous().reshape(-1)
        else:
            yield others[name].contiguous().reshape(-1)

    problem: Exception | None = None
    if communicator.rank == 0:
        try:
            make_folder(path.parent)
            write_file(path, entries, values)
        except (OSError, CheckpointError) as error:
            problem = error
    # In the order in which the first rank writes; what it did not come to is still gathered.
    for entry in entries:
        name = entry.names[0]
        if name in sources and name not in gathered:
            sources[name].read(Field.PARAMETER)
    agree(communicator, problem, "write the model")


def _source(parameter: torch.nn.Parameter) -> ShardSource:
    reference = reference_of(parameter)
    if reference is None:
        raise CheckpointError("a parameter of the model belongs to no engine any more")
    return reference.source
