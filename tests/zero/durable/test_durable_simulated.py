"""A whole run on a simulated machine that stops at every point of it, and loses what was unsynced.

The machine is hostile: what was written and not synced is kept, lost or torn, each write and name
on its own (`aio_ops/platter.py` [Note: what a crash keeps]).
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import zero
from aio_ops import Platter, SimulatedCrash, SimulatedDisk
from tests.support.durable import MIXES, begin, durable_config, expected, run_step, state_of

STEPS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simulated")


@functools.cache
def oracle(place: Path, mix: str) -> list[str]:
    return expected(durable_config(str(place), None, mix), STEPS)


class Machine:
    """Runs and stops engines on one platter."""

    def __init__(self, place: Path, mix: str, *, every_steps: int = 1) -> None:
        self.platter = Platter()
        self.config = durable_config(str(place), "run", mix, every_steps=every_steps)
        self.engine: zero.ZeroEngine | None = None
        self.done = 0

    def start(self, seed: int) -> zero.ZeroEngine:
        disk = SimulatedDisk(seed, platter=self.platter)
        self.engine = begin(self.config, seed=seed, io_engine=disk)
        return self.engine

    def run(self, seed: int, stop_at: int | None) -> int:
        """Start, train to the end or until the machine stops; return the step it began with."""
        self.platter.stop_at = stop_at
        engine = self.start(seed)
        first = engine.global_steps
        self.done = first
        while engine.global_steps < STEPS:
            run_step(engine)
            self.done = engine.global_steps
        return first

    def crash(self, seed: int) -> None:
        self.platter.crash(seed)
        if self.engine is not None and self.engine.durable is not None:
            self.engine.durable.close()
        self.engine = None


def check_after(machine: Machine, wanted: list[str], committed: int, seed: int) -> None:
    """Resume, and compare with the newest commit that can be there; then train to the end."""
    engine = machine.start(seed=7)
    assert engine.durable is not None
    found = engine.global_steps
    resumed = engine.durable.resumed
    assert (resumed is not None) == (found > 0)
    assert committed <= found <= committed + machine.config["tiers"]["durable"]["every_steps"]
    if not found:  # another seed counts only where nothing was committed
        engine.destroy()
        engine = machine.start(seed=0)
    assert state_of(engine) == wanted[found], f"step {found}, crash seed {seed}"
    while engine.global_steps < STEPS:
        run_step(engine)
    assert state_of(engine) == wanted[STEPS]
    engine.destroy()
    machine.platter.claimed.clear()


def count_events(place: Path, mix: str) -> int:
    machine = Machine(place, mix)
    machine.run(0, None)
    assert machine.engine is not None
    memory = machine.engine.plan.memory
    assert memory.commit_bytes > 0
    if "nvme" in mix:
        assert memory.twin_bytes > 0
        assert machine.engine.ledger.snapshot().bytes_by_class["nvme read state"] > 0
    events = machine.platter.events
    machine.engine.destroy()
    return events


def crash_at(place: Path, mix: str, point: int, seed: int) -> None:
    machine = Machine(place, mix)
    with pytest.raises(SimulatedCrash):
        machine.run(0, point)
    committed = machine.done
    machine.crash(seed)
    check_after(machine, oracle(place, mix), committed, seed)


@pytest.mark.parametrize("mix", ["nvme", "host"])
def test_a_crash_at_some_points_resumes_at_the_newest_commit(place: Path, mix: str) -> None:
    events = count_events(place, mix)
    assert events > 30
    for point in range(3, events, max(events // 12, 1)):
        crash_at(place, mix, point, seed=point)


@pytest.mark.full
@pytest.mark.parametrize("mix", MIXES)
def test_a_crash_at_every_point_resumes_at_the_newest_commit(place: Path, mix: str) -> None:
    for point in range(count_events(place, mix)):
        for seed in range(3):
            crash_at(place, mix, point, seed)
