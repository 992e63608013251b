"""Kill durable runs at random moments, resume them, and compare every resume with the truth.

    python -m tests.support.killed_runs PATH WORLD_SIZE KILLS SEED [MIX ...]

Ranks are forked from this process, which has imported everything and started nothing. Each says in
a pipe what it resumed and every step that is done. The outcome is one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.durable import MIXES, begin, durable_config, expected, run_step, state_of

STEPS = 10
GRACE_S = 30.0
torch.set_num_threads(1)


@dataclass
class Outcome:
    """What one start of the ranks came to."""

    resumed: dict[int, tuple[int, str]] = field(default_factory=dict)
    done: int = 0
    final: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Group:
    """The ranks of one start."""

    def __init__(self, place: Path, world_size: int, work: Any) -> None:
        self.world_size = world_size
        self.children: dict[int, int] = {}
        self.outcome = Outcome()
        self._buffer = b""
        self._reader, writer = os.pipe()
        store = place / f"store-{random.getrandbits(64):x}"
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                os.close(self._reader)
                _be_rank(rank, world_size, store, writer, work)
            self.children[child] = rank
        os.close(writer)

    def read(self, timeout_s: float) -> bool:
        """Take what ranks say in that time; False once no rank is left."""
        ready, _, _ = select.select([self._reader], [], [], timeout_s)
        if not ready:
            return True
        data = os.read(self._reader, 65536)
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._note(json.loads(line))
        return bool(data)

    def kill(self, victims: list[int]) -> None:
        for child, rank in self.children.items():
            if rank in victims:
                os.kill(child, signal.SIGKILL)

    def finish(self) -> Outcome:
        """Wait for all ranks; those whose peers were killed end by themselves."""
        while self.read(GRACE_S):
            if not select.select([self._reader], [], [], GRACE_S)[0]:
                self.outcome.problems.append("ranks hung after a peer was killed")
                self.kill(list(self.children.values()))
        for child in self.children:
            os.waitpid(child, 0)
        os.close(self._reader)
        return self.outcome

    def _note(self, said: list[Any]) -> None:
        what, rank, step, text = said
        if what == "resumed":
            self.outcome.resumed[rank] = (step, text)
        elif what == "step":
            self.outcome.done = max(self.outcome.done, step)
        elif what == "final":
            self.outcome.final[rank] = text
        else:
            self.outcome.problems.append(f"rank {rank}: {text}")


def _be_rank(rank: int, world_size: int, store: Path, pipe: int, work: Any) -> None:
    """Do the work of a rank, in a child that never returns."""

    def say(what: str, step: int, text: str = "") -> None:
        os.write(pipe, json.dumps([what, rank, step, text]).encode() + b"\n")

    code = 0
    try:
        warnings.simplefilter("ignore")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if world_size > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
            )
        work(say)
    except BaseException as error:  # noqa: BLE001  a forked child must not go on as its parent
        code = 1
        peers_gone = isinstance(error, RuntimeError) and "onnection" in str(error)
        if not peers_gone:
            say("failed", 0, traceback.format_exc())
    os._exit(code)


def train(config: dict[str, Any]) -> Any:
    """Return the work of a rank: begin or resume, and train to the last step."""

    def work(say: Any) -> None:
        engine = begin(config, seed=0)
        resumed = engine.durable.resumed
        say("resumed", engine.global_steps if resumed else -1, state_of(engine))
        while engine.global_steps < STEPS:
            run_step(engine)
            say("step", engine.global_steps)
        say("final", STEPS, state_of(engine))
        engine.destroy()

    return work


def oracle(place: Path, world_size: int, mix: str) -> list[str]:
    """Return the digest after each step of a run that is never killed."""

    def work(say: Any) -> None:
        say("final", 0, json.dumps(expected(durable_config(str(place), None, mix), STEPS)))

    outcome = Group(place, world_size, work).finish()
    assert not outcome.problems, outcome.problems
    return json.loads(outcome.final[0])


class Campaign:
    """Kills one run after another, all of one mix."""

    def __init__(self, place: Path, world_size: int, mix: str, every_steps: int) -> None:
        self.place, self.world_size, self.mix = place, world_size, mix
        self.every_steps = every_steps
        self._resumed_at = 0
        self.truth = oracle(place, world_size, mix)
        self.kills = self.finished = 0
        self.resumes: list[int] = []
        self.problems: list[str] = []
        self._number = 0
        self._done = 0

    def strike(self, chance: random.Random) -> None:
        """Start the ranks, kill some at a random moment, and check what they had resumed."""
        group = Group(self.place, self.world_size, train(self._config()))
        wanted = chance.choice((-1, 1, 2, 2, 3))
        alive = True
        while alive and wanted >= 0 and not self._is_at(group, wanted):
            alive = group.read(GRACE_S)
        # From here a fraction of a step, or of the start, which no pipe tells.
        alive = alive and group.read(chance.random() * (0.15 if wanted < 0 else 0.02))
        ranks = list(range(self.world_size))
        if alive:
            group.kill([chance.choice(ranks)] if chance.random() < 0.5 else ranks)
            self.kills += 1
        self._check(group.finish())

    def _is_at(self, group: Group, wanted: int) -> bool:
        begun = len(group.outcome.resumed) == self.world_size
        return begun and group.outcome.done >= min(self._done + wanted, STEPS)

    def _check(self, outcome: Outcome) -> None:
        self.problems += outcome.problems
        for rank, (step, digest) in outcome.resumed.items():
            committed = self._done // self.every_steps * self.every_steps
            if not (committed <= max(step, 0) <= self._done + 1) or (step < 0 and committed):
                self.problems.append(f"rank {rank} resumed at {step} after step {self._done}")
            elif digest != self.truth[max(step, 0)]:
                self.problems.append(f"rank {rank} resumed other bits than step {step} had")
            self._resumed_at = max(step, 0)
            if rank == 0 and step >= 0:
                self.resumes.append(step)
        if outcome.resumed:
            self._done = max(self._resumed_at, outcome.done)
        if outcome.final:
            self.finished += 1
            if set(outcome.final.values()) != {self.truth[STEPS]}:
                self.problems.append("a run that was killed ended with other bits")
        if outcome.final or self._done >= STEPS:
            self._number += 1
            self._done = 0

    def end(self) -> None:
        """Let the last run end in peace, and check its bits."""
        self._check(Group(self.place, self.world_size, train(self._config())).finish())

    def _config(self) -> dict[str, Any]:
        name = f"{self.mix.replace(' ', '-')}-{self._number}"
        config = durable_config(str(self.place), name, self.mix, every_steps=self.every_steps)
        if isinstance(config["tiers"]["host_memory"], str) and "KB" in MIXES[self.mix].get(
            "host_memory", ""
        ):
            size = int(config["tiers"]["host_memory"].removesuffix("KB")) * 1000
            config["tiers"]["host_memory"] = size * self.world_size
        return config


def main() -> None:
    place, world_size, kills, seed = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
    expected(durable_config(str(place), None, "nvme"), 1)  # what is imported late, for all ranks
    chance = random.Random(seed)
    names = sys.argv[5:] or list(MIXES)
    found = {}
    for index, mix in enumerate(names):
        share = kills // len(names) + (index < kills % len(names))
        campaign = Campaign(place, world_size, mix, every_steps=1 + (index + seed) % 2)
        while campaign.kills < share and not campaign.problems:
            campaign.strike(chance)
        if not campaign.problems:
            campaign.end()
        found[mix] = {
            "kills": campaign.kills,
            "resumes": campaign.resumes,
            "finished": campaign.finished,
            "problems": campaign.problems,
        }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
