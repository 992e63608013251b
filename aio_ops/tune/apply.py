"""What was found best as a part of a configuration, and merging it into a file."""

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aio_ops.tune.settings import Setting

_LARGEST_FILE_BYTES = 16 << 20
_ALIASES = {"thread_count": "intra_op_parallelism"}


class ApplyError(Exception):
    """Why a configuration cannot take the choice: what happened, and what to do."""


def fragment(
    setting: Setting, directories: Iterable[Path], *, bursts: bool = False
) -> dict[str, Any]:
    """Return the keys that a configuration gets: the field's, `aio.engine` and `tiers`.

    `bursts`: bursts by turns were better, so the engine is to look for them on its swap file.
    """
    return {
        "aio": {
            "engine": setting.engine,
            "block_size": setting.block_bytes,
            "queue_depth": setting.queue_depth,
            "intra_op_parallelism": setting.thread_count,
        },
        "tiers": {
            "nvme": [{"path": str(directory.resolve())} for directory in directories],
            **({"io_schedule": "measure"} if bursts else {}),
        },
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
    if "nvme" in part.get("tiers", {}):
        merged["tiers"]["nvme"] = _nvme_entries(document, part["tiers"]["nvme"])
        _follow(merged, [entry["path"] for entry in merged["tiers"]["nvme"]])
    return merged


def _nvme_entries(document: Mapping[str, Any], entries: list[dict[str, Any]]) -> list[Any]:
    known = (document.get("tiers") or {}).get("nvme") or []
    if not isinstance(known, list):
        raise ApplyError(f"tiers.nvme is {json.dumps(known)}, not a list; correct it first")
    said = {entry["path"]: entry for entry in known if isinstance(entry, dict) and "path" in entry}
    return [{**said.get(entry["path"], {}), **entry} for entry in entries]


def _follow(merged: dict[str, Any], paths: list[str]) -> None:
    """Let the field's own key name a directory of these where it names one: it has no effect."""
    zero = merged.get("zero_optimization")
    if zero is None or isinstance(zero, bool):  # the field's oldest form: true is stage 1
        return
    if not isinstance(zero, dict):
        said = json.dumps(zero)
        raise ApplyError(f"zero_optimization is {said}, not an object; correct it first")
    merged["zero_optimization"] = zero = dict(zero)
    for name in ("offload_param", "offload_optimizer"):
        section = zero.get(name)
        if isinstance(section, dict) and section.get("nvme_path") not in (None, *paths):
            zero[name] = {**section, "nvme_path": paths[0]}


def apply(path: Path, part: Mapping[str, Any]) -> Path | None:
    """Merge a fragment into a configuration file, at once or not at all.

    Returns the copy of the file as it was, beside it under a new name; None: nothing changes.
    """
    target = path.resolve()  # a link stays one
    document = read(target)
    merged = merge(document, part)
    if merged == document:
        return None
    kept = _keep(target)
    try:
        _replace(target, json.dumps(merged, indent=2, ensure_ascii=False) + "\n")
    except BaseException:
        kept.unlink()
        raise
    return kept


def check_applicable(path: Path, part: Mapping[str, Any]) -> None:
    """Raise ApplyError now where `apply` would later."""
    target = path.resolve()
    merge(read(target), part)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise ApplyError(
            f"{target.parent} cannot be written, so {target.name} cannot be replaced; give this "
            "user the right, or leave --apply out and merge the fragment by hand"
        )


def _keep(target: Path) -> Path:
    """Copy a file to the first name that is free: its own and .bak, .bak2, ..."""
    content, mode = target.read_bytes(), target.stat().st_mode & 0o7777
    for number in itertools.count(1):
        kept = target.with_name(f"{target.name}.bak{number if number > 1 else ''}")
        with contextlib.suppress(FileExistsError):
            descriptor = _open_new(kept, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            return kept
    raise RuntimeError("there is no end to the numbers")


def _open_new(path: Path, mode: int) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _unwritable(folder: Path, error: OSError) -> ApplyError:
    return ApplyError(f"{folder} cannot be written ({error.strerror}); merge the fragment by hand")


def _replace(target: Path, text: str) -> None:
    mode = target.stat().st_mode & 0o7777
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        raise _unwritable(target.parent, error) from error
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
