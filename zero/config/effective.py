"""The configuration that results: every key with its value, and where that came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zero.config.autos import UNRESOLVED, WRITTEN
from zero.config.batch import MICRO, STEPS, TOTAL
from zero.config.config import ZeroConfig
from zero.config.keys import KeyFacts, Section, Standing, facts_of
from zero.config.other_values import ByteSize
from zero.config.param_models import params_section
from zero.config.values import plain

DEFAULT = "default"
_SHOWN_BY_DEFAULT = frozenset(
    {"zero_optimization", "offload_param", "offload_optimizer", "tiers", "aio", "fp16", "bf16"}
)
"""Sections whose keys are shown even where they are left out."""


@dataclass(frozen=True, slots=True)
class Row:
    """One key as it will be used."""

    path: str
    value: Any
    """As JSON can hold it."""
    origin: str
    standing: Standing
    why: str


def effective_rows(config: ZeroConfig, world_size: int | None = None) -> list[Row]:
    """Return the effective configuration, batch sizes resolved where the world size is known."""
    derived = _derived(config, world_size)
    return [derived.get(row.path, row) for row in _rows(config, "", config.origins)]


def written_values(config: ZeroConfig) -> dict[str, Any]:
    """Return what was written or worked out, by path, as JSON can hold it."""
    return {row.path: row.value for row in effective_rows(config) if row.origin != DEFAULT}


def _rows(section: Section, prefix: str, origins: Mapping[str, str]) -> Iterator[Row]:
    for name, info in type(section).model_fields.items():
        facts = facts_of(f"{prefix}{name}", info)
        value = getattr(section, name)
        if facts.section is None:
            yield from _leaf_rows(section, facts, value, origins)
        elif isinstance(value, Section):
            yield from _rows(value, f"{facts.path}.", origins)
        elif isinstance(value, tuple) and value:
            for position, entry in enumerate(value):
                yield from _rows(entry, f"{facts.path}[{position}].", origins)
        elif name in _SHOWN_BY_DEFAULT:
            yield from _rows(facts.section(), f"{facts.path}.", origins)
        else:
            absent = _row(facts, value, origins)
            yield replace(absent, standing=Standing.DETAIL)


def _leaf_rows(
    section: Section, facts: KeyFacts, value: Any, origins: Mapping[str, str]
) -> Iterator[Row]:
    """Yield the row of a key, or those of the arguments that it holds."""
    owner, _, last = facts.path.partition(".")
    model = params_section(owner, getattr(section, "type", None)) if last == "params" else None
    if model is None:
        yield _row(facts, value, origins)
        return
    for name, info in model.model_fields.items():
        argument = facts_of(f"{facts.path}.{name}", info)
        yield _row(argument, value.get(name, argument.default), origins)


def _row(facts: KeyFacts, value: Any, origins: Mapping[str, str]) -> Row:
    origin = origins.get(facts.path, DEFAULT)
    is_auto = origin == UNRESOLVED or (
        value is None and isinstance(facts.kind, ByteSize) and facts.kind.auto
    )
    return Row(facts.path, "auto" if is_auto else plain(value), origin, facts.standing, facts.why)


def _derived(config: ZeroConfig, world_size: int | None) -> dict[str, Row]:
    """Return the rows whose values follow from other keys."""
    rows: dict[str, Row] = {}
    tiers = config.tiers
    if config.nvme_paths() and (tiers is None or not tiers.nvme):
        paths = [{"path": str(entry.path)} for entry in config.nvme_paths()]
        rows["tiers.nvme"] = Row(
            "tiers.nvme", paths, "nvme_path of the offload sections", Standing.IMPLEMENTED, ""
        )
    if world_size is None:
        return rows
    for name, value in zip((TOTAL, MICRO, STEPS), config.batch(world_size), strict=True):
        written = config.origins.get(name) == WRITTEN
        origin = WRITTEN if written else f"derived, world size {world_size}"
        rows[name] = Row(name, value, origin, Standing.IMPLEMENTED, "")
    return rows
