"""Save a checkpoint: every rank its own file, then one manifest, then one rename.

[Note: saving ranks] The ranks meet once, before anything is written: they agree on the tag, and
each reserves the space of its file. From then on they need no collective, so a save may run beside
training. A rank that is done leaves its part of the manifest in the temporary folder, or a note
that it failed; the first rank waits for all parts, joins them and commits. The others see the
folder in its place, or why it will not come.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aio_ops import Engine, open_engine
from zero.checkpoint.directory import (
    PendingFolder,
    check_tag,
    prune,
    show_text,
    write_synced,
)
from zero.checkpoint.frozen_file import SameFile, find_same, rests_in_memory
from zero.checkpoint.layout import plan_file, plan_frozen_file
from zero.checkpoint.manifest import (
    CLIENT,
    DTYPE_CODES,
    MANIFEST_NAME,
    STATE,
    Manifest,
    RankEntry,
    TensorEntry,
    manifest_text,
    parse_rank,
    rank_data,
)
from zero.checkpoint.rank_file import BLOCK_COUNT, RankFile, RankFiles
from zero.checkpoint.script import write_script
from zero.errors import CheckpointError
from zero.parameter import reference_of
from zero.plain import to_plain
from zero.run_state import RunState, capture

if TYPE_CHECKING:
    from offload import Store
    from zero.comm import Communicator
    from zero.engine import ZeroEngine

STALL_S = 600.0
"""How long a rank waits for the others while none of their files changes."""
_POLL_S = 0.02
_MOST_HELPERS = 3
"""Each takes the interpreter lock some thousand times a gigabyte: more would wait for it instead of
working."""

_BEST_ENGINES: dict[int, str] = {}
"""What trying all engines on a file system has found; it takes longer than a small save."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What the user asked for."""

    folder: Path
    tag: str
    client_state: Any
    save_latest: bool = True
    exclude_frozen: bool = False
    keep_last: int | None = None
    as_stored: bool = False


class Save:
    """One checkpoint that is being written by this rank."""

    def __init__(self, engine: ZeroEngine, request: SaveRequest, *, blocking: bool) -> None:
        """Agree with the other ranks and reserve the space; nothing is written yet.

        Raises:
            CheckpointError: if it cannot be saved; nothing is left behind.
            NotPlainError: naming what cannot be written without pickle.
            RankError: naming ranks that did not join.
        """
        check_tag(request.tag)
        self.request = request
        self._communicator = engine._runtime.communicator
        self._communicator.join(f"saving checkpoint {request.tag} in {request.folder}")
        self._states = tuple(engine._runtime.states)
        self._tensors = describe_tensors(engine, exclude_frozen=request.exclude_frozen)
        self._configuration = engine.configuration
        client: dict[str, torch.Tensor] = {}
        problem: Exception | None = None
        try:
            self._state: RunState = capture(engine)
            self._client = to_plain(request.client_state, "client_state", client)
            frozen = None if request.exclude_frozen else plan_frozen_file(engine._runtime)
            self._frozen_plan = frozen
            self._plan = plan_file(
                engine._runtime,
                {STATE: {**self._state.tensors, **self._state.late}, CLIENT: client},
                _waiting(engine),
                exclude_frozen=request.exclude_frozen or frozen is not None,
                as_stored=request.as_stored,
            )
            self._same = self._find_same(engine._runtime.store, blocking=blocking)
        except Exception as error:  # noqa: BLE001  told to the other ranks, then raised
            problem = error
        agree(self._communicator, problem, "prepare it")
        nonce = torch.tensor([PendingFolder.new_nonce()], device="cpu")
        self._communicator.broadcast(nonce, 0)
        self._pending = PendingFolder(request.folder, request.tag, f"{int(nonce):016x}")
        self._make_folder()
        self.io = open_disk_engine(self._pending.path)
        self.file = self._reserve()

    def finish(self) -> Path:
        """Write the rest of the file, and wait until the checkpoint is in its place.

        Raises:
            OSError: if a write failed.
            CheckpointError: if another rank failed.
        """
        try:
            entry, frozen = self.file.finish()
            own = RankEntry(entry, self._state.data, self._client, frozen)
            text = json.dumps(rank_data(own))
            if self._communicator.rank == 0:
                return self._commit(text)
            self._leave(self._part(self._communicator.rank), text)
            return self._wait_for_commit()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.close()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, and leave nothing."""
        rank = self._communicator.rank
        if self._communicator.world_size > 1 and self._pending.path.is_dir():
            try:
                self._leave(f"failed{rank:05}", f"rank {rank}: {type(error).__name__}: {error}")
            except OSError:
                return
        if self._communicator.world_size == 1:
            self._pending.abandon()
        self._pending.release()

    def close(self) -> None:
        """Give memory, file and engine up."""
        self.file.close()
        self.io.close()

    def _make_folder(self) -> None:
        problem: Exception | None = None
        if self._communicator.rank == 0:
            try:
                self._pending.make()
            except (OSError, CheckpointError) as error:
                problem = error
        agree(self._communicator, problem, "make its folder")

    def _find_same(self, store: Store, *, blocking: bool) -> SameFile | None:
        """Return an earlier file of the frozen shards, unless looking would hold training up."""
        plan, communicator = self._frozen_plan, self._communicator
        if plan is None or not (blocking or rests_in_memory(store, plan)):
            return None
        ranks = (communicator.rank, communicator.world_size)
        return find_same(store, self.request.folder, plan, ranks, helper_count(communicator))

    def _create_files(self) -> RankFiles:
        """Make this rank's files, and reserve their space.

        Raises:
            OSError: if there is no room; then none is open.
        """
        rank, helpers = self._communicator.rank, helper_count(self._communicator)
        path = self._pending.path
        linked = self._same.link(path / frozen_name(rank)) if self._same is not None else None
        if self._frozen_plan is None or linked is not None:
            main = RankFile(path / file_name(rank), self._plan, self.io, helpers)
            return RankFiles(main, None, linked)
        half = BLOCK_COUNT // 2  # so that both have the memory of one
        main = RankFile(path / file_name(rank), self._plan, self.io, helpers, half)
        try:
            frozen = RankFile(path / frozen_name(rank), self._frozen_plan, self.io, helpers, half)
        except BaseException:
            main.close()
            raise
        return RankFiles(main, frozen, None)

    def _reserve(self) -> RankFiles:
        problem: Exception | None = None
        file: RankFiles | None = None
        try:
            file = self._create_files()
        except OSError as error:
            needed = self._plan.size_bytes
            if self._frozen_plan is not None and self._same is None:
                needed += self._frozen_plan.size_bytes
            problem = CheckpointError(
                f"checkpoint {self.request.tag} needs {needed:,} bytes for this"
                f" rank: {error.strerror or error}; nothing was written"
            )
        try:
            agree(self._communicator, problem, "reserve its space")
        except BaseException:
            if file is not None:
                file.close()
            self.io.close()
            self._communicator.barrier()
            if self._communicator.rank == 0:
                self._pending.abandon()
            raise
        if file is None:
            raise RuntimeError("a rank without a file agreed to go on")
        return file

    def _part(self, rank: int) -> str:
        return f"part{rank:05}.json"

    def _leave(self, name: str, text: str) -> None:
        show_text(self._pending.path / name, text)

    def _commit(self, own: str) -> Path:
        world_size, path = self._communicator.world_size, self._pending.path
        wanted = [path / self._part(rank) for rank in range(1, world_size)]
        self._wait(lambda: all(each.is_file() for each in wanted), "their parts")
        texts = [own, *(each.read_text(encoding="utf-8") for each in wanted)]
        manifest = Manifest(
            self._tensors,
            tuple(parse_rank(json.loads(each)) for each in texts),
            self._configuration,
            self.request.tag,
            self._states,
        )
        write_synced(path / MANIFEST_NAME, manifest_text(manifest).encode())
        for each in wanted:
            each.unlink()
        final = self._pending.commit(save_latest=self.request.save_latest)
        write_script(self.request.folder)
        if self.request.keep_last is not None:
            prune(self.request.folder, self.request.keep_last)
        return final

    def _wait_for_commit(self) -> Path:
        self._wait(lambda: not self._pending.path.exists(), "the first rank to commit")
        return self.request.folder / self.request.tag

    def _wait(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait as long as something moves.

        Raises:
            CheckpointError: if another rank failed, or nothing moves.
        """
        path = self._pending.path
        signature, since = _signature(path), time.monotonic()
        while not is_over():
            found = _signature(path)  # nothing, if the folder was put in its place just now
            failed = [path / name for name, _ in found if name.startswith("failed")]
            if failed:
                raise CheckpointError(
                    f"checkpoint {self.request.tag} was not saved: "
                    + "; ".join(each.read_text(errors="replace") for each in failed)
                )
            if found != signature:
                signature, since = found, time.monotonic()
            if time.monotonic() - since > STALL_S:
                raise CheckpointError(
                    f"checkpoint {self.request.tag} was not saved: rank {self._communicator.rank}"
                    f" waited for {what}, and nothing has moved for {STALL_S:g} s; the ranks need"
                    " one file system that all of them see"
                )
            time.sleep(_POLL_S)


def open_disk_engine(directory: Path) -> Engine:
    """Open the best engine for a folder; where nothing can be written, one of threads."""
    device = directory.stat().st_dev
    if device not in _BEST_ENGINES:
        try:
            engine = open_engine("auto", directory=directory)
        except OSError:
            return open_engine("auto")  # without a folder to try
        _BEST_ENGINES[device] = engine.name
        return engine
    return open_engine(_BEST_ENGINES[device])


def helper_count(communicator: Communicator) -> int:
    """Return how many threads encode and compare: a rank's share of the cores, up to what helps.

    They hardly compute, so OMP_NUM_THREADS, which launchers set to 1, does not count.
    """
    cores = len(os.sched_getaffinity(0)) // max(communicator.local_world_size, 1)
    return max(min(cores, _MOST_HELPERS), 1)


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank{rank:05}.safetensors"


def frozen_name(rank: int) -> str:
    """Return the name of a rank's file of frozen shards."""
    return f"rank{rank:05}.frozen.safetensors"


def describe_tensors(engine: ZeroEngine, *, exclude_frozen: bool) -> tuple[TensorEntry, ...]:
    """Return every sharded parameter of a model, by its first name."""
    names: dict[int, list[str]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if reference_of(parameter) is not None:
            names.setdefault(id(parameter), []).append(name)
    history = engine._history
    found = []
    for segment in engine._runtime.segments:
        if exclude_frozen and not segment.spec.trainable:
            continue
        for member in segment.members:
            waiting = history.dormant.get(id(member.parameter))
            steps = history.steps_of(member.parameter) if segment.spec.trainable else None
            if waiting is not None and not segment.spec.trainable:
                steps = waiting.steps
            found.append(
                TensorEntry(
                    member.name,
                    tuple(member.parameter.shape),
                    DTYPE_CODES[member.parameter.dtype],
                    segment.spec.trainable,
                    steps,
                    tuple(each for each in names[id(member.parameter)] if each != member.name),
                    segment.spec.unit,
                )
            )
    return tuple(found)


def _waiting(engine: ZeroEngine) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    return {names[key]: moments for key, moments in engine._history.dormant.items()}


def agree(communicator: Communicator, problem: Exception | None, what: str) -> None:
    """Raise this rank's problem, or say which other ranks have one; a collective."""
    flags = communicator.gather_rows(
        torch.tensor([int(problem is not None)], device="cpu")
    ).reshape(-1)
    if problem is not None:
        raise problem
    failed = [rank for rank, flag in enumerate(flags.tolist()) if flag]
    if failed:
        raise CheckpointError(
            f"the checkpoint was not saved: ranks {failed} could not {what}; they say why"
        )


def _signature(path: Path) -> tuple[tuple[str, int], ...]:
    try:
        return tuple(sorted((each.name, each.stat().st_mtime_ns) for each in path.iterdir()))
    except FileNotFoundError:
        return ()
