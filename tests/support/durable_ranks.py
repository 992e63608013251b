"""What two ranks of a durable run do about harm to one of them, as one line of JSON.

python -m tests.support.durable_ranks PATH
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from aio_ops.directories import SyncedDirectory
from offload import Manifests
from tests.support.durable import begin, durable_config, expected, run_step, state_of
from tests.support.killed_runs import Group

MIX = "nvme and host"


class Harm:
    """A run of two ranks, and what becomes of it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.config = durable_config(str(place), "run", MIX)
        self.config["tiers"]["host_memory"] = 64000
        self.found: dict[str, Any] = {}

    def rank(self, index: int) -> Path:
        return self.place / "run" / f"rank-{index}"

    def start(self, case: str, steps: int, world_size: int = 2, *, waits: bool = False) -> Group:
        """Resume, train to a step, and note what every rank says."""

        def work(say: Any) -> None:
            try:
                engine = begin(self.config, seed=0 if case == "trained" else 4)
            except Exception as error:  # noqa: BLE001  what it is is what is asked
                say("final", 0, f"{type(error).__name__}: {error}")
                return
            durable = engine.durable
            fell_back = list(durable.resumed.fell_back) if durable.resumed else []
            say("resumed", engine.global_steps, json.dumps([state_of(engine), fell_back]))
            while engine.global_steps < steps or waits:
                run_step(engine)
                say("step", engine.global_steps)
            say("final", engine.global_steps, state_of(engine))
            engine.destroy()

        group = Group(self.place, world_size, work)
        if not waits:
            outcome = group.finish()
            self.found[case] = {
                "resumed": {rank: list(each) for rank, each in outcome.resumed.items()},
                "final": outcome.final,
                "problems": outcome.problems,
            }
        return group

    def truth(self) -> None:
        def work(say: Any) -> None:
            config = {**self.config, "tiers": {**self.config["tiers"], "durable": False}}
            say("final", 0, json.dumps(expected(config, 6)))

        self.found["truth"] = json.loads(Group(self.place, 2, work).finish().final[0])

    def flip(self, path: Path, offset: int) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            old = file.read(1)
            file.seek(offset)
            file.write(bytes([old[0] ^ 1]))

    def harm_manifest(self, index: int) -> None:
        newest = Manifests(SyncedDirectory(self.rank(index))).commits[0]
        for name in ("commit-0", "commit-1"):
            raw = (self.rank(index) / name).read_bytes()
            if newest.to_bytes() == raw:
                self.flip(self.rank(index) / name, 500)

    def harm_data(self, index: int) -> None:
        """Change a byte of what only the newest commit has: some copies moved since the last."""
        newest, older = Manifests(SyncedDirectory(self.rank(index))).commits
        before = {entry.place: entry.copy for entry in older.entries}
        entry = next(each for each in newest.entries if each.copy == 0 != before.get(each.place, 0))
        self.flip(self.rank(index) / newest.data_name, entry.place + 7)

    def terminate(self) -> None:
        """Send SIGTERM to rank 1 alone; both must commit and end."""
        group = self.start("", 0, waits=True)
        while len(group.outcome.resumed) < 2 or group.outcome.done < 5:
            group.read(30.0)
        (child,) = (child for child, rank in group.children.items() if rank == 1)
        os.kill(child, signal.SIGTERM)
        while group.read(30.0):
            pass
        codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in group.children]
        self.found["terminated"] = {"codes": codes, "done": group.outcome.done}


def main() -> None:
    harm = Harm(Path(sys.argv[1]))
    expected(durable_config(sys.argv[1], None, "device"), 1)  # what is imported late
    harm.truth()
    harm.start("trained", 3)
    harm.harm_manifest(1)
    harm.start("manifest", 3)
    harm.harm_data(0)
    harm.start("data", 4)
    aside = harm.place / "aside"
    harm.rank(1).rename(aside)
    harm.start("missing", 4)
    shutil.rmtree(harm.rank(1), ignore_errors=True)
    aside.rename(harm.rank(1))
    harm.start("one rank", 4, world_size=1)
    harm.start("three ranks", 4, world_size=3)
    shutil.rmtree(harm.rank(2), ignore_errors=True)
    with (harm.rank(1) / "lock").open("r+b") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        harm.start("in use", 4)
    harm.start("whole again", 4)
    harm.terminate()
    harm.start("after SIGTERM", 0)
    sys.stdout.write(json.dumps(harm.found) + "\n")


if __name__ == "__main__":
    main()
