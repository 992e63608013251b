"""One line about every problem: the key's full path, its value, the reason and the fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zero.config.aliases import ALIASES, OLD_OFFLOAD
from zero.config.keys import Section, facts_of, walk
from zero.config.models import Document
from zero.config.values import closest, shown

_HINTS = {
    "optimizer.params.max_grad_norm": 'write "gradient_clipping" at the top level',
    "enable": 'did you mean "enabled"?',
}


def problem_text(model: type[Section], prefix: str, entry: Mapping[str, Any]) -> str:
    """Return the line about one error of pydantic's."""
    location: Sequence[str | int] = entry["loc"]
    path = prefix + dotted(location)
    value = entry.get("input")
    match entry["type"]:
        case "extra_forbidden":
            return _unknown_key(model, prefix, location, value)
        case "missing":
            return f"{path}: is missing; {_example(model, location)}"
        case "value_error":
            return f"{path}: {entry['ctx']['error']}"
        case "tuple_type":
            return f"{path}: must be a list, got {shown(value)}; write [{{...}}]"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{path}: must be an object, got {shown(value)}; {_object_fix(model, location)}"
        case _:
            return f"{path}: {entry['msg']}, got {shown(value)}; see docs/configuration.md"


def dotted(location: Sequence[str | int]) -> str:
    """Return a path such as `tiers.nvme[0].path`."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _section_at(model: type[Section], location: Sequence[str | int]) -> type[Section] | None:
    """Return the section that a location lies in."""
    section: type[Section] | None = model
    for part in location:
        if isinstance(part, int):
            continue
        info = section.model_fields.get(part) if section is not None else None
        if info is None:
            return None
        section = facts_of(part, info).section
    return section


def _unknown_key(
    model: type[Section], prefix: str, location: Sequence[str | int], value: object
) -> str:
    path = prefix + dotted(location)
    name = str(location[-1])
    shown_path = path if len(path) < 200 else f"{path[:200]}..."
    section = _section_at(model, location[:-1])
    known = list(section.model_fields) if section is not None else []
    parent = path[: len(path) - len(name)].rstrip(".")
    fix = (
        _HINTS.get(path)
        or (_HINTS.get(name) if "enabled" in known else None)
        or _guess(name, known, parent)
        or _elsewhere(name)
        or _list_of_keys(known)
    )
    return f"{shown_path}: unknown key with the value {shown(value)}; {fix}"


def _guess(name: str, known: list[str], parent: str) -> str | None:
    """Return the key that was meant, by its new spelling also where an old one is close."""
    old = {alias.old: alias.new for alias in ALIASES if alias.section == parent}
    if parent == "zero_optimization":
        old |= OLD_OFFLOAD
    found = closest(name, [*known, *old])
    return None if found is None else f'did you mean "{old.get(found, found)}"?'


def _elsewhere(name: str) -> str | None:
    """Say where a key of this name stands."""
    paths = [facts.path for facts in walk(Document) if facts.path.rpartition(".")[2] == name]
    return f"it belongs at {' or '.join(paths[:3])}" if paths else None


def _list_of_keys(known: list[str]) -> str:
    if not known:
        return "remove it"
    listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return f"remove it; the keys here are {listed}"


def _example(model: type[Section], location: Sequence[str | int]) -> str:
    section = _section_at(model, location[:-1])
    name = str(location[-1])
    info = section.model_fields.get(name) if section is not None else None
    if info is None:
        return "write it"
    facts = facts_of(name, info)
    return f"write {facts.kind.describe()}" if facts.kind is not None else "write it"


def _object_fix(model: type[Section], location: Sequence[str | int]) -> str:
    section = _section_at(model, location)
    first = next(iter(section.model_fields), None) if section is not None else None
    return f'write {{"{first}": ...}}' if first else "write {...}"
