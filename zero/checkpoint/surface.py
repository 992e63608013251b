"""What an engine offers for checkpoints, in the field's call shapes."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from estimators import CODE_BLOCK_NUMEL, SubGroup
from offload import Field
from offload.groups import read_group
from offload.ranges import MOMENTS
from offload.state import decode_stored
from zero.buffers import check_buffers
from zero.carried import (
    Data,
    adopt_carried,
    arrange_carried,
    join_carried,
    moments_go_on,
    other_optimizer,
    saved_carried,
)
from zero.checkpoint.background import BackgroundSave, changing_fields
from zero.checkpoint.deepspeed import PeerLoading
from zero.checkpoint.deepspeed_files import find_peer
from zero.checkpoint.directory import LATEST, check_tag, find, finish_removals, read_latest
from zero.checkpoint.load import CheckpointFiles, PieceIndex, ShardLoader, verify_blocks
from zero.checkpoint.manifest import (
    BASE,
    CLIENT,
    DTYPES,
    STATE,
    Manifest,
    PieceEntry,
    RankEntry,
    TensorEntry,
    names_of,
    read_manifest,
)
from zero.checkpoint.peers import load_peer
from zero.checkpoint.save import Save, SaveRequest, agree, helper_count, open_disk_engine
from zero.checkpoint.whole_states import WholeStates
from zero.errors import CheckpointError, ResumeWarning, RunStateError
from zero.integrity import adopt_replaced
from zero.materialize import outside_inference_mode
from zero.optimizer import UpdateGroup, update_groups
from zero.parameter import reference_of
from zero.plain import from_plain
from zero.replan import keep_moments
from zero.run_state import RestoreParts, RunState, restore, window_survives
from zero.units import ManagedParameter
from zero.wording import some

if TYPE_CHECKING:
    from zero.engine import ZeroEngine


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What the user asked for."""

    folder: Path
    tag: str | None = None
    strict: bool = True
    states: bool = True
    scheduler: bool = True
    module_only: bool = False
    verify: bool | None = None
    """Whether all is read and compared before anything changes; None: if the engine has trained."""


def save_checkpoint(engine: ZeroEngine, request: SaveRequest, *, blocking: bool) -> None:
    """Save a checkpoint; a collective. Without `blocking` a thread goes on with it."""
    wait_for_checkpoint(engine)
    come_to_rest(engine)
    save = Save(engine, request, blocking=blocking)
    runtime = engine._runtime
    later: list[tuple[SubGroup, frozenset[Field]]] = []
    try:
        save.file.write_start()
        groups = runtime.store.plan.sub_groups
        for position, group in enumerate(groups):
            fields = save.file.fields(group)
            now = fields & changing_fields(runtime, group, blocking=blocking)
            if now:
                with read_group(runtime.store, group, now, groups[position + 1 :]) as reader:
                    save.file.write_group(group, reader.copy, now)
            if fields - now:
                later.append((group, fields - now))
        if runtime.store.pager is not None:
            runtime.store.pager.drain()
        engine.pending_save = None if blocking else BackgroundSave(runtime.store, save, later)
    except BaseException as error:
        save.fail(error)
        save.close()
        raise
    if blocking:
        problem: Exception | None = None
        try:
            save.finish()
        except (OSError, CheckpointError) as error:
            problem = error
        agree(runtime.communicator, problem, "finish it")


def wait_for_checkpoint(engine: ZeroEngine) -> Path | None:
    """Wait for a save that a thread goes on with; return its folder, or None if there is none.

    What it, or another, has replaced is gone as well.
    """
    pending, engine.pending_save = engine.pending_save, None
    try:
        return pending.wait() if pending is not None else None
    finally:
        finish_removals()


def load_checkpoint(engine: ZeroEngine, request: LoadRequest) -> tuple[Path, Any] | None:
    """Load a checkpoint; return its folder and the client state, or None if there is none."""
    communicator = engine._runtime.communicator
    wait_for_checkpoint(engine)
    engine._runtime.store.suspended = None
    come_to_rest(engine)
    communicator.join(f"loading checkpoint {request.tag or LATEST} of {request.folder}")
    problem: Exception | None = None
    peer = find_peer(request.folder, request.tag)
    if peer is not None:
        states = request.states and not request.module_only
        opening = functools.partial(PeerLoading, engine, peer, strict=request.strict, states=states)
        with outside_inference_mode():
            return peer, load_peer(engine, peer, opening, stacklevel=4)
    loading: _Loading | None = None
    try:
        loading = _Loading.open(engine, request)
    except (CheckpointError, RunStateError, OSError) as error:
        problem = error
    agree(communicator, problem, "open the checkpoint")
    if loading is None:
        return None
    with loading.files, outside_inference_mode():
        return loading.path, loading.run()


class _Loading:
    """One load, after everything that can be checked without reading data was checked."""

    def __init__(
        self, engine: ZeroEngine, request: LoadRequest, path: Path, manifest: Manifest
    ) -> None:
        self.path = path
        self.files = CheckpointFiles(path, manifest)
        self._engine = engine
        self._request = request
        self._manifest = manifest
        self._names = match_names(engine, manifest, strict=request.strict)
        self._moments_go_on = moments_go_on(engine.optimizer, manifest.states)
        ranks = manifest.ranks
        rank = engine.global_rank if engine.global_rank < len(ranks) else 0
        self._rank: RankEntry = ranks[rank]
        self._carried: Mapping[str, Data] = {}
        if request.states and not request.module_only:
            self._carried = self._saved_carried()
            self._whole_states = WholeStates(engine, manifest, self._names)
        RunState.from_json(json.dumps(self._rank.run), {})
        self._helpers = helper_count(engine._runtime.communicator)
        self._io = open_disk_engine(path)

    @classmethod
    def open(cls, engine: ZeroEngine, request: LoadRequest) -> _Loading | None:
        """Find and check a checkpoint; None if there is no `latest`."""
        tag = request.tag if request.tag is not None else read_latest(request.folder)
        if tag is None:
            warnings.warn(
                f"{request.folder} has no file {LATEST!r}, so there is nothing to resume from; give"
                " a tag, or the folder that checkpoints were saved into",
                ResumeWarning,
                stacklevel=4,
            )
            return None
        path = find(request.folder, check_tag(tag))
        return cls(engine, request, path, read_manifest(path))

    def run(self) -> Any:
        """Load, and return the client state."""
        engine, request = self._engine, self._request
        try:
            tensors = self._small_tensors()
            state = RunState(dict(self._rank.run), tensors[STATE])
            check_buffers(engine.module, state.value("buffers"), strict=request.strict)
            client = from_plain(self._rank.client, tensors[CLIENT])
            if request.verify or (request.verify is None and engine._history.updates):
                verify_blocks(self.files, self._io, self._helpers)
            notes = self._replace(state)
        finally:
            self._io.close()
        engine.resume_report = tuple(notes)
        if notes and engine.global_rank == 0:
            text = "\n".join(f"- {note}" for note in notes)
            warnings.warn(
                f"{self.path} was loaded into a run that differs:\n{text}",
                ResumeWarning,
                stacklevel=4,
            )
        return client

    def _replace(self, state: RunState) -> list[str]:
        """Replace the state of the engine."""
        engine, request = self._engine, self._request
        states = request.states and not request.module_only
        engine._restart_window()
        if states:
            self._adopt_births(state)
        store = engine._runtime.store
        keeps_window = states and window_survives(engine, state)
        try:
            loader = ShardLoader(
                engine._runtime, self.files, self._names, anew=not self._moments_go_on
            )
            loader.load(self._io, self._helpers, states=states, gradients=keeps_window)
            notes = self._note_frozen() if states else []
            if states:
                self._keep_waiting()
            parts = RestoreParts(
                run=not request.module_only,
                optimizer=states,
                scheduler=request.scheduler,
                moments=self._moments_go_on,
            )
            notes += restore(engine, state, parts, strict=request.strict)
        except BaseException:
            store.reclaim()
            store.suspended = (
                f"loading {self.path} into it failed midway; load that or another checkpoint"
            )
            raise
        store.heap.trim()
        return notes

    def _small_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Read this rank's own tensors."""
        found: dict[str, dict[str, torch.Tensor]] = {STATE: {}, CLIENT: {}}
        pieces = [each for each in self._rank.file.pieces if each.section in found]
        for piece in pieces:
            found[piece.section][piece.name] = self._read_piece(piece)
        return found

    def _read_piece(self, piece: PieceEntry) -> torch.Tensor:
        values = torch.empty(piece.numel, dtype=DTYPES[piece.dtype], device="cpu")
        blocks = iter([(piece, number) for number in range(len(piece.checksums))])
        start = 0
        for _, span in self.files.read(self._io, blocks):
            part = torch.frombuffer(span.view(), dtype=values.dtype)
            values[start : start + part.numel()] = part
            start += part.numel()
        return values.view(piece.shape)

    def _adopt_births(self, state: RunState) -> None:
        """Plan for the updates that each parameter has had, see `UpdateGroup.birth`."""
        engine, history = self._engine, self._engine._history
        if engine.optimizer is None:
            return
        updates = int(state.data["counters"]["updates"])
        births = self._births(updates)
        known = saved_carried(engine._runtime, self._carried, self._names.get)
        history.births, history.updates, history.dormant = births, updates, {}
        groups = update_groups(engine.optimizer, births)
        arranged = arrange_carried(engine.optimizer, groups, updates, known)
        if [_members(each) for each in groups] == [_members(each) for each in engine._groups]:
            engine._groups = groups
        else:
            adopt_carried(engine.optimizer, {})
            engine._plan_anew(None)
        adopt_carried(engine.optimizer, arranged)
        self._whole_states.adopt(self._read_piece)

    def _births(self, updates: int) -> dict[int, int]:
        """Return the births of what is trained, where they are not zero.

        Where moments begin anew all parameters are as if they had not been trained yet.
        """
        saved = names_of(self._manifest.tensors)
        births = {}
        for segment in self._engine._runtime.segments:
            for member in segment.members:
                entry = saved.get(self._names.get(member.name, ""))
                steps = entry.steps if entry is not None and self._moments_go_on else None
                if segment.spec.trainable and (steps or 0) != updates:
                    births[id(member.parameter)] = updates - (steps or 0)
        return births

    def _saved_carried(self) -> Mapping[str, Data]:
        """Return what an optimizer without a kernel goes on with, by saved name.

        Raises:
            CheckpointError: if it is not there, or does not fit the groups.
        """
        engine = self._engine
        states = [rank.run["optimizer"] for rank in self._manifest.ranks]
        problem = other_optimizer(engine.optimizer, states[0])
        if problem is not None:
            raise CheckpointError(
                f"{self.path} {problem}; load the weights alone with load_optimizer_states=False"
            )
        carried = join_carried(each.get("carried", []) for each in states if each is not None)
        if engine.optimizer is not None:
            updates = int(self._rank.run["counters"]["updates"])
            groups = update_groups(engine.optimizer, self._births(updates))
            known = saved_carried(engine._runtime, carried, self._names.get)
            arrange_carried(engine.optimizer, groups, updates, known)
        return carried

    def _keep_waiting(self) -> None:
        """Keep the moments of parameters that are frozen now until they are trained again."""
        engine = self._engine
        saved = names_of(self._manifest.tensors)
        index = PieceIndex(self._manifest)
        for segment in engine._runtime.segments:
            if segment.spec.trainable or not self._moments_go_on:
                continue
            for member in segment.members:
                entry = saved.get(self._names.get(member.name, ""))
                if entry is None or not entry.steps:
                    continue
                keys = [key for key in engine._runtime.states if index.has(entry.name, key)]
                carried = self._carried.get(entry.name)
                if keys or carried is not None:
                    engine._history.dormant[id(member.parameter)] = keep_moments(
                        engine._runtime,
                        engine._settings,
                        entry.steps,
                        {key: self._whole(entry, key) for key in keys},
                        carried,
                    )

    def _whole(self, entry: TensorEntry, section: str) -> torch.Tensor:
        """Read a whole section of one tensor, flat, fp32; zeros if it was not saved."""
        index = PieceIndex(self._manifest)
        values = torch.zeros(entry.numel, dtype=torch.float32, device="cpu")
        if not index.has(entry.name, section):
            return values
        found = self._joined(index, entry.name, section, entry.numel)
        bases = None
        if index.has(entry.name, section + BASE):
            count = -(-entry.numel // CODE_BLOCK_NUMEL)
            bases = self._joined(index, entry.name, section + BASE, count).numpy()
        values[:] = decode_stored(MOMENTS[self._engine._runtime.states[section]], found, bases)
        return values

    def _joined(self, index: PieceIndex, name: str, section: str, numel: int) -> torch.Tensor:
        """Read a section as it was saved."""
        found = list(index.blocks(name, section, 0, numel))
        values = torch.zeros(numel, dtype=DTYPES[found[0][0][0].dtype], device="cpu")
        start = 0
        for _, span in self.files.read(self._io, iter([block for block, _, _ in found])):
            part = torch.frombuffer(span.view(), dtype=values.dtype)
            values[start : start + part.numel()] = part
            start += part.numel()
        return values

    def _note_frozen(self) -> list[str]:
        """Note what was trained and is frozen now, and the other way round."""
        saved = names_of(self._manifest.tensors)
        frozen: list[str] = []
        trained: list[str] = []
        for segment in self._engine._runtime.segments:
            for member in segment.members:
                entry = saved.get(self._names.get(member.name, ""))
                if entry is not None and entry.trained != segment.spec.trainable:
                    (frozen if entry.trained else trained).append(member.name)
        notes = []
        if frozen and self._engine.optimizer is not None:
            notes.append(
                f"frozen now, trained then: {some(frozen)}: their optimizer state waits until they"
                " are trained again"
            )
        if trained:
            notes.append(
                f"trained now, frozen then: {some(trained)}: their optimizer state goes on where"
                " it stopped, or begins at zero"
            )
        return notes


def match_names(engine: ZeroEngine, manifest: Manifest, *, strict: bool) -> dict[str, str]:
    """Return the saved name of each sharded parameter, by its first name.

    Raises:
        CheckpointError: listing what is missing, unexpected or of another shape.
    """
    own: dict[int, list[str]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if reference_of(parameter) is not None:
            own.setdefault(id(parameter), []).append(name)
    saved = names_of(manifest.tensors)
    found: dict[str, str] = {}
    problems: list[str] = []
    for segment in engine._runtime.segments:
        for member in segment.members:
            entry = _find_saved(member, own[id(member.parameter)], saved, problems)
            if entry is not None:
                found[member.name] = entry.name
    advice = "zero.resize_parameter gives a parameter another shape" if problems else ""
    problems = [some(problems, "; ")] if problems else []
    if strict:
        missing = [name for names in own.values() for name in names[:1] if name not in found]
        unexpected = sorted({each.name for each in manifest.tensors} - set(found.values()))
        problems += [f"missing in the checkpoint: {some(missing)}"] if missing else []
        problems += [f"not in the model: {some(unexpected)}"] if unexpected else []
        if missing or unexpected:
            advice = "load_module_strict=False loads what is there"
    if problems:
        raise CheckpointError(
            "the checkpoint does not fit the model, and nothing was loaded: "
            + "; ".join(problems)
            + f". Build the model as it was; {advice}"
        )
    return found


def _find_saved(
    member: ManagedParameter,
    names: list[str],
    saved: dict[str, TensorEntry],
    problems: list[str],
) -> TensorEntry | None:
    """Return what was saved of a parameter under any of its names."""
    entries = {saved[name].name: saved[name] for name in names if name in saved}
    if len(entries) > 1:
        problems.append(f"{' and '.join(names)} are tied now and were not when it was saved")
    for entry in entries.values():
        shape = tuple(member.parameter.shape)
        if entry.shape != shape:
            problems.append(f"{member.name} has shape {shape}, the saved one {entry.shape}")
        return entry
    return None


def _members(group: UpdateGroup) -> tuple[int, list[int]]:
    return group.index, [id(parameter) for parameter in group.parameters]


def come_to_rest(engine: ZeroEngine) -> None:
    """Bring everything to where the plan has it: changes in place, kept gradients, writes.

    Raises:
        CheckpointError: if the model is in use: in a backward, or inside a gather.
    """
    if engine._destroyed:
        raise RuntimeError("this engine was destroyed; make a new one with zero.initialize")
    runtime = engine._runtime
    if torch._C._current_graph_task_id() != -1:
        raise CheckpointError("a checkpoint cannot be saved or loaded inside a backward")
    runtime.scheduler.recover()
    runtime.store.require_intact()
    if any(unit.is_held for unit in runtime.units):
        raise CheckpointError(
            "a checkpoint cannot be saved or loaded while parameters are gathered; leave the"
            " zero.GatheredParameters block, or the forward, first"
        )
    adopt_replaced(engine._slots)
    engine._adopt_shapes()
    runtime = engine._runtime  # another one if a parameter was given data of another shape
    for segment in runtime.segments:
        segment.commit(runtime.store)
    if runtime.reducer is not None:
        runtime.reducer.store_all()
    if runtime.store.pager is not None:
        runtime.store.pager.drain()
