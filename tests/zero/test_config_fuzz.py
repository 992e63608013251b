"""Every key with every kind of wrong value: accepted as documented, or one clear error."""

import math
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero.config import ConfigError, ConfigWarning, load_config
from zero.config.aliases import ALIASES, OLD_OFFLOAD
from zero.config.autos import takes_auto_itself
from zero.config.effective import effective_rows
from zero.config.keys import KeyFacts, Section, Standing, facts_of
from zero.config.models import Document
from zero.config.other_values import (
    ByteSize,
    DurableRun,
    FolderPath,
    Free,
    Numbers,
    Parameters,
    Rates,
    Text,
    TextList,
)
from zero.config.param_models import OPTIMIZER_PARAMS, SCHEDULE_PARAMS
from zero.config.values import Choice, Integer, Number, Switch, shown

CASES = int(os.environ.get("TIERZERO_FUZZ_CASES", "2000"))
"""Cases of each test; another number than the default also draws new ones at every run."""

FUZZ = settings(
    max_examples=CASES,
    deadline=None,
    derandomize="TIERZERO_FUZZ_CASES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def leaves(section: type[Section], prefix: str) -> list[tuple[str, KeyFacts]]:
    """Return the full path of every key, list entries as [0], with its facts."""
    found = []
    for name, info in section.model_fields.items():
        facts = facts_of(f"{prefix}{name}", info)
        found.append((facts.path, facts))
        if facts.section is not None:
            entry = "[0]" if facts.default == () else ""
            found += leaves(facts.section, f"{facts.path}{entry}.")
    return found


KEYS: list[tuple[str, str, KeyFacts]] = [(path, "", facts) for path, facts in leaves(Document, "")]
KEYS += [
    (path, name, facts)
    for name, model in OPTIMIZER_PARAMS.items()
    for path, facts in leaves(model, "optimizer.params.")
]
KEYS += [
    (path, name, facts)
    for name, model in SCHEDULE_PARAMS.items()
    for path, facts in leaves(model, "scheduler.params.")
]
"""Full path, the optimizer or schedule that it belongs to, facts."""

OLD = {alias.old for alias in ALIASES} | OLD_OFFLOAD.keys()

REQUIRED = {
    "WarmupDecayLR": {"total_num_steps": 10000},
    "WarmupCosineLR": {"total_num_steps": 10000},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3},
}


def document_with(path: str, type_name: str, value: object) -> dict[str, Any]:
    """Return the smallest document that holds a value at a path."""
    document: dict[str, Any] = {}
    if path.startswith("optimizer"):
        document["optimizer"] = {"type": type_name or "AdamW", "params": {}}
    if path.startswith("scheduler"):
        params = dict(REQUIRED.get(type_name, {}))
        document["scheduler"] = {"type": type_name or "WarmupLR", "params": params}
    if path.startswith("tiers.state_formats["):
        rule = {"parameters": "*.bias", "state_format": "exact"}
        document["tiers"] = {"state_formats": [rule]}
    if path.startswith("tiers.nvme["):
        document["tiers"] = {"nvme": [{"path": "/nvme"}]}
    here: Any = document
    *parents, last = path.replace("[0]", ".[0]").split(".")
    for name in parents:
        here = here[0] if name == "[0]" else here.setdefault(name, {})
    here[last] = value
    return document


def typo(name: str, position: int, letter: str) -> str:
    """Return a name with one letter doubled, dropped or replaced."""
    position %= len(name)
    kind = ord(letter) % 3
    if kind == 0:
        return name[:position] + letter + name[position:]
    if kind == 1 and len(name) > 4:
        return name[:position] + name[position + 1 :]
    return name[:position] + letter + name[position + 1 :]


def load(document: dict[str, Any]) -> tuple[Any, list[str]]:
    """Load a document; return the configuration, or None and the lines of the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = load_config(document)
        except ConfigError as error:
            return None, str(error).splitlines()
    assert all(entry.category is ConfigWarning for entry in caught)
    return config, [str(entry.message) for entry in caught]


def accepts(facts: KeyFacts, value: object) -> bool | None:  # noqa: PLR0911  a table of cases
    """Say what the reference page says about a value; None where other keys decide."""
    if facts.path.startswith("zero_optimization.zenflow."):
        return False  # the section is refused as a whole
    if facts.path == "zero_optimization" and isinstance(value, bool):
        return True  # the oldest spelling
    if facts.section is not None:
        if value == {"enabled": True}:
            return None  # as the key `enabled` says
        empty = [] if facts.default == () else {}
        lacks_type = facts.path in {"optimizer", "scheduler"}
        refused = facts.standing is Standing.REFUSED or lacks_type
        return (value is None and facts.default is None) or (value == empty and not refused)
    if value == "auto" and facts.auto is not None:
        return True
    if value == "auto" and not takes_auto_itself(facts):
        return False
    if value is None:
        right = facts.kind.nullable or isinstance(facts.kind, Free)
    else:
        right = ACCEPTS[type(facts.kind)](facts.kind, value)
    if right and facts.standing is Standing.REFUSED:
        off = isinstance(facts.kind, Free) and not value
        return off or value == facts.default or value in facts.accepts
    return right


def whole(value: object) -> bool:
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    )


def spellings(value: object) -> list[str]:
    """Return a value as the file has it, and as an integer or a float that it is read as.

    What is left out of a mapping is filled in behind what is there.
    """
    texts = [shown(value)]
    if isinstance(value, dict) and value:
        texts.append(shown(value)[:-1])
    if whole(value) and abs(value) < 1e300:
        texts += [shown(int(value)), shown(float(value))]
    return texts


def is_size(text: str) -> bool:
    if text in {"8GB", "1.5 GiB"}:
        return True
    return text.strip().isascii() and text.strip().isdigit() and 0 < int(text) <= 1 << 63


def finite(kind: Number, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if not abs(value) <= sys.float_info.max:
        return False
    low = (
        kind.minimum is None
        or value > kind.minimum
        or (value == kind.minimum and not kind.above_minimum)
    )
    high = (
        kind.maximum is None
        or value < kind.maximum
        or (value == kind.maximum and not kind.below_maximum)
    )
    return low and high


ACCEPTS: dict[type, Callable[[Any, Any], bool | None]] = {
    Switch: lambda kind, value: isinstance(value, bool),
    Integer: lambda kind, value: (
        (whole(value) and kind.minimum <= value <= kind.maximum and value % kind.multiple_of == 0)
        or (kind.infinite and value == math.inf)
    ),
    Number: finite,
    Choice: lambda kind, value: (
        isinstance(value, str)
        and (value in kind.words or (kind.any_case and value.lower() in map(str.lower, kind.words)))
    ),
    Text: lambda kind, value: None if isinstance(value, str) else False,
    FolderPath: lambda kind, value: (
        None if str(value).startswith("~") else isinstance(value, str) and bool(value.strip())
    ),
    ByteSize: lambda kind, value: (
        (whole(value) and 0 < value <= 1 << 63)
        or (kind.auto and value == "auto")
        or (isinstance(value, str) and is_size(value))
    ),
    Numbers: lambda kind, value: (
        isinstance(value, list)
        and len(value) == kind.length
        and all(finite(kind.entry, entry) for entry in value)
    ),
    TextList: lambda kind, value: (
        isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(entry, str) for entry in value))
    ),
    Parameters: lambda kind, value: None if isinstance(value, dict) else False,
    Rates: lambda kind, value: (
        finite(Number(), value)
        or (isinstance(value, list) and all(finite(Number(), entry) for entry in value))
    ),
    DurableRun: lambda kind, value: (
        None if isinstance(value, dict) and value.get("name") == "run-1" else value is False
    ),
    Free: lambda kind, value: True,
}

VALUES = st.one_of(
    st.none(),
    st.just("auto"),
    st.sampled_from([True, False]),
    st.sampled_from([-1, -7, 0, 1, 2, 3, 64, 4096, 10**6]),
    st.sampled_from([0.5, 1.5, -0.5, 3.0, 5e8, 4096.0, 1e-8]),
    st.sampled_from([10**18, 2**63, 2**63 + 1, 10**30, 10**400, 1e300, math.inf, -math.inf]),
    st.just(math.nan),
    st.sampled_from(["", " ", "8", "8GB", "1.5 GiB", "true", "cpu", "nvme", "AdamW", "x" * 300]),
    st.sampled_from([[], {}, [1], [0.9, 0.99], ["a"], {"a": 1}, [[[]]], {"enabled": True}]),
    st.sampled_from([{"name": "run-1"}, {"name": "../run"}, {"every_steps": 2}]),
    st.text(max_size=8).filter(lambda text: text.strip() and "\0" not in text),
    st.integers(),
    st.floats(),
)


@FUZZ
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_every_key_with_any_value(key: tuple[str, str, KeyFacts], value: object) -> None:
    path, type_name, facts = key
    document = document_with(path, type_name, value)
    config, lines = load(document)
    expected = accepts(facts, value)
    if config is None:
        assert all("; " in line and len(line) < 1200 for line in lines)
        if not is_refused_for_another(path, lines):
            assert expected is not True, lines
            assert all(line.startswith(path) for line in lines)
            inside = lines[0].startswith((f"{path}.", f"{path}["))
            assert inside or any(text[:40] in lines[0] for text in spellings(value))
        return
    assert expected is not False, f"{path} = {value!r} was accepted"
    named = [origin for origin in config.origins if origin.startswith(path)]
    assert named or value in ({}, []), "a key was dropped in silence"
    if facts.standing is Standing.NO_EFFECT and facts.section is None:
        silent = value in (None, False, "auto", math.inf) or value == []
        assert silent or any(path in line for line in lines), "no warning"
    rows = effective_rows(config)
    assert any(row.path.startswith(path) or path.startswith(row.path) for row in rows)
    try:
        config.settings(2)
    except ConfigError as error:
        assert all("; " in line for line in str(error).splitlines())


def is_refused_for_another(path: str, lines: list[str]) -> bool:
    """Say whether a value that may be right is refused for what another key says or lacks."""
    text = "\n".join(lines)
    return (
        (path.endswith(".device") and "nvme_path: null with device nvme" in text)
        or path.startswith("zero_optimization.zenflow.")
        or (path in {"optimizer", "scheduler"} and f"{path}.type: is missing" in text)
    )


@FUZZ
@given(
    key=st.sampled_from(KEYS),
    position=st.integers(min_value=0, max_value=60),
    letter=st.sampled_from("abcxyz_0"),
)
def test_every_key_with_a_typo(key: tuple[str, str, KeyFacts], position: int, letter: str) -> None:
    path, type_name, _ = key
    parent, dot, name = path.rpartition(".")
    wrong = typo(name, position, letter)
    wrong_path = f"{parent}{dot}{wrong}"
    if wrong_path in {known for known, _, _ in KEYS} or wrong in OLD:
        return
    document = document_with(path, type_name, 1)
    here: Any = document
    for part in parent.replace("[0]", ".[0]").split(".") if parent else []:
        here = here[0] if part == "[0]" else here[part]
    here[wrong] = here.pop(name)
    config, lines = load(document)
    assert config is None, f"{wrong_path} was accepted"
    (line,) = [line for line in lines if line.startswith(f"{wrong_path}: unknown key")]
    assert "with the value 1; " in line
    if len(name) > 4:
        assert "did you mean" in line or "it belongs at" in line


def test_the_fuzz_covers_what_it_says() -> None:
    assert len(KEYS) > 280
    kinds = {type(facts.kind) for _, _, facts in KEYS if facts.kind is not None}
    assert kinds == ACCEPTS.keys()
