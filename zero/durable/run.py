"""One rank's part of a durable run: begin or resume it, commit it, give it back.

The rules are in `protocol.py`; the bytes are moved by `offload`. Every method that ranks must call
together says so. What fails on one rank is learned by all before any of them goes on.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aio_ops import Engine, RunInUseError
from offload import (
    Commit,
    CommitName,
    Copies,
    KeptFile,
    Manifests,
    Store,
    StoreCommits,
    layout_digest,
)
from zero.carried import other_optimizer
from zero.comm import Communicator
from zero.durable.births import adopt_births
from zero.durable.header import RunFacts, pack_state, unpack_state
from zero.durable.places import RankPlaces
from zero.durable.protocol import (
    COMMIT_ACTS,
    Act,
    DurableError,
    Holding,
    candidates,
    newest_whole,
    next_name,
    perform,
    refusal_to_begin,
)
from zero.durable.reports import BY_CHECKPOINT, CommitReport, Resumed, other_plan
from zero.durable.signals import TerminationWatch
from zero.errors import ConfigError
from zero.optimizer import ZeroOptimizer
from zero.planning import Plan, Recalled
from zero.run_state import RunState, capture, model_hash, require_same_model, restore
from zero.settings import Settings
from zero.whole import recall_whole

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

_log = logging.getLogger(__name__)

_FAILURES = (OSError, RuntimeError, ValueError, TypeError)
"""What a rank that fails tells the others of, before it raises."""


class DurableRun:
    """The durable run of one engine on this rank."""

    def __init__(
        self, settings: Settings, model: nn.Module, communicator: Communicator, io: Engine
    ) -> None:
        durable = settings.tiers.durable
        if durable is None:
            raise ValueError("the run is not durable")
        self.name = durable.name
        self.every_steps = durable.every_steps
        self.resumed: Resumed | None = None
        self.last_commit: CommitReport | None = None
        paths = [entry.path for entry in settings.tiers.nvme]
        self._places = RankPlaces(io, paths, durable.name, communicator.rank)
        self._communicator = communicator
        self._model = model_hash(model)
        try:
            self._manifests = Manifests(self._places.main)
        except BaseException:
            self._places.release()
            raise
        self._candidates: list[CommitName] = []
        self._chosen: Commit | None = None
        self._last: CommitName | None = None
        self._attempts = 0
        self._token = ""
        self._facts: RunFacts | None = None
        self._layout = ""
        self._copies = Copies()
        self._commits: StoreCommits | None = None
        self._store: Store | None = None
        self._watch = TerminationWatch()
        self._engine: weakref.ref[ZeroEngine] | None = None
        self._closed = False

    @classmethod
    def begin(
        cls,
        settings: Settings,
        model: nn.Module,
        communicator: Communicator,
        io: Engine,
        optimizer: ZeroOptimizer | None,
    ) -> DurableRun | None:
        """Find the run that the settings name, and decide whether it is resumed; a collective.

        Returns:
            None if the settings ask for no durable run.

        Raises:
            DurableError: if a living run has the name, or what is there cannot be gone on with.
        """
        durable = settings.tiers.durable
        if durable is None:
            return None
        if optimizer is None:
            raise ConfigError(
                f"tiers.durable: the run {durable.name!r} has no optimizer, so it makes no steps to"
                " commit; pass an optimizer, or remove tiers.durable"
            )
        run, error = None, ""
        try:
            run = cls(settings, model, communicator, io)
        except (OSError, RunInUseError) as failure:
            error = str(failure)
        try:
            _agree(communicator, f"the durable run {durable.name!r} cannot be used", error)
            if run is not None:
                run._find()
        except BaseException:
            if run is not None:
                run.close()
            raise
        return run

    @property
    def recalled(self) -> Recalled:
        """What the plan must be made from to be the one that the run was committed with."""
        if self._chosen is None:
            return Recalled()
        facts = RunFacts.from_header(self._chosen.header)
        return Recalled(facts.host_bytes, facts.drive_rates, sum(facts.file["bytes"]))

    def open_file(self, io: Engine, plan: Plan) -> KeptFile:
        """Open the swap file of the run, or make one; a collective.

        Raises:
            DurableError: if the file or the plan is not what the run was committed with.
        """
        self._layout = layout_digest(plan.memory)
        error, kept = "", None
        try:
            kept = self._open_file(io, plan)
        except (OSError, DurableError) as failure:
            error = str(failure)
        try:
            _agree(self._communicator, f"the durable run {self.name!r} cannot be used", error)
        except DurableError:
            if kept is not None:
                kept.file.close()
            raise
        if kept is None:
            raise RuntimeError("no rank failed, and there is no swap file")
        return kept

    def resume(self, store: Store) -> bool:
        """Fill a store from the newest commit that is whole on every rank; a collective.

        Returns:
            False if the run begins anew.

        Raises:
            DurableError: if no commit is whole on every rank.
        """
        self._store = store
        self._commits = StoreCommits(store, self._copies)
        started = time.monotonic()
        fell_back: list[str] = []
        read_bytes = 0

        def is_whole(name: CommitName) -> bool:
            nonlocal read_bytes
            read_bytes, error = self._try(name)
            errors = self._communicator.gather_texts(error)
            if any(errors):
                fell_back.append(f"commit {name.sequence} was not taken: {_by_rank(errors)}")
            return not any(errors)

        name = newest_whole(self._candidates, is_whole)
        if name is None and self._candidates:
            raise DurableError(
                f"the durable run {self.name!r} cannot be resumed: {'; '.join(fell_back)}."
                f" {self._way_out()}"
            )
        if name is None:
            return False
        step = self._take(name).step
        seconds = time.monotonic() - started
        self.resumed = Resumed(
            self.name, step, name.sequence, read_bytes, seconds, tuple(fell_back)
        )
        return True

    def restore_engine(self, engine: ZeroEngine) -> None:
        """Give the engine the state of the run, and hold SIGTERM back from now on."""
        self._engine = weakref.ref(engine)
        if self.resumed is not None and self._chosen is not None:
            state = unpack_state(self._chosen.header["state"], self._chosen.blob)
            require_same_model(engine, state)
            problem = other_optimizer(engine.optimizer, state.data["optimizer"])
            if problem is not None:
                raise DurableError(
                    f"the durable run {self.name!r} {problem}; pass the optimizer that it began"
                    " with, or give the new run another tiers.durable.name"
                )
            changes = restore(engine, state)
            _recall_whole(engine, state)
            adopt_births(engine, state, changes)
            self.resumed = replace(self.resumed, changes=tuple(changes))
            if self._communicator.rank == 0:
                _log.warning("%s", self.resumed.describe())
        self._watch.install()

    def after_step(self, engine: ZeroEngine) -> None:
        """Commit if it is time or if a rank was told to end, which it then does; a collective."""
        ends = self._watch.is_requested
        if self._communicator.world_size > 1:
            ends = bool(
                self._communicator.gather_rows(torch.tensor([int(ends)], device="cpu")).any()
            )
        if ends or engine.global_steps % self.every_steps == 0:
            self._commit(engine)
        if ends:
            self._watch.deliver()

    def commit(self) -> CommitReport:
        """Commit the state as it is between two steps; a collective.

        Raises:
            DurableError: if a rank could not; the last commit still counts.
        """
        engine = self._engine() if self._engine is not None else None
        if engine is None or self._closed:
            raise RuntimeError(f"the engine of the durable run {self.name!r} was destroyed")
        if engine._micro_batches:
            raise RuntimeError(
                f"{engine._micro_batches} micro-batches are accumulated, and gradients are not"
                " committed; call commit() right after a step"
            )
        return self._commit(engine)

    def close(self) -> None:
        """Close the store, let go of the name and of SIGTERM; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._store is not None:
            self._store.close()
        self._watch.remove()
        self._places.release()

    def deliver_pending(self) -> None:
        """Let a SIGTERM take effect that was held back for a step that does not come."""
        if self._watch.is_requested:
            self._watch.deliver()

    # Beginning

    def _find(self) -> None:
        """Learn what all ranks have, and choose the candidates."""
        commits = self._manifests.commits
        facts = RunFacts.from_header(commits[0].header) if commits else None
        described = {
            "names": [[each.name.sequence, each.name.token] for each in commits],
            "problems": [f"{name}: {why}" for name, why in self._manifests.problems.items()],
            "is_new": self._places.is_new,
            "world_size": facts.world_size if facts is not None else None,
            "model": facts.model if facts is not None else self._model,
        }
        self._token = secrets.token_hex(8)
        texts = self._communicator.gather_texts(json.dumps([self._token, described]))
        self._token = json.loads(texts[0])[0]
        found = [json.loads(text)[1] for text in texts]
        self._refuse_others(found)
        holdings = [
            Holding(
                tuple(CommitName(*name) for name in each["names"]),
                tuple(each["problems"]),
                each["is_new"],
            )
            for each in found
        ]
        self._candidates = candidates(holdings)
        if self._candidates:
            self._chosen = self._manifests.find(self._candidates[0])
            return
        refusal = refusal_to_begin(holdings)
        if refusal is not None:
            raise DurableError(
                f"the durable run {self.name!r} cannot be resumed, and is not begun anew because"
                f" its state would be lost: {refusal}. {self._way_out()}"
            )

    def _refuse_others(self, found: Sequence[dict[str, Any]]) -> None:
        """Refuse a run of another world size or model."""
        now = self._communicator.world_size
        then = {each["world_size"] for each in found} - {None}
        if then - {now}:
            count = " or ".join(str(each) for each in sorted(then))
            raise DurableError(
                f"the durable run {self.name!r} has {count} ranks, and {now} are here; start"
                f" it with as many as it has. To go on with {now}, start it once more with those,"
                f" {BY_CHECKPOINT}"
            )
        others = [rank for rank, each in enumerate(found) if each["model"] != self._model]
        if others:
            raise DurableError(
                f"the durable run {self.name!r} trains another model: names or shapes of parameters"
                f" differ on ranks {others}; build the model as it was, or give the new run another"
                " tiers.durable.name"
            )

    def _way_out(self) -> str:
        places = " and ".join(str(each.parent) for each in self._places.directories)
        return (
            f"Bring back what is missing in {places}, or give the new run another"
            " tiers.durable.name, or remove that directory to begin anew"
        )

    def _open_file(self, io: Engine, plan: Plan) -> KeptFile:
        memory = plan.memory
        if self._chosen is None:
            self._manifests.discard_others()
            self._places.remove_files_but(None)
            file, found = self._places.create_file(io, memory.swap_file_bytes, plan.nvme)
            self._facts = RunFacts.of(memory, self._model, found)
            return KeptFile(file, self._copies, is_new=True)
        facts = RunFacts.from_header(self._chosen.header)
        if self._chosen.layout != self._layout:
            ranks = self._communicator.local_world_size
            then, now = facts.host_bytes * ranks, memory.host_budget_bytes * ranks
            raise DurableError(other_plan(then, now))
        self._facts = RunFacts.of(memory, self._model, facts.file)
        file = self._places.open_file(io, facts.file)
        return KeptFile(file, self._copies, is_new=False)

    def _try(self, name: CommitName) -> tuple[int, str]:
        """Read a commit into the store; return its bytes, and what is wrong with it."""
        commit = self._manifests.find(name)
        if self._commits is None or self._chosen is None:
            raise RuntimeError("a durable run is resumed once it has a store")
        if (commit.layout, commit.data_name) != (self._layout, self._chosen.data_name):
            return 0, "it is in another swap file"
        try:
            return self._commits.restore(commit.entries), ""
        except OSError as failure:
            return 0, str(failure)

    def _take(self, name: CommitName) -> Commit:
        """Let a commit count, and no other, on all ranks before anything is written."""
        chosen = self._chosen = self._manifests.find(name)
        self._manifests.keep(name)
        error = ""
        try:
            self._manifests.discard_others()
            self._places.remove_files_but(chosen.data_name)
        except OSError as failure:
            error = str(failure)
        _agree(self._communicator, f"the durable run {self.name!r} cannot be resumed", error)
        self._last = name
        return chosen

    # Committing

    def _commit(self, engine: ZeroEngine) -> CommitReport:
        """Do the acts of a commit, in order [Note: durable protocol]."""
        started = time.monotonic()
        for segment in engine._runtime.segments:
            segment.commit(engine._runtime.store)  # a skipped step has not
        self._attempts += 1
        name = next_name(self._last, f"{self._token}-{self._attempts}")
        member = _RankMember(self, engine)
        failure: Exception | None = None
        for act in COMMIT_ACTS:
            if act is Act.MEET:
                self._meet(name, failure)
            elif failure is None:
                try:
                    perform(act, member, name)
                except _FAILURES as error:
                    failure = error
        self._last = name
        self.last_commit = CommitReport(
            engine.global_steps,
            name.sequence,
            member.resident_bytes,
            member.manifest_bytes,
            time.monotonic() - started,
        )
        return self.last_commit

    def _meet(self, name: CommitName, failure: Exception | None) -> None:
        """Learn whether every rank could commit; if not, nobody has.

        Raises:
            DurableError: naming the ranks that could not, and why.
        """
        error = f"{type(failure).__name__}: {failure}" if failure is not None else ""
        errors = self._communicator.gather_texts(error)
        if not any(errors):
            return
        try:
            self._manifests.withdraw(name)
        except OSError as other:
            errors[self._communicator.rank] += f"; taking it back failed too: {other}"
        kept = f"commit {self._last.sequence}" if self._last is not None else "no commit"
        raise DurableError(
            f"the durable run {self.name!r} could not commit: {_by_rank(errors)}. A crash now falls"
            f" back to {kept}; make room or repair the drive, then go on: the next commit is tried"
            " as if this one had not been"
        ) from failure


class _RankMember:
    """What a commit asks of one rank, see `protocol.Member`."""

    def __init__(self, run: DurableRun, engine: ZeroEngine) -> None:
        if run._commits is None or run._store is None or run._facts is None:
            raise RuntimeError("a durable run commits once it has a store")
        self._run = run
        self._engine = engine
        self._commits = run._commits
        self._store = run._store
        self._facts = run._facts
        self.resident_bytes = 0
        self.manifest_bytes = 0

    def write(self) -> None:
        """Write what rests in memory."""
        self.resident_bytes = self._commits.write()

    def sync(self) -> None:
        """Sync the swap file on every path; without that nothing that it holds can be trusted."""
        try:
            self._commits.sync()
        except OSError as error:
            self._store.fail(f"the swap file of a durable run could not be synced ({error})")
            raise

    def flip(self, name: CommitName) -> None:
        """Replace the older manifest."""
        packed, blob = pack_state(capture(self._engine))
        commit = Commit(
            name,
            self._engine.global_steps,
            self._facts.file["name"],
            self._run._layout,
            tuple(self._commits.entries()),
            {"run": self._facts.to_header(), "state": packed},
            blob,
        )
        self.manifest_bytes = self._run._manifests.flip(commit)

    def release(self, name: CommitName) -> None:
        """Let the places of the last commit be written."""
        self._run._manifests.keep(name)
        self._commits.release()


def _recall_whole(engine: ZeroEngine, state: RunState) -> None:
    """Say what the records of whole tensors are, whose bytes the commit has."""
    if engine.optimizer is not None:
        keys = {name: id(parameter) for name, parameter in engine.module.named_parameters()}
        recall_whole(engine.optimizer.fused, state.data["whole"], keys)


def _by_rank(errors: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error)


def _agree(communicator: Communicator, what: str, error: str) -> None:
    """Raise on every rank if any rank has an error."""
    errors = communicator.gather_texts(error)
    if any(errors):
        raise DurableError(f"{what}: {_by_rank(errors)}")
