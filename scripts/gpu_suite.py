"""All rows of the GPU benchmark beside the peer's program, in one call and within a time limit.

    gpu_suite.py --program peer_deepspeed_gpu.py --out results --nvme DIRECTORY --seconds 480

The peer runs first in each group; what it took sets the budgets of our rows after it. Every row is
a process of its own, and is printed and kept as soon as it has ended: a call that is cut short
loses only what had not begun. Rows that would not end in time are left out, and named. The peer's
program prints JSON as its last line, as `gpu_peer.py` expects it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_table import described, merge

_HERE = Path(__file__).resolve().parent
_LOSSY = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@dataclass(frozen=True)
class Peer:
    """One run of the peer's program."""

    name: str
    case: str
    steps: int
    seconds: float
    """What it is expected to take."""
    environment: dict[str, str] = field(default_factory=dict)
    is_torch: bool = False
    """Whether it is plain torch's program that runs the case, and not the peer's."""


@dataclass(frozen=True)
class Ours:
    """One row of ours, with the budgets that a run of the peer sets."""

    row: str
    peer: str
    """Whose memory sets the budgets; empty, or a run that failed: the row's own."""
    seconds: float


GROUPS: dict[str, tuple[Peer | Ours, ...]] = {
    "host": (
        Peer("host", "cpu", 6, 55),
        Ours("host-exact", "host", 25),
        Ours("host-compact", "host", 22),
    ),
    "nvme": (
        Peer("nvme", "nvme", 4, 125),
        Ours("nvme-fits-exact", "nvme", 22),
        Ours("nvme-4gb-exact", "nvme", 70),
        Ours("nvme-4gb-compact", "nvme", 40),
    ),
    "torch": (
        Peer("floor", "gpu", 6, 30, is_torch=True),
        Peer("fsdp2", "fsdp2", 6, 60, is_torch=True),
    ),
    "lossy": (Peer("nvme-lossy", "nvme", 4, 90, {"BF16": json.dumps(_LOSSY)}),),
    "param": (
        Peer("param", "nvme_param", 4, 155, {"CKPT": "1", "PBUFS": "60", "PBUF": "7e7"}),
        Ours("all-nvme-4gb-exact", "param", 105),
        Ours("all-nvme-4gb-compact", "param", 40),
    ),
    "ours": (Ours("all-nvme-4gb-compact", "", 40), Ours("all-nvme-4gb-exact", "", 65)),
}


def commands(options: argparse.Namespace) -> Iterator[tuple[str, float, list[str], dict[str, str]]]:
    """Yield name, expected seconds, command and environment of everything that is asked for."""
    for group in options.only:
        for item in GROUPS[group]:
            if isinstance(item, Peer):
                sizes = (options.hidden, options.layers, options.batch, options.length, item.steps)
                program = options.torch_program if item.is_torch else options.program
                command = [str(_HERE / "gpu_peer.py"), str(program), item.case]
                command += [str(each) for each in sizes]
                yield f"peer-{item.name}", item.seconds, command, item.environment
                continue
            command = [str(_HERE / "gpu_bench.py"), "--row", item.row, "--out", str(options.out)]
            command += ["--nvme", str(options.nvme), "--model", "transformers"]
            if item.peer and (options.out / f"peer-{item.peer}.json").exists():
                command += [f"--peer={options.out / f'peer-{item.peer}.json'}"]
            for name in ("hidden", "layers", "batch", "length", "drive_mebibytes"):
                command.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
            yield item.row, item.seconds, command, {}


def run(
    name: str, command: list[str], environment: dict[str, str], options: argparse.Namespace
) -> str:
    """Run one item, keep its result, and return a line that says what came of it."""
    begin = time.monotonic()
    left = options.end - begin
    log = options.out / f"{name}.log"
    try:
        with log.open("w", encoding="utf-8") as errors:
            done = subprocess.run(
                [sys.executable, *command],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=left,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return f"{name}: not finished within {left:.0f} s"
    spent = f"{time.monotonic() - begin:.0f} s"
    if done.returncode:
        tail = log.read_text(encoding="utf-8")[-1500:]
        return f"{name}: failed with {done.returncode} after {spent}\n{tail}"
    if name.startswith("peer-"):
        last = done.stdout.strip().splitlines()[-1]
        (options.out / f"{name}.json").write_text(last, encoding="utf-8")
        return f"{name} ({spent}): {last}"
    found = json.loads((options.out / f"{name}.json").read_text(encoding="utf-8"))
    return f"{name} ({spent}): {described(found)}"


def keep(out: Path) -> None:
    """Put everything so far into one file beside the folder."""
    with tarfile.open(f"{out}.tgz.part", "w:gz") as archive:
        archive.add(out, arcname=out.name)
    Path(f"{out}.tgz.part").replace(f"{out}.tgz")


def main() -> None:
    """Run what is asked for, in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--torch-program", type=Path, help="runs the cases of the group torch")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nvme", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument(
        "--only", nargs="*", choices=GROUPS, default=["host", "nvme", "lossy", "param"]
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--drive-mebibytes", type=int, default=2048)
    options = parser.parse_args()
    if "torch" in options.only and options.torch_program is None:
        parser.error("the group torch needs --torch-program")
    options.end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    options.nvme.mkdir(parents=True, exist_ok=True)
    for name, expected, command, environment in commands(options):
        left = options.end - time.monotonic()
        if left < expected:
            print(f"{name}: left out, {expected:.0f} s expected, {left:.0f} s left", flush=True)
            continue
        print(run(name, command, environment, options), flush=True)
        keep(options.out)
    print(merge(options.out))


if __name__ == "__main__":
    main()
