"""Plain data: any nest of numbers, text, containers and tensors, as JSON beside named tensors.

What is read back has the same types, bit for bit, and reading runs no code: there is no pickle.
What JSON lacks is written as an object whose only key begins with a dollar sign.
"""

from __future__ import annotations

import base64
import collections
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

_KNOWN = (
    "None, bool, int, float, str, bytes, list, tuple, set, dict, Counter, tensors and numpy arrays"
)
_MAX_DEPTH = 100


class NotPlainError(TypeError):
    """A value that cannot be written without pickle; names where it is."""


class PlainDataError(ValueError):
    """JSON that no value was written as."""


def to_plain(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` as JSON data; its tensors are put into `tensors`, by names that it holds.

    Args:
        value: what to write.
        name: what to call it in messages and names of tensors.
        tensors: receives private copies on the CPU.

    Raises:
        NotPlainError: naming the first thing that is no plain data.
    """
    return _encode(value, name, tensors, 0)


def from_plain(data: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `to_plain` wrote.

    Raises:
        PlainDataError: if the data are damaged.
    """
    if isinstance(data, list):
        return [from_plain(each, tensors) for each in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        tag, content = next(iter(data.items()))
        if tag.startswith("$"):
            return _decode(tag, content, tensors)
    return {key: from_plain(each, tensors) for key, each in data.items()}


def dump_plain(data: Any) -> str:
    """Return JSON text of what `to_plain` returned, the same for the same data."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise NotPlainError(f"{name} is nested more than {_MAX_DEPTH} deep, or holds itself")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    kind = type(value)
    if kind is list:
        return [
            _encode(each, f"{name}[{index}]", tensors, depth + 1)
            for index, each in enumerate(value)
        ]
    if kind in _SEQUENCES:
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        return {_SEQUENCES[kind]: _encode(list(items), name, tensors, depth + 1)}
    if isinstance(value, dict):
        return _encode_mapping(value, name, tensors, depth)
    return _encode_data(value, name, tensors)


def _encode_mapping(
    value: dict[Any, Any], name: str, tensors: dict[str, torch.Tensor], depth: int
) -> Any:
    if type(value) not in (dict, collections.OrderedDict, collections.Counter):
        raise NotPlainError(_refusal(name, value))
    pairs = [
        (key, _encode(each, f"{name}[{key!r}]", tensors, depth + 1)) for key, each in value.items()
    ]
    if type(value) is collections.Counter:
        return {"$counter": [[_encode(k, name, tensors, depth + 1), each] for k, each in pairs]}
    if all(type(key) is str for key, _ in pairs) and not any(key[:1] == "$" for key, _ in pairs):
        return dict(pairs)
    return {"$dict": [[_encode(k, name, tensors, depth + 1), each] for k, each in pairs]}


def _encode_data(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            raise NotPlainError(_refusal(name, value, f" ({value.layout}, on {value.device})"))
        return {"$tensor": _keep(value.detach(), name, tensors)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        array = np.array(value)
        kind = "$array" if isinstance(value, np.ndarray) else "$scalar"
        raw = np.frombuffer(array.tobytes(), np.uint8).copy()
        stored = _keep(torch.from_numpy(raw), name, tensors)
        return {kind: [stored, array.dtype.str, list(array.shape)]}
    if type(value) is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if type(value) is torch.device:
        return {"$device": str(value)}
    raise NotPlainError(_refusal(name, value))


def _refusal(name: str, value: Any, detail: str = "") -> str:
    kind = type(value)
    return (
        f"{name} is a {kind.__module__}.{kind.__qualname__}{detail}, which cannot be written: there"
        f" is no pickle in what is saved. It takes {_KNOWN}; give its contents as those"
    )


def _keep(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> str:
    key, number = name, 1
    while key in tensors:
        number += 1
        key = f"{name}#{number}"
    tensors[key] = tensor.to("cpu", copy=True).contiguous()
    return key


def _decode(tag: str, content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    decode = _DECODERS.get(tag)
    if decode is None:
        raise PlainDataError(f"there is no kind of value {tag!r}; a newer version wrote it")
    try:
        return decode(content, tensors)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise PlainDataError(f"a {tag} cannot be read: {type(error).__name__} {error}") from error


def _pairs(content: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {from_plain(key, tensors): from_plain(each, tensors) for key, each in content}


def _sequence(kind: Any, content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    return kind(from_plain(content, tensors))


def _array(content: Any, tensors: Mapping[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    key, dtype, shape = content
    if np.dtype(dtype).kind not in "biuf":
        raise ValueError(f"{dtype} is no type of numbers")
    return np.frombuffer(tensors[key].numpy().tobytes(), dtype).reshape(shape).copy()


def _dtype(content: Any, _tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    found = getattr(torch, content)
    if type(found) is not torch.dtype:
        raise ValueError(f"{content} is no type")
    return found


_SEQUENCES: dict[Any, str] = {
    tuple: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
    torch.Size: "$size",
}
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_DECODERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    "$float": lambda content, _: _FLOATS[content],
    "$bytes": lambda content, _: base64.b64decode(content, validate=True),
    "$tensor": lambda content, tensors: tensors[content].clone(),
    "$array": _array,
    "$scalar": lambda content, tensors: _array(content, tensors)[()],
    "$dtype": _dtype,
    "$device": lambda content, _: torch.device(content),
    "$dict": _pairs,
    "$counter": lambda content, tensors: collections.Counter(_pairs(content, tensors)),
    **{tag: functools.partial(_sequence, kind) for kind, tag in _SEQUENCES.items()},
}
