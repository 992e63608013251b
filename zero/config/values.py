"""Kinds of values: what a key accepts, how it is read, and how an error about it reads.

A kind stands in the annotation of a field and does all the validation of that field, so that the
text of every error is ours and names the value and the fix.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema
from typing_extensions import override

LARGEST_INTEGER = 1 << 63
"""Larger integers are refused; sys.maxsize, also when a tool rewrote it as a float, is not."""

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


def whole_number(value: object) -> int | None:
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
    multiple_of: int = 1
    infinite: bool = False
    """Whether Infinity is accepted, meaning null (how Accelerate says "never")."""

    @override
    def describe(self) -> str:
        what = f"a multiple of {self.multiple_of}" if self.multiple_of > 1 else "an integer"
        if self.maximum == LARGEST_INTEGER:
            return f"{what} of at least {self.minimum}"
        return f"{what} from {self.minimum} to {self.maximum}"

    @override
    def read(self, value: object) -> int | None:
        if self.infinite and value == math.inf:
            return None
        number = whole_number(value)
        if number is None:
            raise self.refuse(value, self._fix(value))
        if number < self.minimum:
            raise self.refuse(value, f"the least is {self.minimum}")
        if number > self.maximum:
            raise self.refuse(value, f"the most is {self.maximum}")
        if number % self.multiple_of:
            nearest = max(1, round(number / self.multiple_of)) * self.multiple_of
            raise self.refuse(value, f"the nearest is {nearest}")
        return number

    def _fix(self, value: object) -> str:
        if isinstance(value, str):
            try:
                number = whole_number(float(value))
            except ValueError:
                number = None
            if number is not None:
                return f"write {number} without quotes"
        if isinstance(value, float) and math.isfinite(value):
            return f"write {max(self.minimum, round(value))}"
        return "write a number without quotes, such as " + str(max(self.minimum, 1))

    @override
    def schema(self) -> dict[str, Any]:
        schema = {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}
        return schema | ({"multipleOf": self.multiple_of} if self.multiple_of > 1 else {})


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
    meant: tuple[tuple[str, str], ...] = ()
    """Words that others use, beside ours for the same."""

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
        raise self.refuse(value, self._fix(value))

    def _fix(self, value: object) -> str:
        ours = dict(self.meant).get(str(value).lower())
        if ours is not None:
            return f"did you mean {json.dumps(ours)}?"
        usual = f"write {shown(self.words[0])}" if len(self.words) == 1 else "write one of these"
        return guess(value, self.words) or usual

    @override
    def schema(self) -> dict[str, Any]:
        return {"enum": list(self.words)}


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
