"""The text to train on; without torch, so that a bad path fails at once."""

from __future__ import annotations

import math
import os
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_TEXT_BYTES = 16_000_000
# What a Python installation keeps beside its library: other people's packages, odd test data.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests"})


class TextError(ValueError):
    """A text that cannot be trained on; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Text:
    """The bytes to train on, and where they come from."""

    content: bytes
    origin: str

    def unigram_entropy(self) -> float:
        """Return the nats per byte that knowing only how frequent each byte is would leave."""
        counts = Counter(self.content).values()
        total = len(self.content)
        return sum(count / total * math.log(total / count) for count in counts)

    def windows(self, count: int, size_bytes: int, generator: random.Random) -> list[bytes]:
        """Return `count` stretches of `size_bytes` each, from random places."""
        last_start = len(self.content) - size_bytes
        starts = [generator.randint(0, last_start) for _ in range(count)]
        return [self.content[start : start + size_bytes] for start in starts]


def load_text(path: Path | None, sequence: int) -> Text:
    """Read a file, all files below a folder, or the running Python's standard library for None."""
    try:
        content, file_count = _read_up_to_limit(_sources(path))
    except OSError as error:
        raise TextError(f"cannot read {error.filename or path}: {error.strerror}") from error
    where = str(path) if path else "the standard library of this Python"
    if not content:
        raise TextError(
            f"{where} holds no text, only empty or binary files; name another with --text"
        )
    if len(content) <= sequence:
        raise TextError(
            f"{where} holds {len(content)} bytes of text, and a sequence of {sequence} needs at "
            f"least {sequence + 1}; name a longer text or a shorter --sequence"
        )
    amount = "the first " if len(content) == MAX_TEXT_BYTES else ""
    files = f"{file_count} file{'s' if file_count != 1 else ''}"
    return Text(content, f"{where}: {amount}{len(content):,} bytes of {files}")


def _sources(path: Path | None) -> Iterator[Path]:
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        sources = _files_below(folder, skipped=NOT_LIBRARY)
        yield from (source for source in sources if source.suffix == ".py")
    elif path.is_dir():
        yield from _files_below(path, skipped=frozenset())
    elif path.is_file():
        yield path
    elif path.exists():
        raise TextError(f"--text must be a file or a folder, and {path} is neither")
    else:
        raise TextError(f"--text {path} does not exist")


def _files_below(folder: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Yield regular files in an order that is the same everywhere, hidden ones left out."""

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(
            name for name in folders if name not in skipped and not name.startswith(".")
        )
        for name in sorted(names):
            source = Path(parent) / name
            if not name.startswith(".") and source.is_file():
                yield source


def _read_up_to_limit(sources: Iterator[Path]) -> tuple[bytes, int]:
    """Return the joined text of the sources, without binary files, and how many were read."""
    parts: list[bytes] = []
    left_bytes = MAX_TEXT_BYTES
    for source in sources:
        if left_bytes == 0:
            break
        with source.open("rb") as stream:
            part = stream.read(left_bytes)
        if part and b"\0" not in part:
            parts.append(part)
            left_bytes -= len(part)
    return b"".join(parts), len(parts)
