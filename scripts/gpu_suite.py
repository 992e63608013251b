"""All rows of the GPU benchmark beside the peers' programs, in one call and within a time limit.

    gpu_suite.py --out results --nvme DIRECTORY --seconds 480

Rows of a group and its peers take a step each by turns (`gpu_groups.py`); what the peers took sets
the budgets of our rows. Results are kept as soon as a group is over: a call that is cut short
loses only the group that was going on. Groups that would not end in time are left out, and named.
`gpu_peer_program.py` runs the peers unless another program is named.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import time
from pathlib import Path

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_groups import GROUPS, PROGRAM, add_programs, missing_program, run_group
from gpu_table import merge
from gpu_turns import end_on_signals


def keep(out: Path) -> None:
    """Put everything so far into one file beside the folder."""
    with tarfile.open(f"{out}.tgz.part", "w:gz") as archive:
        archive.add(out, arcname=out.name)
    Path(f"{out}.tgz.part").replace(f"{out}.tgz")


def parse() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_programs(parser)
    parser.set_defaults(program=PROGRAM, torch_program=PROGRAM)
    parser.add_argument("--out", type=Path, required=True, help="where results go")
    parser.add_argument("--nvme", type=Path, required=True, help="folder of our swap files")
    groups = ["host", "nvme", "lossy", "param"]
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=groups, help="these groups")
    for name, value in (("hidden", 2048), ("layers", 24), ("length", 1024), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    for name in options.only:
        if (missing := missing_program(GROUPS[name].peers, options)) is not None:
            parser.error(f"the group {name} needs {missing}")
    return options


def main() -> None:
    """Run what is asked for, in order."""
    options = parse()
    end_on_signals()
    options.end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    options.nvme.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        group = GROUPS[name]
        left = options.end - time.monotonic()
        if left < group.seconds:
            print(
                f"{name}: left out, {group.seconds:.0f} s expected, {left:.0f} s left", flush=True
            )
            continue
        for said in run_group(group, options):
            print(said, flush=True)
        keep(options.out)
    print(merge(options.out))


if __name__ == "__main__":
    main()
