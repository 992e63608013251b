"""What each key of the configuration is: its standing here, and what "auto" may mean for it.

The facts about a key are written once, beside its field, and are read from there by the parser,
the reference page, the JSON Schema and `show`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from zero.config.values import Kind


class Standing(enum.Enum):
    """How this version treats a key."""

    IMPLEMENTED = "implemented"
    NO_EFFECT = "no effect"
    """Accepted: it cannot change a result, and one warning says why it does nothing here."""
    REFUSED = "refused"
    """Accepted only where it says what happens anyway; any other value is an error."""
    DETAIL = "as its section"
    """A detail of a section that is itself refused or without effect."""


class Auto(enum.Enum):
    """What decides a key whose value is "auto"."""

    BATCH = "the other batch sizes, else a micro-batch of 1"
    DEFAULT = "always the default"
    FRAMEWORK = "the framework's own arguments, else the default"
    REQUIRED = "the framework's own arguments; without a framework write a number"
    HIDDEN_SQUARED = "hidden size squared, else the default"
    PREFETCH = "0.9 x hidden size squared, else the default"
    PERSISTENCE = "10 x hidden size, else the default"
    MACHINE = "the machine"


class Section(BaseModel):
    """One object of the configuration: unknown keys are errors, and nothing changes afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, arbitrary_types_allowed=True, protected_namespaces=()
    )


def key(meaning: str, *, default: Any, auto: Auto | None = None) -> Any:
    """Declare a key that does what it says."""
    return _declare(meaning, default, Standing.IMPLEMENTED, auto=auto)


def no_effect(meaning: str, *, default: Any, why: str, auto: Auto | None = None) -> Any:
    """Declare a key that is accepted and does nothing here, and say why."""
    return _declare(meaning, default, Standing.NO_EFFECT, why=why, auto=auto)


def refused(
    meaning: str, *, default: Any, why: str, instead: str, accepts: tuple[Any, ...] = ()
) -> Any:
    """Declare a key of which only the default (and `accepts`) is accepted."""
    return _declare(
        meaning, default, Standing.REFUSED, why=why, instead=instead, accepts=list(accepts)
    )


def detail(meaning: str, *, default: Any) -> Any:
    """Declare a key that shares the standing of its section."""
    return _declare(meaning, default, Standing.DETAIL)


def _declare(meaning: str, default: Any, standing: Standing, **facts: Any) -> Any:
    extra: dict[str, Any] = {"standing": standing.value}
    for name, fact in facts.items():
        if fact:
            extra[name] = fact.name if isinstance(fact, Auto) else fact
    return Field(default, description=meaning, json_schema_extra=extra)


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """Everything known about one key."""

    path: str
    meaning: str
    default: Any
    required: bool
    standing: Standing
    why: str
    instead: str
    accepts: tuple[Any, ...]
    auto: Auto | None
    kind: Kind | None
    """None for a section."""
    section: type[Section] | None


def facts_of(path: str, info: FieldInfo) -> KeyFacts:
    """Read the facts that a field was declared with."""
    extra = info.json_schema_extra
    facts: dict[str, Any] = dict(extra) if isinstance(extra, dict) else {}
    auto = facts.get("auto")
    return KeyFacts(
        path=path,
        meaning=info.description or "",
        default=None if info.is_required() else info.get_default(call_default_factory=True),
        required=info.is_required(),
        standing=Standing(facts.get("standing", Standing.IMPLEMENTED.value)),
        why=facts.get("why", ""),
        instead=facts.get("instead", ""),
        accepts=tuple(facts.get("accepts", ())),
        auto=None if auto is None else Auto[auto],
        kind=next((entry for entry in info.metadata if isinstance(entry, Kind)), None),
        section=section_of(info.annotation),
    )


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section class in an annotation such as `Section | None`."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def walk(section: type[Section], prefix: str = "") -> Iterator[KeyFacts]:
    """Yield every key of a section and of the sections below it, in the order of declaration.

    The entries of a list of sections stand under `name[]`.
    """
    for name, info in section.model_fields.items():
        facts = facts_of(f"{prefix}{name}", info)
        yield facts
        if facts.section is not None:
            mark = "[]" if facts.kind is None and _is_list(info.annotation) else ""
            yield from walk(facts.section, f"{prefix}{name}{mark}.")


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is tuple
