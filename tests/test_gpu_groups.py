"""Groups of the GPU benchmark: what comes of each program, whichever fails, hangs or is noisy.

The programs are small ones that take turns as the benchmark's do; what those measure needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_groups  # noqa: E402
from gpu_groups import Group, Ours, Peer, run_group  # noqa: E402
from gpu_peer import result_of  # noqa: E402
from gpu_table import merge  # noqa: E402
from gpu_turns import Player  # noqa: E402

PROGRAM = f"""
import json, os, signal, subprocess, sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
from gpu_turns import Turns
name, does, steps, out, turns = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
budgets = sys.argv[6:]
turns = Turns.of(turns)
if does == "dies at start":
    sys.exit(3)
if does == "leaves a child":
    child = subprocess.Popen(["sleep", "300"], close_fds=False)
for step in range(steps):
    turns.wait(gpu_peak_gb=1.5, rss_peak_gb=2.0, baseline_bytes=1000)
    if does == f"dies in step {{step}}":
        sys.exit(4)
    if does == "hangs":
        child = subprocess.Popen(["sleep", "300"])
        if out != "-":
            open(f"{{out}}/child", "w").write(str(child.pid))
        time.sleep(300)
    if does == "is killed" and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
peak = {{"gpu_peak_gb": 2.5, "rss_peak_gb": 3.0, "baseline_bytes": 1000, "init_s": 1.0}}
rows = [[0.1, 0.2, 0.3, 0.6, 9.0, 0, 0] for _ in range(steps)]
if name.startswith("peer-"):
    print("a line of a library")
    print("no result" if does == "says nothing" else json.dumps({{**peak, "rows": rows}}))
    print("[rank0]: a library says goodbye")
else:
    ours = {{
        "rows": [{{"loss": 9.0}}] * steps,
        "median_seconds": 0.5,
        "spread_seconds": [0.4, 0.6],
        "device_peak_bytes": 10**9,
        "planned_device_bytes": None,
        "rss_bytes": {{"before": 1, "peak": 2}},
        "startup_seconds": {{"build": 1.0}},
        "ledger": {{"nvme_bytes": {{}}}},
    }}
    peer = json.load(open(budgets[0])) if budgets else None
    with open(f"{{out}}/{{name}}.json", "w") as file:
        json.dump({{"row": name, "ours": ours, "peer": peer}}, file)
"""
GROUP = Group(1, (Peer("host", "cpu", 4),), (Ours("device-exact", "host"), Ours("nvme-4gb-exact")))


@pytest.fixture
def does(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return what programs do beside taking their steps, by name; they are started by a group."""
    program = scratch / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    (scratch / "out").mkdir()
    does: dict[str, str] = {}

    def player(name: str, options: argparse.Namespace, *budgets: str) -> Player:
        words = [name, does.get(name, "well"), "5", str(options.out), "{turns}", *budgets]
        return Player(name, [str(program), *words], {}, options.out)

    def start_peer(peer: Peer, options: argparse.Namespace) -> Player:
        return player(f"peer-{peer.name}", options)

    def start_ours(ours: Ours, options: argparse.Namespace) -> Player:
        budgets = options.out / f"peer-{ours.peer}.begun"
        return player(ours.row, options, *([str(budgets)] if budgets.exists() else []))

    monkeypatch.setattr(gpu_groups, "start_peer", start_peer)
    monkeypatch.setattr(gpu_groups, "start_ours", start_ours)
    return does


def run(scratch: Path, seconds: float = 60) -> dict[str, str]:
    """Run the group and return what is said of each program."""
    end = time.monotonic() + seconds
    options = argparse.Namespace(out=scratch / "out", end=end, seconds=seconds)
    return dict(said.split(": ", 1) for said in run_group(GROUP, options))


def results(scratch: Path) -> list[str]:
    return sorted(path.stem for path in (scratch / "out").glob("*.json"))


def test_a_row_has_what_its_peer_took_in_the_end_and_noise_does_no_harm(
    does: dict[str, str], scratch: Path
) -> None:
    assert list(run(scratch)) == ["peer-host", "device-exact", "nvme-4gb-exact"]
    assert results(scratch) == ["device-exact", "nvme-4gb-exact", "peer-host"]
    peers, table = merge(scratch / "out").split("\n\n")
    assert "| peer-host | 0.60 |" in peers
    assert "| device-exact | 0.500 | 0.400 to 0.600 | 0.60 | 1.2 | 1.00 (2.50) |" in table
    assert "| nvme-4gb-exact | 0.500 | 0.400 to 0.600 | - | - | 1.00 |" in table


@pytest.mark.parametrize(
    ("what", "said", "peak"),
    [
        ("dies at start", "failed with 3 after", None),
        ("dies in step 0", "failed with 4 after", None),
        ("dies in step 3", "failed with 4 after", 1.5),
        ("is killed", "failed with -9 after", 1.5),
        ("says nothing", "printed no line of JSON with its rows", 1.5),
    ],
)
def test_a_peer_that_fails_leaves_no_result_nor_an_earlier_one(
    what: str, said: str, peak: float | None, does: dict[str, str], scratch: Path
) -> None:
    run(scratch)
    does["peer-host"] = what
    found = run(scratch)
    assert found["peer-host"].startswith(said)
    assert results(scratch) == ["device-exact", "nvme-4gb-exact"]
    row = json.loads((scratch / "out/device-exact.json").read_text(encoding="utf-8"))
    assert (row["peer"] or {}).get("gpu_peak_gb") == peak
    assert "| device-exact | 0.500 | 0.400 to 0.600 | - | - |" in merge(scratch / "out")


@pytest.mark.parametrize("what", ["dies at start", "dies in step 1", "dies in step 4"])
def test_a_row_that_fails_leaves_the_others_and_no_earlier_result(
    what: str, does: dict[str, str], scratch: Path
) -> None:
    run(scratch)
    does["device-exact"] = what
    found = run(scratch)
    assert found["device-exact"].startswith("failed with ")
    assert found["nvme-4gb-exact"].startswith("ours, s: 0.500")
    assert results(scratch) == ["nvme-4gb-exact", "peer-host"]


@pytest.mark.parametrize("hanging", ["peer-host", "device-exact"])
def test_when_time_is_over_all_are_ended_and_named(
    hanging: str, does: dict[str, str], scratch: Path
) -> None:
    run(scratch)
    does[hanging] = "hangs"
    end = time.monotonic() + 3
    options = argparse.Namespace(out=scratch / "out", end=end, seconds=3)
    said = list(run_group(GROUP, options))
    assert said[0] == f"{hanging}: not over within 3 s"
    text = "\n".join(said)
    assert f"{hanging}: ended after " in text
    assert "nvme-4gb-exact: left out, no time was left to start it" in text
    assert results(scratch) == []
    assert not is_running(int((scratch / "out/child").read_text(encoding="utf-8")))


def is_running(pid: int) -> bool:
    """Tell whether there is a process, whoever its parent is, that does not end soon."""
    try:
        found = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([found], [], [], 20)[0]
    finally:
        os.close(found)


def test_a_child_that_stays_does_not_hide_that_a_program_has_ended(
    does: dict[str, str], scratch: Path
) -> None:
    does["peer-host"] = "leaves a child"
    end = time.monotonic() + 60
    player = gpu_groups.start_peer(
        GROUP.peers[0], argparse.Namespace(out=scratch / "out", end=end, seconds=60)
    )
    facts = player.wait(end)
    assert facts is not None
    children = psutil.Process(player.process.pid).children()
    assert player.take(9, end) is None
    assert player.process.returncode == 0
    player.stop()
    for each in children:
        each.kill()


def test_a_program_that_gives_its_turns_back_and_goes_on_is_out_of_time(scratch: Path) -> None:
    program = scratch / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "for each in sys.argv[1].split(','): os.close(int(each))\n"
        "time.sleep(300)\n",
        encoding="utf-8",
    )
    player = Player("peer", [str(program), "{turns}"], {}, scratch)
    with pytest.raises(TimeoutError, match="peer"):
        player.wait(time.monotonic() + 1)
    player.stop()
    assert player.was_stopped


def test_a_suite_that_is_ended_ends_its_programs(scratch: Path) -> None:
    program = scratch / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    driver = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
from gpu_turns import Player, end_on_signals
end_on_signals()
words = [{str(program)!r}, "peer-host", "hangs", "1", "-", "{{turns}}"]
player = Player("peer-host", words, {{}}, Path({str(scratch)!r}))
try:
    player.wait(time.monotonic() + 60)
    print(player.process.pid, flush=True)
    player.take(1, time.monotonic() + 60)
finally:
    player.stop()
"""
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        os.kill(run.pid, signal.SIGTERM)
        code = run.wait(30)
    assert code == 128 + signal.SIGTERM
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("output", "steps"),
    [
        ('noise\n{"rows": [1, 2]}\nnoise\n', 2),
        ('{"rows": [1]}\n{"rows": [1, 2]}\n[1]\n7\n{"other": 1}\n', 2),
        ("", None),
        ("noise\n{}\n", None),
    ],
)
def test_the_result_of_a_program_is_its_last_line_of_json(output: str, steps: int | None) -> None:
    found = result_of(output)
    assert (None if found is None else len(found["rows"])) == steps


@pytest.mark.parametrize(
    ("waits", "said"),
    [(4, None), (5, "has 3 rows, but 4 steps began"), (0, "has 3 rows, but 0 steps began")],
)
def test_a_peer_whose_steps_take_no_turns_is_refused(
    waits: int, said: str | None, scratch: Path
) -> None:
    """Its seconds would be those of a machine on which another program computes."""
    library = scratch / "site/transformers/models/llama"
    library.mkdir(parents=True)
    for name in ("transformers", "transformers/models", "transformers/models/llama"):
        (scratch / "site" / name / "__init__.py").touch()
    (library / "modeling_llama.py").touch()
    program = scratch / "peer.py"
    program.write_text(
        "import json, torch\n"
        f"for _ in range(3 * {waits}): torch.cuda.synchronize()\n"
        "print(json.dumps({'rows': [[0] * 7] * 3}))\n",
        encoding="utf-8",
    )
    command = [str(SCRIPTS / "gpu_peer.py"), "--turns={turns}", str(program), "gpu"]
    path = {"PYTHONPATH": f"{scratch / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    player = Player("peer", command, path, scratch)
    end = time.monotonic() + 120
    if player.wait(end) is not None:
        assert player.take(9, end) is None
    player.stop()
    log = player.log.read_text(encoding="utf-8")
    assert (player.process.returncode == 0) == (said is None), log
    assert said is None or said in log


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--program", "nowhere.py"],
            "row host-exact needs --program: there is no file nowhere.py",
        ),
        (["--program", "x", "--steps", "3"], "--steps is not for a row beside a program"),
        (["--program", "x", "--host-memory", "3"], "--host-memory is not for a row beside"),
    ],
)
def test_a_row_beside_a_program_refuses_what_it_would_not_do(
    arguments: list[str], said: str, scratch: Path
) -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_bench.py"), "--row", "host-exact", *arguments]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.nvme
def test_a_row_that_is_cut_short_keeps_the_steps_that_it_made(scratch: Path) -> None:
    """A real row, small and on the processor."""
    command = [str(SCRIPTS / "gpu_bench.py"), "--turns={turns}", "--row", "nvme-4gb-exact"]
    command += ["--out", str(scratch), "--nvme", str(scratch), "--drive-mebibytes", "64"]
    command += ["--hidden", "128", "--layers", "1", "--vocabulary", "64", "--length", "16"]
    player = Player("nvme-4gb-exact", command, {"OMP_NUM_THREADS": "1"}, scratch)
    end = time.monotonic() + 120
    ready = player.wait(end)
    assert ready is not None, player.log.read_text(encoding="utf-8")
    result = scratch / "nvme-4gb-exact.json"
    player.take(1, end)  # the step that does not count
    assert not result.exists()
    player.take(2, end)
    player.stop()
    assert player.was_stopped
    assert len(player.turn_seconds) == 3
    found = json.loads(result.read_text(encoding="utf-8"))
    assert (len(found["ours"]["rows"]), len(found["ours"]["counted_seconds"])) == (3, 2)
    assert gpu_groups.failure(player, result) is None
    options = argparse.Namespace(out=scratch)
    said = gpu_groups.our_outcome(player, "", options)
    assert said.startswith("nvme-4gb-exact: ")
    assert "| nvme-4gb-exact, 2 of 6 steps |" in merge(scratch)
