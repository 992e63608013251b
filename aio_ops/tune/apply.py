"""The tuned choice as a part of a configuration, and merging it into a file."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aio_ops.tune.settings import Setting

_LARGEST_FILE_BYTES = 16 << 20
_ALIASES = {"thread_count": "intra_op_parallelism"}


class ApplyError(Exception):
    """Why a configuration cannot take the choice: what happened, and what to do."""


def fragment(setting: Setting, directory: Path) -> dict[str, Any]:
    """Return the keys that a configuration gets: the field's, `aio.engine` and `tiers.nvme`."""
    return {
        "aio": {
            "engine": setting.engine,
            "block_size": setting.block_bytes,
            "queue_depth": setting.queue_depth,
            "intra_op_parallelism": setting.thread_count,
        },
        "tiers": {"nvme": [{"path": str(directory.resolve())}]},
    }


def merge(document: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys of a fragment; everything else stays as it is.

    A directory keeps what the configuration says about it, and another name of a key that the
    fragment has goes, for a key under two names is an error.
    """
    merged = dict(document)
    for section, keys in part.items():
        present = merged.get(section) or {}
        if not isinstance(present, dict):
            raise ApplyError(f"{section} is {json.dumps(present)}, not an object; correct it first")
        merged[section] = {**present, **keys}
    for alias, name in _ALIASES.items():
        if name in part.get("aio", {}):
            merged["aio"].pop(alias, None)
    if "tiers" in part:
        merged["tiers"]["nvme"] = _nvme_entries(document, part["tiers"]["nvme"])
        _follow(merged, merged["tiers"]["nvme"][0]["path"])
    return merged


def _nvme_entries(document: Mapping[str, Any], entries: list[dict[str, Any]]) -> list[Any]:
    known = (document.get("tiers") or {}).get("nvme") or []
    said = {entry["path"]: entry for entry in known if isinstance(entry, dict) and "path" in entry}
    return [{**said.get(entry["path"], {}), **entry} for entry in entries]


def _follow(merged: dict[str, Any], path: str) -> None:
    """Let the field's own key name the same directory where it names one: it has no effect else."""
    zero = merged.get("zero_optimization")
    if not isinstance(zero, dict):
        return
    merged["zero_optimization"] = zero = dict(zero)
    for name in ("offload_param", "offload_optimizer"):
        section = zero.get(name)
        if isinstance(section, dict) and section.get("nvme_path") is not None:
            zero[name] = {**section, "nvme_path": path}


def apply(path: Path, part: Mapping[str, Any]) -> None:
    """Merge a fragment into a configuration file, at once or not at all."""
    target = path.resolve()  # a link stays one
    document = read(target)
    text = json.dumps(merge(document, part), indent=2, ensure_ascii=False) + "\n"
    mode = target.stat().st_mode & 0o7777
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        raise ApplyError(
            f"{target.parent} cannot be written ({error.strerror}); merge the fragment by hand"
        ) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, Any]:
    """Return a configuration that can be merged into, or raise ApplyError."""
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise ApplyError(f"{path} has {path.stat().st_size} bytes; is it a configuration?")
        document = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_unique)
    except OSError as error:
        raise ApplyError(f"{path} cannot be read: {error.strerror}; check the path") from error
    except ValueError as error:
        raise ApplyError(
            f"{path} is not strict JSON ({error}); merge the fragment by hand, or make it JSON"
        ) from error
    if not isinstance(document, dict):
        raise ApplyError(f"{path} holds no JSON object; write {{...}}")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"the key {sorted(twice)[0]!r} occurs twice in one object")
    return dict(pairs)
