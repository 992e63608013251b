"""`python -m zero.checkpoint inspect|verify|export-dcp`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from zero.checkpoint.dcp import export_dcp
from zero.checkpoint.inspection import inspect, verify
from zero.errors import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if all is well, 1 if the checkpoint cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m zero.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("inspect", "show what a checkpoint holds"),
        ("verify", "read all of it and compare it with its checksums"),
        ("export-dcp", "write it as a folder that torch.distributed.checkpoint reads"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", type=Path, help="a checkpoint, or a folder of them")
        command.add_argument("-t", "--tag", help="which one; by default `latest`")
        if name == "export-dcp":
            command.add_argument("output", type=Path, help="where it goes; nothing may be there")
        if name == "inspect":
            command.add_argument("--json", action="store_true", help="as JSON")
    given = parser.parse_args(arguments)
    try:
        if given.command == "export-dcp":
            print(f"{export_dcp(given.folder, given.output, given.tag)}: whole")
            return 0
        if given.command == "verify":
            count = verify(given.folder, given.tag)
            print(f"{given.folder}: whole, {count:,} bytes read and compared")
            return 0
        summary = inspect(given.folder, given.tag)
    except (CheckpointError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    if given.json:
        print(summary.to_json())
    else:
        Console(emoji=False).print(summary.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
