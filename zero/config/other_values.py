"""Kinds of values beyond numbers, switches and choices: texts, paths, byte sizes, lists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from zero.config.values import LARGEST_INTEGER, Integer, Kind, Number, whole_number

_BYTE_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP", start=1)
}
_UNITS_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in _BYTE_UNITS.items()}
_BYTES_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A string that is not empty."""

    what: str = "a string"

    @override
    def describe(self) -> str:
        return self.what

    @override
    def read(self, value: object) -> str:
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise self.refuse(value, "write it in quotes")
        return value

    @override
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class FolderPath(Kind):
    """A path of a directory; `~` is the home directory."""

    @override
    def describe(self) -> str:
        return "the path of a directory"

    @override
    def read(self, value: object) -> Path | None:
        if isinstance(value, Path):
            return value
        if isinstance(value, str) and value.strip() and "\0" not in value:
            if self.nullable and value.strip().lower() in {"none", "null"}:
                return None  # what Accelerate's questionnaire writes for "no path"
            try:
                return Path(value).expanduser()
            except RuntimeError as error:
                raise self.refuse(value, f"write the whole path ({error})") from None
        raise self.refuse(value, 'write it in quotes, such as "/local_nvme"')

    @override
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class ByteSize(Kind):
    """Bytes: a number, or a string with a unit; kB, MB, GB are decimal, KiB, MiB, GiB binary."""

    auto: bool = False
    """Whether "auto" is accepted; it reads as None and is decided from the machine."""

    @override
    def describe(self) -> str:
        kinds = 'bytes as a positive integer or a string such as "8GB" or "8GiB"'
        return f'"auto" or {kinds}' if self.auto else kinds

    @override
    def read(self, value: object) -> int | None:
        if self.auto and value == "auto":
            return None
        size = self._size(value) if isinstance(value, str) else whole_number(value)
        if size is None or size <= 0:
            raise self.refuse(value, 'write a size such as "8GB"')
        if size > LARGEST_INTEGER:
            raise self.refuse(value, f"the most is {LARGEST_INTEGER}")
        return size

    @staticmethod
    def _size(text: str) -> int | None:
        match = _BYTES_PATTERN.fullmatch(text)
        if match is None or not match[1].isascii():
            return None
        factor = _UNITS_BY_LOWER_CASE.get(match[2].lower())
        if factor is None or len(match[1]) > len(str(LARGEST_INTEGER)):
            return None
        whole, _, part = match[1].partition(".")
        size: int = int(whole) * factor
        return size + (int(part) * factor // int("1" + "0" * len(part)) if part else 0)

    @override
    def schema(self) -> dict[str, Any]:
        pattern = r"^\s*\d+(\.\d+)?\s*([KkMmGgTtPp]?[Ii]?[Bb])?\s*$"
        choices: list[dict[str, Any]] = [
            {"type": "integer", "minimum": 1},
            {"type": "string", "pattern": pattern},
        ]
        return {"anyOf": [*choices, {"const": "auto"}] if self.auto else choices}


@dataclass(frozen=True, slots=True)
class Numbers(Kind):
    """A list of numbers of one kind, of a fixed length where `length` says so."""

    entry: Number = field(default_factory=Number)
    length: int | None = None

    @override
    def describe(self) -> str:
        count = "" if self.length is None else f"{self.length} "
        return f"a list of {count}values, each {self.entry.describe()}"

    @override
    def read(self, value: object) -> tuple[float, ...]:
        if not isinstance(value, list | tuple) or self.length not in {None, len(value)}:
            raise self.refuse(value, "write a list such as [0.9, 0.999]")
        return tuple(_read_entries(self, self.entry, value))

    @override
    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.entry.schema()}
        if self.length is not None:
            schema |= {"minItems": self.length, "maxItems": self.length}
        return schema


@dataclass(frozen=True, slots=True)
class TextList(Kind):
    """A list of strings; one string alone is a list of one."""

    @override
    def describe(self) -> str:
        return "a list of strings"

    @override
    def read(self, value: object) -> tuple[str, ...]:
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list | tuple) or not all(isinstance(e, str) for e in entries):
            raise self.refuse(value, 'write a list such as ["Block"]')
        return tuple(entries)

    @override
    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "string"}}


@dataclass(frozen=True, slots=True)
class Parameters(Kind):
    """The arguments of something that is made by name; judged where the name is known."""

    @override
    def describe(self) -> str:
        return "an object of arguments"

    @override
    def read(self, value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self.refuse(value, 'write an object such as {"lr": 0.001}')
        return dict(value)

    @override
    def schema(self) -> dict[str, Any]:
        return {"type": "object"}


_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class DurableRun(Kind):
    """False, or the name of a durable run and how often it commits."""

    @override
    def describe(self) -> str:
        return 'false, or an object such as {"name": "run-1", "every_steps": 1}'

    @override
    def read(self, value: object) -> dict[str, Any] | bool:
        if value is False:
            return False
        if not isinstance(value, Mapping):
            raise self.refuse(value, "write false, or give the run a name")
        unknown = sorted(set(map(str, value)) - {"name", "every_steps"})
        if unknown:
            raise self.refuse(value, f"remove {', '.join(unknown)}")
        name = value.get("name")
        if not isinstance(name, str) or not _RUN_NAME.fullmatch(name):
            raise self.refuse(
                value,
                "the name is that of a directory: up to 100 letters, digits, dots, dashes and"
                " underscores, the first a letter or digit",
            )
        steps = Integer(minimum=1).read(value.get("every_steps", 1))
        return {"name": name, "every_steps": steps}

    @override
    def schema(self) -> dict[str, Any]:
        run = {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{_RUN_NAME.pattern}$"},
                "every_steps": Integer(minimum=1).schema(),
            },
            "required": ["name"],
            "additionalProperties": False,
        }
        return {"anyOf": [{"const": False}, run]}


@dataclass(frozen=True, slots=True)
class Rates(Kind):
    """A number, or a list with one for every param group."""

    @override
    def describe(self) -> str:
        return f"{Number().describe()}, or a list of them, one a param group"

    @override
    def read(self, value: object) -> float | list[float]:
        if isinstance(value, list | tuple):
            return _read_entries(self, Number(), value)
        return Number().read(value)

    @override
    def schema(self) -> dict[str, Any]:
        one = Number().schema()
        return {"anyOf": [one, {"type": "array", "items": one}]}


@dataclass(frozen=True, slots=True)
class Free(Kind):
    """Anything: a key whose value is judged elsewhere, or that this version refuses whole."""

    @override
    def describe(self) -> str:
        return "any value"

    @override
    def parse(self, value: object) -> object:
        return value

    @override
    def read(self, value: object) -> object:
        return value

    @override
    def schema(self) -> dict[str, Any]:
        return {}


def _read_entries(kind: Kind, entry: Number, value: Sequence[object]) -> list[float]:
    """Read the entries of a list; an error shows the whole list."""
    try:
        return [entry.read(each) for each in value]
    except ValueError as error:
        raise kind.refuse(value, str(error).rpartition("; ")[2]) from None
