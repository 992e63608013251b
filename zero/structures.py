"""Tensors in what modules take and return: containers and plain objects of any structure."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def _children(item: Any) -> Iterator[Any]:
    """Yield what a container or a plain object holds."""
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset | collections.deque):
        yield from item
    if isinstance(item, nn.Module):
        return
    if hasattr(item, "__dict__"):
        yield from vars(item).values()
    for name in _slots_of(type(item)):
        if hasattr(item, name):
            yield getattr(item, name)


def _slots_of(kind: type) -> Iterator[str]:
    """Yield the attributes that a class and those it derives from keep in slots."""
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            yield f"_{each.__name__.lstrip('_')}{name}" if is_private else name


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and plain objects."""
    pending = [value]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif (
            item is not None
            and not isinstance(item, str | bytes | int | float | type)
            and id(item) not in seen
        ):
            seen.add(id(item))
            pending.extend(_children(item))


def aliases(tensor: torch.Tensor, storages: set[int]) -> bool:
    """Tell whether a tensor lies in one of the given storages."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in storages


def cloned(value: Any, storages: set[int]) -> Any:
    """Return `value` with tensors on the given storages cloned; containers keep their class."""
    return replaced(value, lambda tensor: aliases(tensor, storages), torch.clone)


def replaced(
    value: Any,
    is_meant: Callable[[torch.Tensor], bool],
    make: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """Return `value` with what `make` gives for some of its tensors; containers keep their class.

    Args:
        value: tensors in containers and plain objects of any structure.
        is_meant: tells which tensors are replaced; if none is, `value` itself is returned.
        make: gives what takes the place of a tensor.
    """
    if isinstance(value, torch.Tensor):
        return make(value) if is_meant(value) else value
    if not any(map(is_meant, tensors_in(value))):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, is_meant, make) for item in value))
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return type(value)(replaced(item, is_meant, make) for item in value)
    twin = copy.copy(value)
    if isinstance(value, dict):
        for key, item in value.items():
            twin[key] = replaced(item, is_meant, make)
    for name in (*getattr(value, "__dict__", ()), *_slots_of(type(value))):
        if hasattr(value, name):
            object.__setattr__(twin, name, replaced(getattr(value, name), is_meant, make))
    return twin
