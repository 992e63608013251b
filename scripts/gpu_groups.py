"""Groups of rows of the GPU benchmark that run beside the same programs of peers, step by step.

In a group the peers start first, one after another, and take their first step; what they took by
then sets the budgets of our rows, which start next, one after another, and take the steps that do
not count. From then on all take a step each by turns, so that a minute in which the drive is slow
is one for everybody. All are processes of their own and stay there until the last step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_rows import ROWS
from gpu_table import described
from gpu_turns import Player, take_turns

_HERE = Path(__file__).resolve().parent
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
        250,
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
        290,
        (Peer("param", "nvme_param", 4, {"CKPT": "1", "PBUFS": "60", "PBUF": "7e7"}),),
        (Ours("all-nvme-4gb-exact", "param"), Ours("all-nvme-4gb-compact", "param")),
    ),
    "ours": Group(120, (), (Ours("all-nvme-4gb-compact"), Ours("all-nvme-4gb-exact"))),
}


def add_programs(parser: argparse.ArgumentParser) -> None:
    """Add to a command line which programs run the peers, and how long all may take."""
    parser.add_argument("--program", type=Path, help="the peer's: a row and its steps by turns")
    parser.add_argument("--torch-program", type=Path, help="the same for what plain torch runs")
    parser.add_argument("--seconds", type=float, default=480, help="of all, peers' programs too")


def run_row(row: str, options: argparse.Namespace) -> None:
    """Run one row beside its peer.

    Raises:
        SystemExit: if no peer is known for the row, or the program that runs it was not named.
    """
    for group in GROUPS.values():
        for ours in group.rows:
            peers = tuple(each for each in group.peers if each.name == ours.peer)
            if ours.row == row and peers:
                if program_of(peers[0], options) is None:
                    raise SystemExit(f"row {row} needs --{'torch-' * peers[0].is_torch}program")
                options.end = time.monotonic() + options.seconds
                alone = Group(group.seconds, peers, (ours,))
                for said in run_group(alone, options):
                    print(said, flush=True)
                return
    raise SystemExit(f"no peer is known for row {row}: leave --program out")


def program_of(peer: Peer, options: argparse.Namespace) -> Path | None:
    """Return the program that runs a peer's case."""
    found: Path | None = options.torch_program if peer.is_torch else options.program
    return found


def run_group(group: Group, options: argparse.Namespace) -> Iterator[str]:
    """Run a group, keep its results in `options.out`, and yield what came of each."""
    end: float = options.end
    players: dict[str, Player] = {}
    try:
        for peer in group.peers:
            player = players[f"peer-{peer.name}"] = start_peer(peer, options)
            if player.wait(end) is not None and (facts := player.take(1, end)) is not None:
                text = json.dumps(facts)
                (options.out / f"{player.name}.json").write_text(text, encoding="utf-8")
        for ours in group.rows:
            player = players[ours.name or ours.row] = start_ours(ours, options)
            if player.wait(end) is not None:
                player.take(ROWS[ours.row].warm_up, end)
        take_turns([each for each in players.values() if each.process.poll() is None], end)
    except TimeoutError as error:
        yield f"{error}: not over within {options.seconds:.0f} s"
    finally:
        for player in players.values():
            player.stop()
    for peer in group.peers:
        yield peer_outcome(players.get(f"peer-{peer.name}"), options)
    for ours in group.rows:
        yield our_outcome(ours, players.get(ours.name or ours.row), options)


def start_peer(peer: Peer, options: argparse.Namespace) -> Player:
    """Start a peer's program."""
    sizes = (options.hidden, options.layers, options.batch, options.length, peer.steps)
    command = [str(_HERE / "gpu_peer.py"), "--turns={turns}", str(program_of(peer, options))]
    command += [peer.case, *map(str, sizes)]
    return Player(f"peer-{peer.name}", command, peer.environment, options.out)


def start_ours(ours: Ours, options: argparse.Namespace) -> Player:
    """Start a row of ours, within what its peer has taken so far."""
    name = ours.name or ours.row
    command = [str(_HERE / "gpu_bench.py"), "--turns={turns}", "--row", ours.row, "--name", name]
    command += ["--out", str(options.out), "--nvme", str(options.nvme), "--model", "transformers"]
    peer = options.out / f"peer-{ours.peer}.json"
    if ours.peer and peer.exists():
        command += [f"--peer={peer}"]
    for size in ("hidden", "layers", "batch", "length", "drive_mebibytes"):
        command.append(f"--{size.replace('_', '-')}={getattr(options, size)}")
    return Player(name, command, {}, options.out)


def peer_outcome(player: Player | None, options: argparse.Namespace) -> str:
    """Keep what a peer's program has printed last, and return a line about it."""
    if (failed := failure(player)) is not None or player is None:
        return failed or ""
    last = player.output.read_text(encoding="utf-8").strip().splitlines()[-1]
    (options.out / f"{player.name}.json").write_text(last, encoding="utf-8")
    return f"{player.name}: {last}"


def our_outcome(ours: Ours, player: Player | None, options: argparse.Namespace) -> str:
    """Put beside a row what its peer took in the end, and return a line about both."""
    if (failed := failure(player)) is not None or player is None:
        return failed or ""
    path = options.out / f"{player.name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    peer = options.out / f"peer-{ours.peer}.json"
    if ours.peer and peer.exists():
        found["peer"] = json.loads(peer.read_text(encoding="utf-8"))
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return f"{player.name}: {described(found)}"


def failure(player: Player | None) -> str | None:
    """Return what is to be said of a program that did not end well, or None."""
    if player is None:
        return ""
    code = player.process.returncode
    if code == 0:
        return None
    spent = time.monotonic() - player.begun
    tail = player.log.read_text(encoding="utf-8")[-1500:]
    return f"{player.name}: failed with {code} after {spent:.0f} s\n{tail}"
