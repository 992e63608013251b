"""How a tuner's progress and results look: a live table on a terminal, lines elsewhere."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from aio_ops.tune.halving import Standing
from aio_ops.tune.settings import Setting

_WIDTH_OF_A_FILE = 160
_Row = tuple[str, str, str, str, str]


class Display:
    """Shows where the search stands.

    On a terminal one table is kept up to date; elsewhere each new stage of a search is a line.
    """

    def __init__(self, seconds: float, *, verbose: bool = False) -> None:
        self.console = Console(emoji=False)
        if not self.console.is_terminal:
            self.console.width = _WIDTH_OF_A_FILE
        self._seconds = seconds
        self._verbose = verbose
        self._begin = time.perf_counter()
        self._rows: dict[tuple[Path, str], _Row] = {}
        self._last_line: object = None
        self._live = Live(console=self.console, auto_refresh=False)

    def say(self, *lines: str) -> None:
        """Print lines as they are."""
        for line in lines:
            self.console.print(escape(line), soft_wrap=True, highlight=False)

    def watch(self, directory: Path, phase: str, standing: Standing[Setting] | None) -> None:
        """Take note of where things stand."""
        if self.console.is_terminal:
            row = ("", "", "", "", "") if standing is None else cells(standing)
            self._rows[directory, phase.partition(",")[0]] = row
            self._live.update(self._table(), refresh=True)
            return
        marker = (directory, phase.partition(":")[0], None if standing is None else standing.stage)
        if marker == self._last_line and not self._verbose:
            return
        self._last_line = marker
        said = f"{self._spent_s():5.1f} s  {directory}: {phase}"
        if standing is not None:
            _, alive, leader, rate, _ = cells(standing)
            said += f": {alive} settings, ahead is {leader} with {rate}"
        self.say(said)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._live.stop()

    def _spent_s(self) -> float:
        return time.perf_counter() - self._begin

    def _table(self) -> Table:
        table = Table(title=f"{self._spent_s():.0f} of {self._seconds:.0f} s", title_justify="left")
        for heading in ("directory", "what", "stage", "settings left", "ahead", "GB/s", "95 %"):
            table.add_column(heading, overflow="fold")
        for (directory, phase), row in self._rows.items():
            table.add_row(*(escape(cell) for cell in (str(directory), phase, *row)))
        return table


def cells(standing: Standing[Setting]) -> _Row:
    """Return stage, settings left, the leader, its rate and its interval."""
    return (
        str(standing.stage + 1),
        str(standing.alive),
        standing.leader.describe(),
        f"{standing.rate / 1e9:.2f} GB/s",
        f"{standing.low / 1e9:.2f} to {standing.high / 1e9:.2f}",
    )


def fragment_lines(part: dict[str, Any]) -> Sequence[str]:
    """Return a fragment as it would stand in a configuration."""
    return json.dumps(part, indent=2).splitlines()
