"""Tensors in what modules take and return: containers and plain objects of any structure."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator
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
    for name in getattr(type(item), "__slots__", ()):
        if hasattr(item, name):
            yield getattr(item, name)


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
    if isinstance(value, torch.Tensor):
        return value.clone() if aliases(value, storages) else value
    if not any(aliases(tensor, storages) for tensor in tensors_in(value)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cloned(item, storages) for item in value))
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return type(value)(cloned(item, storages) for item in value)
    twin = copy.copy(value)
    if isinstance(value, dict):
        for key, item in value.items():
            twin[key] = cloned(item, storages)
    for name in (*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())):
        if hasattr(value, name):
            object.__setattr__(twin, name, cloned(getattr(value, name), storages))
    return twin
