"""What train_lm.py shows: a live line, two tables and a sample of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

WAITS = ("read wait", "write wait", "slot wait")


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step as it was measured; bytes and stalls are this rank's."""

    step: int
    loss: float
    seconds: float
    tokens: int
    read_bytes: int
    write_bytes: int
    stall_seconds: float

    def line(self, steps: int) -> str:
        """Return the progress line."""
        return (
            f"step {self.step:>{len(str(steps))}}/{steps}  loss {self.loss:.3f}  "
            f"{self.tokens / self.seconds:,.0f} tokens/s  in {format_bytes(self.read_bytes)}  "
            f"out {format_bytes(self.write_bytes)}  stall {self.stall_seconds:.3f} s"
        )


def format_bytes(size_bytes: float) -> str:
    """Return a size in decimal units, as the configuration writes them."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def make_console(rank: int) -> Console:
    """Return where rank 0 prints; the other ranks print nothing."""
    console = Console(quiet=rank != 0, highlight=False)
    if not console.is_terminal:
        console.width = 110  # a log has no width; the tables of a plan fit into this
    return console


class ProgressLine:
    """One line that changes in place on a terminal, one line a step elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._task: TaskID | None = None
        bar = [BarColumn(bar_width=8)] if console.width >= 100 else []
        self._bar = Progress(*bar, TextColumn("{task.description}"), console=console)

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            self._task = self._bar.add_task("the first step", total=self._steps)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._bar.stop()

    def show(self, report: StepReport) -> None:
        """Show a step that has ended."""
        line = report.line(self._steps)
        if self._task is None:
            self._console.print(line, soft_wrap=True, markup=False)
        else:
            self._bar.update(self._task, completed=report.step, description=line)


def time_table(phases: Mapping[str, float], parts: Mapping[str, float], steps: int) -> Table:
    """Return a table of the training's phases, then of what the engine did in them."""
    table = Table(title=f"Where the time went ({steps} steps)", title_justify="left")
    table.add_column("phase")
    for heading in ("seconds", "ms per step", "share"):
        table.add_column(heading, justify="right")
    total = sum(phases.values()) or 1.0

    def add(name: str, seconds: float) -> None:
        share = f"{seconds / total:.1%}"
        table.add_row(name, f"{seconds:.2f}", f"{1000 * seconds / max(1, steps):.1f}", share)

    for name, seconds in phases.items():
        add(name, seconds)
    table.add_section()
    for name, seconds in parts.items():
        add(f"of these: {name}", seconds)
    return table


def bytes_table(by_class: Mapping[str, int], steps: int, note: str) -> Table:
    """Return a table of the bytes moved by link, direction and class of state."""
    table = Table(title=f"Where the bytes went ({steps} steps{note})", title_justify="left")
    table.add_column("moved")
    table.add_column("total", justify="right")
    table.add_column("per step", justify="right")
    for name, moved_bytes in by_class.items():
        table.add_row(name, format_bytes(moved_bytes), format_bytes(moved_bytes / max(1, steps)))
    return table


def printable(content: bytes) -> str:
    """Return bytes as text that no terminal takes as a command."""
    text = content.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in text)


def sample(prompt: bytes, continuation: bytes) -> Text:
    """Return generated text after the prompt that it continues, told apart by weight."""
    return Text.assemble((printable(prompt), "bold"), printable(continuation))
