"""Groups of rows of the GPU benchmark that run beside the same programs of peers, step by step.

In a group the peers start first, one after another, and take their first step; what they took by
then sets the budgets of our rows, which start next, one after another, and take the steps that do
not count. From then on all take a step each by turns, so that a minute in which the drive is slow
is one for everybody. All are processes of their own and stay there until the last step. What an
earlier call has left of the same group goes when it begins: a result is always of this call.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_drive
from gpu_peer import result_of
from gpu_rows import ROWS
from gpu_table import described
from gpu_turns import Player, end_on_signals, take_turns

_HERE = Path(__file__).resolve().parent
PROGRAM = _HERE / "gpu_peer_program.py"
"""Runs the peers, unless a command line names another one."""
_PEER = "peer-"
"""How results of peers begin."""
_LOSSY = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@dataclass(frozen=True)
class Peer:
    """One run of a peer's program."""

    name: str
    case: str
    steps: int
    """The first of them does not count."""
    environment: dict[str, str] = field(default_factory=dict)
    is_torch: bool = False
    """Whether it is plain torch's program that runs the case, and not the peer's."""


@dataclass(frozen=True)
class Ours:
    """One row of ours, with the budgets that a run of a peer sets."""

    row: str
    peer: str = ""
    """Whose memory sets the budgets; empty, or a run that failed: the row's own."""
    name: str = ""
    """Of the result; empty: the row's."""


@dataclass(frozen=True)
class Group:
    """What takes turns."""

    seconds: float
    """What all of it is expected to take."""
    peers: tuple[Peer, ...]
    rows: tuple[Ours, ...]


GROUPS: dict[str, Group] = {
    "host": Group(
        110,
        (Peer("host", "cpu", 6),),
        (Ours("host-exact", "host"), Ours("host-compact", "host")),
    ),
    "nvme": Group(
        300,
        (Peer("nvme", "nvme", 4),),
        (
            Ours("nvme-fits-exact", "nvme"),
            Ours("nvme-4gb-exact", "nvme"),
            Ours("nvme-4gb-compact", "nvme"),
        ),
    ),
    "torch": Group(
        140,
        (Peer("floor", "gpu", 6, is_torch=True), Peer("fsdp2", "fsdp2", 6, is_torch=True)),
        (Ours("device-exact", "floor"), Ours("all-host-exact", "fsdp2")),
    ),
    "lossy": Group(
        110,
        (Peer("nvme-lossy", "nvme", 4, {"BF16": json.dumps(_LOSSY)}),),
        (Ours("nvme-4gb-compact", "nvme-lossy", "nvme-4gb-compact-lossy-peer"),),
    ),
    "param": Group(
        320,
        (Peer("param", "nvme_param", 4, {"CKPT": "1", "PBUFS": "60", "PBUF": "7e7"}),),
        (Ours("all-nvme-4gb-exact", "param"), Ours("all-nvme-4gb-compact", "param")),
    ),
    "ours": Group(120, (), (Ours("all-nvme-4gb-compact"), Ours("all-nvme-4gb-exact"))),
}


def add_programs(parser: argparse.ArgumentParser) -> None:
    """Add to a command line which programs run the peers, how long, and how drives are measured."""
    for name, what in (("--program", "DeepSpeed"), ("--torch-program", "plain torch or FSDP2")):
        parser.add_argument(
            name,
            type=Path,
            nargs="?",
            const=PROGRAM,
            help=f"run a row and {what} a step each by turns, with {PROGRAM.name} or the one named",
        )
    parser.add_argument("--seconds", type=float, default=480, help="of all, peers' programs too")
    parser.add_argument(
        "--drive-mebibytes",
        type=gpu_drive.mebibytes_option,
        default=2048,
        help=f"of the file that a drive is measured with, {gpu_drive.LEAST_MEBIBYTES} at least; 0"
        " measures none",
    )


def run_row(row: str, options: argparse.Namespace) -> None:
    """Run one row beside its peer.

    Raises:
        SystemExit: if no peer is known for the row, the program that runs it was not named or is
            not there, or the row has failed.
    """
    for group in GROUPS.values():
        for ours in group.rows:
            peers = tuple(each for each in group.peers if each.name == ours.peer)
            if ours.row == row and peers:
                if (missing := missing_program(peers, options)) is not None:
                    raise SystemExit(f"row {row} needs {missing}")
                end_on_signals()
                for folder in (options.out, options.nvme):
                    folder.mkdir(parents=True, exist_ok=True)
                options.end = time.monotonic() + options.seconds
                alone = Group(group.seconds, peers, (ours,))
                for said in run_group(alone, options):
                    print(said, flush=True)
                if not result_path(ours.name or ours.row, options).exists():
                    raise SystemExit(1)
                return
    raise SystemExit(f"no peer is known for row {row}: leave --program out")


def missing_program(peers: Sequence[Peer], options: argparse.Namespace) -> str | None:
    """Return what a command line lacks of the programs of peers, or None."""
    for peer in peers:
        program, name = program_of(peer, options), f"--{'torch-' * peer.is_torch}program"
        if program is None:
            return name
        if not program.is_file():
            return f"{name}: there is no file {program}"
    return None


def program_of(peer: Peer, options: argparse.Namespace) -> Path | None:
    """Return the program that runs a peer's case."""
    found: Path | None = options.torch_program if peer.is_torch else options.program
    if found is None and PROGRAM in (options.torch_program, options.program):
        return PROGRAM  # it runs all cases
    return found


def run_group(group: Group, options: argparse.Namespace) -> Iterator[str]:
    """Run a group, keep its results in `options.out`, and yield what came of each."""
    end: float = options.end
    for name in names_of(group):
        result_path(name, options).unlink(missing_ok=True)
        begun_path(name, options).unlink(missing_ok=True)
    players: dict[str, Player] = {}
    try:
        start_all(group, options, players)
        take_turns([each for each in players.values() if each.process.poll() is None], end)
    except TimeoutError as error:
        yield f"{error}: not over within {options.seconds:.0f} s"
    finally:
        for player in players.values():
            player.stop()
    for name in names_of(group):
        if (found := players.get(name)) is None:
            yield f"{name}: left out, no time was left to start it"
        elif (failed := failure(found, result_path(name, options))) is not None:
            yield failed
        elif name.startswith(_PEER):
            yield peer_outcome(found, options)
        else:
            peer = next(each.peer for each in group.rows if name == (each.name or each.row))
            yield our_outcome(found, peer, options)


def start_all(group: Group, options: argparse.Namespace, players: dict[str, Player]) -> None:
    """Start the programs of a group, each up to the first step that counts.

    Raises:
        TimeoutError: if one is not that far in time; all that were started are in `players`.
    """
    end: float = options.end
    for peer in group.peers:
        player = players[_PEER + peer.name] = start_peer(peer, options)
        if player.wait(end) is not None and (facts := player.take(1, end)) is not None:
            text = json.dumps(facts)
            begun_path(player.name, options).write_text(text, encoding="utf-8")
    for ours in group.rows:
        player = players[ours.name or ours.row] = start_ours(ours, options)
        if player.wait(end) is not None:
            player.take(ROWS[ours.row].warm_up, end)


def names_of(group: Group) -> list[str]:
    """Return the names of all results of a group."""
    peers = [_PEER + each.name for each in group.peers]
    return peers + [each.name or each.row for each in group.rows]


def result_path(name: str, options: argparse.Namespace) -> Path:
    """Return where the result of a program goes."""
    path: Path = options.out / f"{name}.json"
    return path


def begun_path(name: str, options: argparse.Namespace) -> Path:
    """Return where it is kept what a peer has taken by the end of its first step."""
    path: Path = options.out / f"{name}.begun"
    return path


def start_peer(peer: Peer, options: argparse.Namespace) -> Player:
    """Start a peer's program."""
    sizes = (options.hidden, options.layers, options.batch, options.length, peer.steps)
    command = [str(_HERE / "gpu_peer.py"), "--turns={turns}", str(program_of(peer, options))]
    command += [peer.case, *map(str, sizes)]
    return Player(_PEER + peer.name, command, peer.environment, options.out)


def start_ours(ours: Ours, options: argparse.Namespace) -> Player:
    """Start a row of ours, within what its peer has taken so far."""
    name = ours.name or ours.row
    command = [str(_HERE / "gpu_bench.py"), "--turns={turns}", "--row", ours.row, "--name", name]
    command += ["--out", str(options.out), "--nvme", str(options.nvme), "--model", "transformers"]
    peer = begun_path(_PEER + ours.peer, options)
    if ours.peer and peer.exists():
        command += [f"--peer={peer}"]
    for size in ("hidden", "layers", "batch", "length", "drive_mebibytes"):
        command.append(f"--{size.replace('_', '-')}={getattr(options, size)}")
    return Player(name, command, {}, options.out)


def peer_outcome(player: Player, options: argparse.Namespace) -> str:
    """Keep what a peer's program has found, and return a line about it."""
    found = result_of(player.output.read_text(encoding="utf-8", errors="replace"))
    if found is None:
        return f"{player.name}: printed no line of JSON with its rows, see {player.output}"
    text = json.dumps(found)
    result_path(player.name, options).write_text(text, encoding="utf-8")
    return f"{player.name}: {text}"


def our_outcome(player: Player, peer_name: str, options: argparse.Namespace) -> str:
    """Put beside a row what its peer took in the end, and return a line about both."""
    path, peer = result_path(player.name, options), result_path(_PEER + peer_name, options)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found["turn_seconds"] = player.turn_seconds
    if peer_name and peer.exists():
        found["peer"] = json.loads(peer.read_text(encoding="utf-8"))
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return f"{player.name}: {described(found)}"


def failure(player: Player, result: Path) -> str | None:
    """Return what is to be said of a program that did not end well, or None.

    One that was ended before its time has done well if it has a result, of fewer steps.
    """
    code = player.process.returncode
    if code == 0 or (player.was_stopped and result.exists()):
        return None
    if player.was_stopped:
        turns = " ".join(f"{each:.1f}" for each in player.turn_seconds) or "none"
        return (
            f"{player.name}: ended after {player.seconds:.0f} s, its steps were not over; turns of"
            f" {turns} s"
        )
    tail = player.log.read_text(encoding="utf-8", errors="replace")[-1500:]
    return f"{player.name}: failed with {code} after {player.seconds:.0f} s\n{tail}"
