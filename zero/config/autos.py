"""Resolving "auto": every key that accepts it has one rule, and the origin is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zero.config.keys import Auto, KeyFacts, Section, facts_of
from zero.config.models import Document
from zero.config.other_values import ByteSize, Free
from zero.config.param_models import params_section
from zero.config.values import Choice, shown

WRITTEN = "written"
UNRESOLVED = '"auto", not resolved'


@dataclass(slots=True)
class _Resolver:
    """Walks a document beside its models and replaces or removes every "auto"."""

    origins: dict[str, str]
    hidden_size: int | None
    supplied: Mapping[str, Any]
    problems: list[str]

    def visit(self, document: dict[str, Any], section: type[Section], prefix: str) -> None:
        """Resolve one object and those below it."""
        for name in list(document):
            info = section.model_fields.get(name)
            if info is None:
                continue  # an unknown key, told of by the validation
            facts = facts_of(f"{prefix}{name}", info)
            value = document[name]
            if value == "auto":
                self._resolve(document, name, facts)
            elif facts.section is not None:
                for path, entry in _objects(value, facts.path):
                    self.visit(entry, facts.section, f"{path}.")

    def _resolve(self, document: dict[str, Any], name: str, facts: KeyFacts) -> None:
        if takes_auto_itself(facts):
            self.origins[facts.path] = '"auto": the machine'
            return
        if facts.auto is None:
            self.problems.append(_refusal(facts))
            del document[name]
            return
        if facts.path in self.supplied:
            document[name] = self.supplied[facts.path]
            self.origins[facts.path] = '"auto": supplied by the framework'
            return
        value, self.origins[facts.path] = self._rule(facts.auto)
        if value is None:
            del document[name]
        else:
            document[name] = value

    def _rule(self, rule: Auto) -> tuple[int | None, str]:
        """Return the value that a rule gives, None for the default, and its origin."""
        hidden = self.hidden_size
        match rule:
            case Auto.BATCH:
                return None, '"auto": from the other batch sizes'
            case Auto.REQUIRED:
                return None, UNRESOLVED
            case Auto.DEFAULT:
                return None, '"auto": default'
            case Auto.FRAMEWORK | Auto.MACHINE:
                return None, '"auto": default, no framework gave it'
            case Auto.HIDDEN_SQUARED | Auto.PREFETCH | Auto.PERSISTENCE:
                if hidden is None:
                    return None, '"auto": default, the hidden size is not known'
                return hidden_size_rule(rule, hidden), f'"auto": hidden size {hidden}'


def hidden_size_rule(rule: Auto, hidden_size: int) -> int:
    """Return the value of a key that follows from the model's hidden size."""
    match rule:
        case Auto.HIDDEN_SQUARED:
            return hidden_size * hidden_size
        case Auto.PREFETCH:
            return hidden_size * hidden_size * 9 // 10
        case Auto.PERSISTENCE:
            return 10 * hidden_size
        case _:
            raise ValueError(f"{rule.name} does not follow from the hidden size")


def hidden_size_of(model: object) -> int | None:
    """Return the hidden size that a model's own `config` names, as transformers does it."""
    config = getattr(model, "config", model)
    for holder in (config, getattr(config, "text_config", None)):
        size = getattr(holder, "hidden_size", None)
        if isinstance(size, int):
            return size
        sizes = getattr(holder, "hidden_sizes", None)
        if isinstance(sizes, list | tuple) and sizes:
            return max(int(size) for size in sizes)
    return None


def resolve_autos(
    document: dict[str, Any],
    origins: dict[str, str],
    hidden_size: int | None,
    supplied: Mapping[str, Any],
) -> list[str]:
    """Resolve every "auto" of a document in place; return the errors about others."""
    resolver = _Resolver(origins, hidden_size, supplied, [])
    resolver.visit(document, Document, "")
    for name in ("optimizer", "scheduler"):
        entry = document.get(name)
        if not isinstance(entry, dict) or not isinstance(entry.get("params"), dict):
            continue
        section = params_section(name, entry.get("type"))
        if section is not None:
            resolver.visit(entry["params"], section, f"{name}.params.")
        else:
            _drop_unknown_autos(resolver, entry["params"], f"{name}.params.")
    return resolver.problems


def _drop_unknown_autos(resolver: _Resolver, params: dict[str, Any], prefix: str) -> None:
    """Refuse "auto" among arguments of which nothing is known here."""
    for name in [name for name, value in params.items() if value == "auto"]:
        path = f"{prefix}{name}"
        if path in resolver.supplied:
            params[name] = resolver.supplied[path]
            resolver.origins[path] = '"auto": supplied by the framework'
        else:
            del params[name]
            resolver.problems.append(
                f'{path}: "auto" is not accepted by this type; write a value or remove the key'
            )


def _objects(value: object, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects that stand at a key: itself, or the entries of a list."""
    if isinstance(value, dict):
        yield path, value
    elif isinstance(value, list):
        for position, entry in enumerate(value):
            if isinstance(entry, dict):
                yield f"{path}[{position}]", entry


def takes_auto_itself(facts: KeyFacts) -> bool:
    """Say whether "auto" is a value like another for this kind."""
    match facts.kind:
        case ByteSize(auto=True) | Free():
            return True
        case Choice(words=words):
            return "auto" in words
        case _:
            return False


def _refusal(facts: KeyFacts) -> str:
    if facts.section is not None:
        return f'{facts.path}: "auto" is not accepted; write an object, or remove the key'
    default = "" if facts.required else f" for its default {shown(facts.default)}"
    return f'{facts.path}: "auto" is not accepted; write a value, or remove the key{default}'
