"""Where a model's shape comes from: a preset, a `config.json`, a folder, safetensors headers."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimators.models import classic, decoders, encoders
from estimators.models.draft import Fields, ModelError
from estimators.models.presets import PRESETS
from estimators.models.shapes import ModelShape, ParameterShape

_FAMILIES: dict[str, Callable[[Fields, str], ModelShape]] = {
    **dict.fromkeys(decoders.VARIANTS, decoders.rotary_decoder),
    "gpt2": classic.gpt2,
    "gpt_neox": classic.gpt_neox,
    "opt": classic.opt,
    "falcon": classic.falcon,
    "phi": classic.phi,
    "bert": encoders.bert,
    "roberta": encoders.bert,
    "vit": encoders.vit,
    "t5": encoders.t5,
}

_MAX_HEADER_BYTES = 100_000_000
_BLOCK = re.compile(r"^(?P<container>.*?)\.(?P<index>\d+)\.")


def model_families() -> tuple[str, ...]:
    """Return the values of `model_type` that are known."""
    return tuple(sorted(_FAMILIES))


def model_of_config(config: Mapping[str, Any], name: str = "config.json") -> ModelShape:
    """Return the model that a Hugging Face style configuration describes.

    Raises:
        ModelError: if its type is not known, or a key is missing or wrong.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ModelError(
            f"{name}: model_type {family!r} is not known; known are {', '.join(model_families())}."
            " A folder with safetensors gives the parameters of any model, and `module:function`"
            " builds one on meta"
        )
    return _FAMILIES[family](Fields(config, name), family)


def preset(name: str) -> ModelShape:
    """Return a well-known model.

    Raises:
        ModelError: if there is none of that name; it suggests the nearest.
    """
    config = PRESETS.get(name.lower())
    if config is None:
        near = difflib.get_close_matches(name.lower(), PRESETS, 3, 0.5)
        meant = (
            f"; did you mean {', '.join(near)}?" if near else f"; known are {', '.join(PRESETS)}"
        )
        raise ModelError(f"there is no model named {name!r}, and no such file or folder{meant}")
    return model_of_config(config, name.lower())


def load_model(source: str) -> ModelShape:
    """Return a model from a preset's name, a `config.json`, or a folder.

    A folder gives its `config.json`, or where that is missing or of a type that is not known, the
    headers of its safetensors files: sizes then, but no activations.

    Raises:
        ModelError: if none of these can be read.
    """
    path = Path(source)
    if path.is_dir():
        return _model_of_folder(path)
    if path.is_file():
        if path.suffix == ".safetensors":
            return model_of_headers(_header(path), str(path))
        return model_of_config(_read_json(path), str(path))
    return preset(source)


def _model_of_folder(folder: Path) -> ModelShape:
    config = folder / "config.json"
    files = sorted(folder.glob("*.safetensors"))
    if config.is_file():
        values = _read_json(config)
        if not files or values.get("model_type") in _FAMILIES:
            return replace(model_of_config(values, str(config)), name=str(folder))
    if not files:
        raise ModelError(f"{folder} has neither a config.json nor safetensors files")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(_header(file))
    return model_of_headers(shapes, str(folder))


def model_of_headers(shapes: Mapping[str, tuple[int, ...]], name: str) -> ModelShape:
    """Return a model of which only names and shapes are known.

    Blocks are told by their names: `layers.0.`, `layers.1.` and so on hold the same parameters.
    """
    blocks = _repeated(shapes)
    parameters = [
        ParameterShape(each, shape, blocks.get(each, "")) for each, shape in shapes.items()
    ]
    order = {block: _natural(block) for block in set(blocks.values())}
    parameters.sort(key=lambda each: order.get(each.block, ()))
    return ModelShape(name, "headers", tuple(parameters))


def _natural(block: str) -> tuple[str | int, ...]:
    return ("", *(int(part) if part.isdigit() else part for part in block.split(".")))


def _repeated(names: Iterable[str]) -> dict[str, str]:
    """Return the block of each parameter that is in one of several of its container."""
    found: dict[str, set[str]] = {}
    of: dict[str, tuple[str, str]] = {}
    for name in names:
        match = _BLOCK.match(name)
        if match:
            container, index = match["container"], match["index"]
            found.setdefault(container, set()).add(index)
            of[name] = (container, f"{container}.{index}")
    return {name: block for name, (container, block) in of.items() if len(found[container]) > 1}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds {type(found).__name__}, not an object")
    return found


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the header of a safetensors file; its data is not read."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
            raise ModelError(f"{path} is no safetensors file: its header would be {size} bytes")
        text = file.read(size)
    try:
        entries = json.loads(text)
        return {
            name: tuple(int(each) for each in entry["shape"])
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} has a header that cannot be read: {error!r}") from error
