"""`python -m zero.config`: show, check, schema and docs."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero.config.config import ZeroConfig
from zero.config.effective import DEFAULT, Row, effective_rows
from zero.config.keys import Standing
from zero.config.loading import ConfigWarning, load_config
from zero.config.reference import json_schema, reference_page
from zero.errors import ConfigError

_WIDTH_OF_A_FILE = 140


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        match options.command:
            case "show":
                _show(options)
            case "check":
                _check(options)
            case "schema":
                _write(json.dumps(json_schema(), indent=2) + "\n")
            case _:
                _write(reference_page())
    except ConfigError as error:
        _tell(f"{options.file}: invalid\n{error}")
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zero.config", description="Look at a ZeRO configuration."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("show", "print the effective configuration, with where each value came from"),
        ("check", "say whether a configuration is valid and can be run"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("file", help="JSON file, or base64 text")
        command.add_argument(
            "--world-size", type=int, metavar="N", help="ranks, 1 unless the batch sizes say more"
        )
        command.add_argument("--hidden-size", type=int, metavar="N", help="of the model")
        command.add_argument("--json", action="store_true", help="print JSON")
        if name == "show":
            command.add_argument("--all", action="store_true", help="also keys without effect")
    commands.add_parser("schema", help="print the JSON Schema")
    commands.add_parser("docs", help="print docs/configuration.md")
    return parser


def _load(options: argparse.Namespace) -> tuple[ZeroConfig, list[str]]:
    """Return the configuration and the warnings about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        config = load_config(options.file, hidden_size=options.hidden_size)
    return config, [str(entry.message) for entry in caught]


def _show(options: argparse.Namespace) -> None:
    config, notices = _load(options)
    rows = effective_rows(config, options.world_size or _world_size_if_known(config))
    if options.json:
        document = {
            "source": config.source_name,
            "warnings": notices,
            "keys": {
                row.path: {
                    "value": row.value,
                    "origin": row.origin,
                    "standing": row.standing.value,
                }
                for row in rows
            },
        }
        _write(json.dumps(document, indent=2) + "\n")
        return
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    shown = rows if options.all else [row for row in rows if _matters(row)]
    console.print(_table(config.source_name, shown))
    for notice in notices:
        _tell(f"warning: {notice}")


def _matters(row: Row) -> bool:
    return row.standing is Standing.IMPLEMENTED or row.origin != DEFAULT


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=escape(title), title_justify="left")
    for heading in ("key", "value", "origin", "standing"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        style = "dim" if row.origin == DEFAULT else None
        table.add_row(
            escape(row.path),
            escape(json.dumps(row.value)),
            escape(row.origin),
            row.standing.value,
            style=style,
        )
    return table


def _check(options: argparse.Namespace) -> None:
    config, notices = _load(options)
    world_size = options.world_size or implied_world_size(config)
    config.settings(world_size)
    if options.json:
        document = {"valid": True, "world_size": world_size, "warnings": notices}
        _write(json.dumps(document, indent=2) + "\n")
        return
    for notice in notices:
        _tell(f"warning: {notice}")
    _write(f"{config.source_name}: valid, checked for world size {world_size}\n")


def implied_world_size(config: ZeroConfig) -> int:
    """Return the world size that three batch sizes imply, else 1."""
    total = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    if total is None or micro is None or steps is None or total % (micro * steps):
        return 1
    return total // (micro * steps)


def _world_size_if_known(config: ZeroConfig) -> int | None:
    """Return the ranks to resolve batch sizes for, or None if they do not say enough."""
    world_size = implied_world_size(config)
    try:
        config.settings(world_size)
    except ConfigError:
        return None
    return world_size


def _write(text: str) -> None:
    sys.stdout.write(text)


def _tell(text: str) -> None:
    Console(stderr=True, emoji=False).print(escape(text), soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
