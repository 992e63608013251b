"""The command line of the doctor: `tierzero-doctor`, `scripts/doctor.py`.

[Note: what the doctor survives]
The checks of this package need neither torch nor any layer above. Those of the layers above are
loaded by name while it runs: that they cannot be imported is one of the things to diagnose.
"""

import argparse
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aio_ops.doctor import machine
from aio_ops.doctor.disks import disk
from aio_ops.doctor.rows import Check, Row, Status, fail, run

_ABOVE = ("zero.doctor",)
_WIDTH_OF_A_FILE = 140
_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
_EPILOG = """\
example:
  tierzero-doctor /nvme0 --config ds_config.json

exit status: 0 training would start; 1 it would not, see FAIL; 2 wrong options;
  130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(
        prog="tierzero-doctor",
        description="Say on one screen what this machine offers to training, and what it lacks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("directories", metavar="DIR", nargs="*", type=Path,
                      help="where swap files would lie")  # fmt: skip
    made.add_argument("--config", type=Path, metavar="FILE", help="look at what it asks for, too")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        rows = list(diagnose(options.directories, options.config))
    except KeyboardInterrupt:
        sys.stderr.write("tierzero-doctor: interrupted; nothing was left behind\n")
        return 130
    starts = all(row.status is not Status.FAIL for row in rows)
    if options.json:
        document = {"version": 1, "starts": starts, "rows": [row.to_dict() for row in rows]}
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        show(rows, starts=starts)
    return 0 if starts else 1


def diagnose(directories: Sequence[Path], config: Path | None) -> Iterator[Row]:
    """Yield all rows: the machine, the layers above, the disks, the configuration."""
    yield from run(machine.checks())
    known: dict[Path, Path] = {}
    for each in directories:
        known.setdefault(each.resolve(), each)
    directories = list(known.values())
    above: list[tuple[str, Check]] = []
    for name in _ABOVE:
        try:
            checks: Callable[[Path | None, list[Path]], list[tuple[str, Check]]]
            checks = importlib.import_module(name).checks
        except (ImportError, OSError, RuntimeError) as error:
            above.append((name, functools.partial(_unimportable, name, error)))
        else:
            above += checks(config, directories)
    yield from run(above)
    yield from run((f"disk {each}", functools.partial(disk, each)) for each in directories)


def _unimportable(name: str, error: Exception) -> Row:
    package = name.partition(".")[0]
    return fail(
        f"package {package}",
        f"cannot be imported: {type(error).__name__}: {error}",
        "install its dependencies (`pip install .`), torch first of all",
    )


def show(rows: Sequence[Row], *, starts: bool) -> None:
    """Print the rows as one table, and the verdict."""
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        found = escape(row.found)
        if row.remedy:
            found += f"\n[italic]-> {escape(row.remedy)}[/italic]"
        table.add_row(f"[{_STYLES[row.status]}]{row.status.value}[/]", escape(row.what), found)
    console.print(table, highlight=False)
    counts = {status: sum(row.status is status for row in rows) for status in Status}
    said = "training would start" if starts else "training would not start"
    console.print(
        f"{said}: {counts[Status.OK]} OK, {counts[Status.WARN]} WARN, {counts[Status.FAIL]} FAIL",
        highlight=False,
    )
