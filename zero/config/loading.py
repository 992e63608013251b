"""From a source to a ZeroConfig: every problem is found, and all are told at once."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from zero.config.aliases import modernise
from zero.config.autos import UNRESOLVED, WRITTEN, resolve_autos
from zero.config.checks import cross_check
from zero.config.config import ZeroConfig
from zero.config.keys import KeyFacts, Section, Standing, facts_of
from zero.config.other_values import Free
from zero.config.param_models import params_section
from zero.config.problems import dotted, problem_text
from zero.config.source import read_source
from zero.config.torch_schedules import torch_schedule_problems
from zero.config.values import plain, shown
from zero.errors import ConfigError

Model = TypeVar("Model", bound=Section)


class ConfigWarning(UserWarning):
    """Something in a configuration that works, but not as its writer may think."""


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    hidden_size: int | None = None,
    supplied: Mapping[str, Any] | None = None,
) -> ZeroConfig:
    """Parse a configuration strictly: a path, base64 text or a mapping.

    Args:
        source: JSON (or hjson, where installed) file, base64 of JSON, or a mapping.
        hidden_size: Of the model, for the keys whose "auto" follows from it.
        supplied: Values of a framework for keys that are "auto", by full path.

    Raises:
        ConfigError: One line for every problem, with the key's full path, its value and the fix.
    """
    written, name, notices = read_source(source)
    notices += modernise(written)
    origins = dict.fromkeys(written_paths(written), WRITTEN)
    problems = resolve_autos(written, origins, hidden_size, supplied or {})
    config = _validate(ZeroConfig, written, "", problems)
    params = _validate_params(written, origins, problems)
    idle: dict[str, list[str]] = {}
    for prefix, section in [("", config), *params]:
        if section is not None:
            problems += _refused(section, prefix)
            _collect_idle(idle, section, prefix, origins)
    if config is not None:
        problems += cross_check(config, notices)
    if problems or config is None:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    config.remember(origins, name)
    if idle:
        listed = "; ".join(f"{', '.join(paths)} ({why})" for why, paths in idle.items())
        notices.append(f"without effect here: {listed}")
    for notice in notices:
        warnings.warn(f"{name}: {notice}", ConfigWarning, stacklevel=2)
    return config


def _validate(
    model: type[Model], document: object, prefix: str, problems: list[str]
) -> Model | None:
    """Return the model, or None with the reasons appended."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        told = {problem.partition(":")[0] for problem in problems}
        for entry in error.errors(include_url=False, include_input=True):
            path = prefix + dotted(entry["loc"])
            if entry["type"] != "missing" or path not in told:  # a refused "auto" was taken out
                problems.append(problem_text(model, prefix, entry))
        return None


def _validate_params(
    document: dict[str, Any], origins: Mapping[str, str], problems: list[str]
) -> list[tuple[str, Section | None]]:
    """Validate the arguments of what is made by name."""
    result: list[tuple[str, Section | None]] = []
    for owner in ("optimizer", "scheduler"):
        entry = document.get(owner)
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            continue
        params = entry.get("params", {})
        if not isinstance(params, dict):
            continue
        prefix = f"{owner}.params."
        section = params_section(owner, entry["type"])
        if section is not None:
            found = list(problems)
            result.append((prefix, _validate(section, params, prefix, found)))
            problems += [
                text for text in found[len(problems) :] if not _is_unresolved(text, origins)
            ]
        elif owner == "scheduler":
            problems += torch_schedule_problems(entry["type"], params)
    return result


def _is_unresolved(problem: str, origins: Mapping[str, str]) -> bool:
    """Say whether a key is missing only because its "auto" waits for a framework."""
    return origins.get(problem.partition(":")[0]) == UNRESOLVED


def entries(section: Section, prefix: str = "") -> Iterator[tuple[KeyFacts, Any, bool]]:
    """Yield every key of a filled section and of those below: facts, value, whether written."""
    for name, info in type(section).model_fields.items():
        facts = facts_of(f"{prefix}{name}", info)
        value = getattr(section, name)
        yield facts, value, name in section.model_fields_set
        if isinstance(value, Section):
            yield from entries(value, f"{facts.path}.")
        elif facts.section is not None and isinstance(value, tuple):
            for position, entry in enumerate(value):
                yield from entries(entry, f"{facts.path}[{position}].")


def _refused(section: Section, prefix: str) -> list[str]:
    """Return an error for every key whose value cannot be had here."""
    return [
        f"{facts.path}: {shown(_plain_value(value))} is not available: {facts.why}; {facts.instead}"
        for facts, value, _ in entries(section, prefix)
        if facts.standing is Standing.REFUSED and not _is_off(facts, value)
    ]


def _is_off(facts: KeyFacts, value: object) -> bool:
    if isinstance(facts.kind, Free) and not value:
        return True
    return value == facts.default or value in facts.accepts


def _collect_idle(
    idle: dict[str, list[str]], section: Section, prefix: str, origins: Mapping[str, str]
) -> None:
    """Add the written keys that are accepted and do nothing, by the reason."""
    for facts, value, written in entries(section, prefix):
        if (
            facts.standing is Standing.NO_EFFECT
            and facts.section is None
            and written
            and origins.get(facts.path, WRITTEN) == WRITTEN
            and not (_is_nothing(value) and value == facts.default)
        ):
            idle.setdefault(facts.why, []).append(facts.path)


def _is_nothing(value: object) -> bool:
    """Say whether a value merely states that something is off."""
    return value is None or value is False or value == ()


def _plain_value(value: object) -> object:
    """Return what was written, also of a whole section."""
    if isinstance(value, Section):
        return {name: _plain_value(getattr(value, name)) for name in value.model_fields_set}
    return plain(value)


def written_paths(value: object, path: str = "") -> Iterator[str]:
    """Yield the full path of every value that a document holds."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from written_paths(entry, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        for position, entry in enumerate(value):
            yield from written_paths(entry, f"{path}[{position}]")
    else:
        yield path
