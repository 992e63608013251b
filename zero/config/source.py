"""Reading a configuration from a mapping, a file, or base64, with duplicates refused."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero.config.values import shown
from zero.errors import ConfigError

LARGEST_FILE_BYTES = 16 << 20
DEEPEST_NESTING = 32


def read_source(
    source: str | os.PathLike[str] | Mapping[str, Any],
) -> tuple[dict[str, Any], str, list[str]]:
    """Return the document, the name of where it came from, and notices."""
    if isinstance(source, Mapping):
        return _plain_object(source, "", 0), "the dict", []
    if isinstance(source, str | os.PathLike):
        return _read_text_source(source)
    raise ConfigError(
        f"a configuration must be a dict, a path or base64 text, got {type(source).__name__}; "
        "pass config=<dict or path>"
    )


def _read_text_source(
    source: str | os.PathLike[str],
) -> tuple[dict[str, Any], str, list[str]]:
    if not os.fspath(source):
        raise ConfigError("the path of the configuration file is empty; give a path, or a dict")
    path = Path(source)
    if isinstance(source, str) and not _exists(path):
        text = _decode_base64(source)
        if text is not None:
            document, notices = parse_text(text, "the base64 text")
            return document, "the base64 text", notices
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise ConfigError(
                f"configuration file {path} has {path.stat().st_size} bytes, at most "
                f"{LARGEST_FILE_BYTES} are read; check the path"
            )
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {shown(str(path))} does not exist, nor is it base64 of a JSON "
            f"object; check the path (the working directory is {Path.cwd()})"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path} is not UTF-8 ({error}); save it so") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"configuration file {shown(str(path))} cannot be read: {reason}; give a readable file"
        ) from None
    document, notices = parse_text(text, str(path))
    return document, str(path), notices


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _decode_base64(text: str) -> str | None:
    """Return the JSON text that base64 holds, or None if this is not such a thing."""
    padded = text.strip()
    padded += "=" * (-len(padded) % 4)
    try:
        decoded = base64.b64decode(
            padded, altchars=b"-_" if set("-_") & set(text) else None, validate=True
        ).decode()
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def parse_text(text: str, name: str) -> tuple[dict[str, Any], list[str]]:
    """Parse strict JSON, or hjson where that is installed; return the document and notices."""
    notices: list[str] = []
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except json.JSONDecodeError as error:
        document = _parse_hjson(text, name, error)
        notices.append(f"{name} is not strict JSON ({_where(error)}); it was read as hjson")
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise ConfigError(f"{name}: {error}") from None
        raise ConfigError(
            f"{name} is not usable JSON: {str(error)[:200]}; shorten the value"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f"{name} must hold one JSON object, got {shown(document)}; write {{...}}")
    return _plain_object(document, "", 0), notices


def _where(error: json.JSONDecodeError) -> str:
    return f"{error.msg} at line {error.lineno}, column {error.colno}"


def _parse_hjson(text: str, name: str, error: json.JSONDecodeError) -> object:
    try:
        import hjson  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError(
            f"{name} is not JSON: {_where(error)}; correct it there, or `pip install hjson` if "
            "it is meant as hjson (comments, trailing commas)"
        ) from None
    try:
        return hjson.loads(text, object_pairs_hook=_unique)
    except hjson.HjsonDecodeError as second:
        raise ConfigError(
            f"{name} is neither JSON ({_where(error)}) nor hjson ({second}); correct it there"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict, refusing a key that occurs twice."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ConfigError(
                f"key {shown(name)} occurs twice in one object, with {shown(result[name])} and "
                f"{shown(value)}; keep one"
            )
        result[name] = value
    return result


def _constant(text: str) -> float:
    return float(text.replace("Infinity", "inf"))


def _plain_object(value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
    """Copy mappings and lists, so that nobody can change the document afterwards."""
    result = {}
    for name, entry in value.items():
        if not isinstance(name, str):
            raise ConfigError(
                f"{path or 'the configuration'} has the key {shown(name)}, a "
                f"{type(name).__name__}; keys are strings"
            )
        result[name] = _plain(entry, f"{path}.{name}" if path else name, depth + 1)
    return result


def _plain(value: Any, path: str, depth: int) -> Any:
    if depth > DEEPEST_NESTING:
        raise ConfigError(
            f"{path[:80]}... is nested deeper than {DEEPEST_NESTING} objects; flatten it"
        )
    if isinstance(value, Mapping):
        return _plain_object(value, path, depth)
    if isinstance(value, list | tuple):
        return [_plain(entry, f"{path}[{i}]", depth + 1) for i, entry in enumerate(value)]
    return value
