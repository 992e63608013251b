"""Checkpoints of torch.distributed.checkpoint: export to plain torch, and import from it."""

from __future__ import annotations

import functools
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zero.checkpoint.directory import sync_folder
from zero.checkpoint.folders import make_folder
from zero.checkpoint.inspection import locate
from zero.checkpoint.save import agree
from zero.errors import CheckpointError

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

_PENDING = ".dcp-pending-"


def export_dcp(checkpoint: str | Path, folder: str | Path, tag: str | None = None) -> Path:
    """Write a checkpoint as a folder that `torch.distributed.checkpoint` reads, and return it.

    It has the fp32 masters, buffers, the optimizer's state and groups, and counters, for any number
    of ranks. Memory is a few chunks of 32 MiB. The folder appears when it is whole.

    Args:
        checkpoint: a folder of checkpoints, or one of them.
        folder: where it goes; nothing may be there.
        tag: which checkpoint; by default `latest`.

    Raises:
        CheckpointError: if the checkpoint is damaged, or something is there already.
        OSError: if there is no room.
    """
    from zero.checkpoint.dcp_export import CheckpointSections, write_dcp

    target = _path_of(folder, "export_dcp: the folder to write")
    checkpoint = _path_of(checkpoint, "export_dcp: the checkpoint")
    _require_free(target)
    with CheckpointSections(locate(checkpoint, tag)) as source:
        pending = _make_pending(target, secrets.token_hex(8))
        try:
            write_dcp(source, pending)
            _commit(pending, target)
        except BaseException:
            shutil.rmtree(pending, ignore_errors=True)
            raise
    return target


def export_engine_dcp(engine: ZeroEngine, folder: str | Path) -> Path:
    """Write the state that an engine has now as a DCP folder; a collective, each rank a part.

    The state is saved as a checkpoint beside the folder first, which is removed at the end: there
    has to be room for both.

    Raises:
        CheckpointError: if something is there already, or another rank failed.
        OSError: if there is no room.
    """
    from zero.checkpoint.dcp_export import CheckpointSections, write_dcp

    target = _path_of(folder, "export_engine_dcp: the folder to write")
    communicator = engine._runtime.communicator
    communicator.join(f"exporting to {target}")
    problem: Exception | None = None
    nonce = torch.tensor([secrets.randbits(62)], device="cpu")
    communicator.broadcast(nonce, 0)
    pending = target.with_name(f"{_PENDING}{int(nonce):016x}")
    try:
        _require_free(target)
        if communicator.rank == 0:
            _make_pending(target, f"{int(nonce):016x}")
    except (CheckpointError, OSError) as error:
        problem = error
    agree(communicator, problem, "export it")
    saved = pending / "saved"
    try:
        engine.save_checkpoint(saved, save_latest=True)
        with CheckpointSections(locate(saved)) as source:
            write_dcp(source, pending / "dcp", communicator.rank, communicator.world_size)
        communicator.barrier()
        if communicator.rank == 0:
            _commit(pending / "dcp", target)
        communicator.barrier()
    finally:
        if communicator.rank == 0:
            shutil.rmtree(pending, ignore_errors=True)
    return target


def load_dcp(
    engine: ZeroEngine,
    folder: str | Path,
    *,
    strict: bool = True,
    optimizer_states: bool = True,
) -> None:
    """Load what `torch.distributed.checkpoint` saved of a model and its optimizer; a collective.

    From any number of ranks, of FSDP2, DTensor or plain tensors, or of `export_dcp`, onto any
    number of ranks and any tiers. Weights become the fp32 masters with all of their bits. What
    differs is told in a `ResumeWarning` and stays in `engine.resume_report`.

    Args:
        engine: what it is loaded into.
        folder: the DCP folder.
        strict: refuse parameters and buffers that are missing, or that the model lacks.
        optimizer_states: take over moments, steps and hyper-parameters as well.

    Raises:
        CheckpointError: if it is damaged, unsafe or of another model; nothing has changed unless
            the message says so.
        RankError: naming ranks that did not join.
    """
    from zero.checkpoint.dcp_import import DcpLoading
    from zero.checkpoint.peers import load_peer
    from zero.checkpoint.surface import come_to_rest, wait_for_checkpoint

    path = _path_of(folder, "load_dcp: the folder")
    communicator = engine._runtime.communicator
    wait_for_checkpoint(engine)
    engine._runtime.store.suspended = None
    come_to_rest(engine)
    communicator.join(f"loading {path}")
    opening = functools.partial(DcpLoading, engine, path, strict=strict, states=optimizer_states)
    load_peer(engine, path, opening, stacklevel=3)


def _path_of(given: object, what: str) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise CheckpointError(
            f'{what} is {given!r}, a {type(given).__name__}; give a path, such as "runs/of-fsdp"'
        )
    return Path(given)


def _require_free(target: Path) -> None:
    if target.is_symlink() or target.exists():
        if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
            return
        raise CheckpointError(f"{target} is there already; name a folder that is not")


def _make_pending(target: Path, nonce: str) -> Path:
    pending = target.with_name(f"{_PENDING}{nonce}")
    make_folder(target.parent)
    pending.mkdir()
    return pending


def _commit(pending: Path, target: Path) -> None:
    """Put a folder that is whole in its place."""
    sync_folder(pending)
    pending.rename(target)  # an empty folder that is there gives way
    sync_folder(target.parent)
