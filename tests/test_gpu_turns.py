"""Programs take turns, step by step, and what becomes of them when one ends, fails or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from gpu_turns import Player, Turns, take_turns  # noqa: E402

PROGRAM = f"""
import json, sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
from gpu_turns import Turns
name, turns, steps, path = sys.argv[1], Turns.of(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
for step in range(steps):
    turns.wait(step=step)
    if name == "broken" and step == 1:
        raise SystemExit(7)
    if name == "slow" and step == 1:
        time.sleep(60)
    for part in ("begin", "end"):
        with open(path, "a") as file:
            print(f"{{name}} {{step}} {{part}}", file=file)
print(json.dumps({{"name": name}}))
"""
PEER = """
import json, sys
import torch
steps = int(sys.argv[2])
rows = []
for step in range(steps):
    torch.cuda.synchronize()
    print("begin", step, file=sys.stderr, flush=True)
    for _ in range(3):
        torch.cuda.synchronize()
print("a library's line")
print(json.dumps({"rows": steps}))
"""


@pytest.fixture
def start(scratch: Path) -> Iterator[object]:
    """Start programs that write down when their steps begin and end."""
    program = scratch / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    players = []

    def begin(name: str, steps: int) -> Player:
        command = [str(program), name, "{turns}", str(steps), str(scratch / "steps")]
        players.append(Player(name, command, {}, scratch))
        return players[-1]

    yield begin
    for each in players:
        each.stop()


def soon() -> float:
    return time.monotonic() + 30


def test_steps_of_programs_never_overlap_and_alternate(start: object, scratch: Path) -> None:
    players = [start(name, steps) for name, steps in (("peer", 3), ("ours", 4))]  # type: ignore[operator]
    said = [each.wait(soon()) for each in players]
    assert said == [{"step": 0}, {"step": 0}]
    assert not (scratch / "steps").exists()
    said = [players[1].take(1, soon())]
    assert said == [{"step": 1}]
    take_turns(players, soon())
    lines = (scratch / "steps").read_text(encoding="utf-8").splitlines()
    order = ["ours 0", "peer 0", "ours 1", "peer 1", "ours 2", "peer 2", "ours 3"]
    assert lines == [f"{step} {part}" for step in order for part in ("begin", "end")]
    assert [each.process.returncode for each in players] == [0, 0]
    assert json.loads(players[0].output.read_text(encoding="utf-8")) == {"name": "peer"}


def test_one_that_fails_leaves_the_turns_to_the_others(start: object, scratch: Path) -> None:
    players = [start(name, 3) for name in ("broken", "ours")]  # type: ignore[operator]
    for each in players:
        each.wait(soon())
    take_turns(players, soon())
    assert [each.process.returncode for each in players] == [7, 0]
    assert (scratch / "steps").read_text(encoding="utf-8").count("ours") == 6


def test_one_that_hangs_is_named_and_ended(start: object) -> None:
    players = [start(name, 3) for name in ("slow", "ours")]  # type: ignore[operator]
    for each in players:
        each.wait(soon())
    with pytest.raises(TimeoutError, match="slow"):
        take_turns(players, time.monotonic() + 1)
    for each in players:
        each.stop()
    assert all(each.process.returncode for each in players)


def test_a_program_whose_driver_has_gone_does_not_wait_for_ever() -> None:
    theirs, words = os.pipe()
    answers, their_answers = os.pipe()
    turns = Turns.of(f"{theirs},{their_answers}")
    os.close(words)
    with pytest.raises(SystemExit, match="no turn was given any more"):
        turns.wait()
    os.close(answers)
    with pytest.raises(SystemExit, match="no turn was given any more"):
        turns.wait()
    turns.close()


def test_a_peers_program_waits_before_each_of_its_steps(scratch: Path) -> None:
    program = scratch / "peer.py"
    program.write_text(PEER, encoding="utf-8")
    driver = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import runpy
from gpu_peer import wait_for_turns
from gpu_turns import Turns
import torch
wait_for_turns(Turns.of(sys.argv[1]), {str(program)!r}, 7)
torch.cuda.synchronize()  # a library's
sys.argv = ["peer", "case", "3"]
runpy.run_path({str(program)!r}, run_name="__main__")
"""
    (scratch / "driver.py").write_text(driver, encoding="utf-8")
    player = Player("peer", [str(scratch / "driver.py"), "{turns}"], {}, scratch)
    facts = player.wait(soon())
    assert facts is not None
    assert facts["baseline_bytes"] == 7
    assert facts["rss_peak_gb"] > 0
    assert "begin" not in player.log.read_text(encoding="utf-8")
    for step in range(2):
        facts = player.take(1, soon())
        assert facts is not None
        begun = player.log.read_text(encoding="utf-8").count("begin")
        assert begun == step + 1
    facts = player.take(1, soon())
    assert facts is None
    assert player.process.returncode == 0
    assert player.output.read_text(encoding="utf-8").splitlines()[-1] == '{"rows": 3}'
    player.stop()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--row", "host-exact", "--torch-program", "x"], "row host-exact needs --program"),
        (["--row", "all-host-exact", "--program", "x"], "all-host-exact needs --torch-program"),
    ],
)
def test_a_row_names_the_program_that_it_needs(
    arguments: list[str], said: str, scratch: Path
) -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_bench.py"), *arguments, "--out", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr
