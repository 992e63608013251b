"""Kinds of values: what a key accepts, how it is read, and how an error about it reads.

A kind stands in the annotation of a field and does all the validation of that field, so that the
text of every error is ours and names the value and the fix.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema
from typing_extensions import override

LARGEST_INTEGER = 1 << 63
"""Larger integers are refused; sys.maxsize, also when a tool rewrote it as a float, is not."""

_BYTE_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP", start=1)
}
_UNITS_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in _BYTE_UNITS.items()}
_BYTES_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SHOWN_CHARACTERS = 80


def shown(value: object) -> str:
    """Return a value as the file spells it, shortened."""
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[: _SHOWN_CHARACTERS - 3]}..."
    return text


def _whole(value: object) -> int | None:
    """Return an int, or an integral float as an int; None if it is neither."""
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None


@dataclass(frozen=True, slots=True)
class Kind:
    """What a key accepts."""

    nullable: bool = False
    """Whether null is accepted, meaning the same as leaving the key out."""

    def describe(self) -> str:
        """Say what is accepted, in the words of an error message."""
        raise NotImplementedError

    def read(self, value: object) -> object:
        """Return the value in the type of the field, or raise ValueError with the fix."""
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the accepted values."""
        raise NotImplementedError

    def parse(self, value: object) -> object:
        """Read a value, null included."""
        if value is None:
            if self.nullable:
                return None
            raise ValueError(f"must be {self.describe()}, got null; remove the key for its default")
        return self.read(value)

    def refuse(self, value: object, fix: str) -> ValueError:
        """Return the error about a value."""
        return ValueError(f"must be {self.describe()}, got {shown(value)}; {fix}")

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Validate by this kind alone."""
        del source, handler
        return core_schema.no_info_plain_validator_function(
            self.parse, serialization=core_schema.plain_serializer_function_ser_schema(plain)
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe this kind to editors."""
        del schema, handler
        if self.nullable:
            return {"anyOf": [self.schema(), {"type": "null"}]}
        return self.schema()


def plain(value: object) -> object:
    """Return a value as JSON can hold it."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    """True or false, and nothing that merely looks like it."""

    @override
    def describe(self) -> str:
        return "true or false"

    @override
    def read(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        spelled = {"true": "true", "1": "true", "false": "false", "0": "false"}
        meant = spelled.get(str(value).strip().lower())
        fix = f"write {meant} without quotes" if meant else "write one of the two"
        raise self.refuse(value, fix)

    @override
    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    """A whole number; an integral float such as 5e8 is one."""

    minimum: int = 0
    maximum: int = LARGEST_INTEGER
    infinite: bool = False
    """Whether Infinity is accepted, meaning null (how Accelerate says "never")."""

    @override
    def describe(self) -> str:
        if self.maximum == LARGEST_INTEGER:
            return f"an integer of at least {self.minimum}"
        return f"an integer from {self.minimum} to {self.maximum}"

    @override
    def read(self, value: object) -> int | None:
        if self.infinite and value == math.inf:
            return None
        number = _whole(value)
        if number is None:
            raise self.refuse(value, self._fix(value))
        if number < self.minimum:
            raise self.refuse(value, f"the least is {self.minimum}")
        if number > self.maximum:
            raise self.refuse(value, f"the most is {self.maximum}")
        return number

    def _fix(self, value: object) -> str:
        if isinstance(value, str):
            try:
                number = _whole(float(value))
            except ValueError:
                number = None
            if number is not None:
                return f"write {number} without quotes"
        if isinstance(value, float) and math.isfinite(value):
            return f"write {max(self.minimum, round(value))}"
        return "write a number without quotes, such as " + str(max(self.minimum, 1))

    @override
    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A finite number."""

    minimum: float | None = 0.0
    maximum: float | None = None
    above_minimum: bool = False
    below_maximum: bool = False

    @override
    def describe(self) -> str:
        return " ".join(["a finite number", self._bounds()]).strip()

    def _bounds(self) -> str:
        parts = []
        if self.minimum is not None:
            parts.append(f"{'above' if self.above_minimum else 'of at least'} {self.minimum:g}")
        if self.maximum is not None:
            parts.append(f"{'below' if self.below_maximum else 'at most'} {self.maximum:g}")
        return " and ".join(parts)

    @override
    def read(self, value: object) -> float:
        number = self._finite(value)
        low, high = self.minimum, self.maximum
        if low is not None and (number < low or (self.above_minimum and number == low)):
            raise self.refuse(value, f"write a number {self._bounds()}")
        if high is not None and (number > high or (self.below_maximum and number == high)):
            raise self.refuse(value, f"write a number {self._bounds()}")
        return number

    def _finite(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            fix = "write a number"
            if isinstance(value, str):
                try:
                    fix = f"write {float(value):g} without quotes"
                except ValueError:
                    fix = "write a number without quotes"
            raise self.refuse(value, fix)
        try:
            number = float(value)
        except OverflowError:
            raise self.refuse(value, "the most is 1.797e308") from None
        if not math.isfinite(number):
            raise self.refuse(value, "write a number that is neither infinite nor NaN")
        return number

    @override
    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        if self.minimum is not None:
            schema["exclusiveMinimum" if self.above_minimum else "minimum"] = self.minimum
        if self.maximum is not None:
            schema["exclusiveMaximum" if self.below_maximum else "maximum"] = self.maximum
        return schema


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of a few words; another case of the same word is accepted where `any_case` says so."""

    words: tuple[str, ...] = ()
    any_case: bool = False
    later: tuple[str, ...] = ()
    """Words that have a meaning, but not in this version."""

    @override
    def describe(self) -> str:
        return alternatives(self.words)

    @override
    def read(self, value: object) -> str:
        if isinstance(value, str):
            word = value
            if self.any_case:
                word = next((known for known in self.words if known.lower() == value.lower()), word)
            if word in self.words:
                return word
            if word in self.later:
                raise ValueError(
                    f"{shown(value)} is not available in this version; use "
                    f"{alternatives(self.words)}"
                )
        raise self.refuse(value, guess(value, self.words) or f"write {shown(self.words[0])}")

    @override
    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.words)}


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
        size = self._size(value) if isinstance(value, str) else _whole(value)
        if size is None or size <= 0:
            raise self.refuse(value, f"write {self.describe()}")
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
        return tuple(self.entry.read(entry) for entry in value)

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


@dataclass(frozen=True, slots=True)
class Rates(Kind):
    """A number, or a list with one for every param group."""

    @override
    def describe(self) -> str:
        return f"{Number().describe()}, or a list of them, one a param group"

    @override
    def read(self, value: object) -> float | list[float]:
        if isinstance(value, list | tuple):
            return [Number().read(entry) for entry in value]
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


def alternatives(words: tuple[str, ...]) -> str:
    """Join words as a choice."""
    quoted = [json.dumps(word) for word in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def closest(value: object, known: Sequence[str]) -> str | None:
    """Return the known word that is close to a value, if any is."""
    by_lower_case = {word.lower(): word for word in reversed(known)}
    close = difflib.get_close_matches(str(value).lower()[:200], list(by_lower_case), n=1)
    return by_lower_case[close[0]] if close else None


def guess(value: object, known: Sequence[str]) -> str | None:
    """Return "did you mean ...?" if one of the known words is close."""
    found = closest(value, known)
    return None if found is None else f"did you mean {json.dumps(found)}?"
