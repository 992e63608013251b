"""One call of a torch function with sharded arguments: gather, run, write back, wrap; see
[Note: touch].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from offload import Field
from zero import touch_tables as tables
from zero.errors import ShardedAccessError
from zero.parameter import Sharded, ShardedParameter, ShardedView, source_of
from zero.source import ShardSource

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
SHARDED = (ShardedParameter, ShardedView)


def run_plainly(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Run a function on sharded objects as they are."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class _HandGradient(torch.autograd.Function):
    """Gives the gradient of a gathered copy to its parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, copy: list[torch.Tensor]) -> torch.Tensor:
        ctx.parameter, ctx.version = parameter, parameter._version
        return copy[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.parameter._version != ctx.version:
            name = source_of(ctx.parameter).name if isinstance(ctx.parameter, SHARDED) else "?"
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: parameter {name}, which was read at version {ctx.version};"
                " run the forward again after changing it"
            )
        return gradient, None


@dataclass(slots=True, eq=False)
class _Copy:
    """The private copy of one field of one parameter during a call."""

    parameter: nn.Parameter
    source: ShardSource
    field: Field
    full: torch.Tensor
    version: int
    node: Any = None
    """The autograd node of `full`, if the call follows gradients."""

    @property
    def storage(self) -> int:
        """Identity of the copy's memory."""
        return int(self.full.untyped_storage()._cdata)

    def geometry(self, view: ShardedView, *, with_gradient: bool) -> torch.Tensor:
        """Return the part of the copy that a view shows."""
        base = self.full if with_gradient else self.full.detach()
        base = base.reshape(-1)
        if view.dtype != base.dtype:
            base = base.view(view.dtype)
        return base.as_strided(view.size(), view.stride(), view.storage_offset())


class Call:
    """One function call with sharded arguments."""

    def __init__(self, func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> None:
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._name = str(getattr(func, "__name__", func))
        self._copies: dict[tuple[int, Field], _Copy] = {}
        self._resolved: dict[int, tuple[torch.Tensor, Any]] = {}
        """Stand-ins by id, with what they stand for."""

    def run(self) -> Any:
        """Gather, run, write back, and wrap what aliases."""
        sharded = list(sharded_in((self._args, self._kwargs)))
        if self._func in tables.AUTOGRAD:
            sharded = [item for item in sharded if isinstance(item, ShardedView)]
        self._join(sharded)
        blank = self._overwritten()
        for item in sharded:
            self._gather(item, blank=blank is item)
        args = self._replace(self._args)
        kwargs = self._replace(self._kwargs)
        result = self._func(*args, **kwargs)
        self._write_back()
        return self._wrap(result)

    def _join(self, sharded: list[Sharded]) -> None:
        if not sharded:
            return
        communicator = source_of(sharded[0]).communicator
        if communicator.world_size > 1:
            names = ", ".join(dict.fromkeys(source_of(item).name for item in sharded))
            communicator.join(f"{self._name} on sharded parameters {names}")

    def _overwritten(self) -> Sharded | None:
        """Return the first argument if the function sets all of it and reads none of it."""
        if self._func not in tables.OVERWRITES or not self._args:
            return None
        target = self._args[0]
        if not isinstance(target, SHARDED) or follows_gradient(target):
            return None
        source = source_of(target)
        if isinstance(target, ShardedView) and (
            target.shape != source.shape or not target.is_contiguous()
        ):
            return None
        others = sharded_in((self._args[1:], self._kwargs))
        return target if all(source_of(other) is not source for other in others) else None

    def _gather(self, item: Sharded, *, blank: bool) -> None:
        source = source_of(item)
        field = item.field if isinstance(item, ShardedView) else Field.PARAMETER
        key = (id(source), field)
        if key not in self._copies:
            if field is Field.GRADIENT and not source.has(field):
                raise ShardedAccessError(
                    f"{self._name}: the gradient of parameter {source.name} is gone, a step or"
                    " zero_grad has dropped it; read parameter.grad again after a backward"
                )
            with torch.inference_mode(mode=False), torch.no_grad():
                full = (
                    torch.empty(source.shape, dtype=source.dtype(field), device=source.device)
                    if blank
                    else source.read(field)
                )
            parameter = item.parameter if isinstance(item, ShardedView) else item
            self._copies[key] = _Copy(parameter, source, field, full, full._version)
        copy = self._copies[key]
        if copy.node is None and follows_gradient(item):
            copy.full = _HandGradient.apply(copy.parameter, [copy.full])  # type: ignore[no-untyped-call]
            copy.node = copy.full.grad_fn

    def _replace(self, value: Any) -> Any:
        """Return nested arguments with every sharded item replaced by its stand-in."""
        if isinstance(value, SHARDED):
            if isinstance(value, ShardedParameter):
                if self._func in tables.AUTOGRAD:
                    return value
                full = self._copies[id(source_of(value)), Field.PARAMETER].full
                stand_in = full if follows_gradient(value) else full.detach()
                if not follows_gradient(value) and full.grad_fn is None:
                    stand_in = full
            else:
                stand_in = self._copies[id(value.source), value.field].geometry(
                    value, with_gradient=follows_gradient(value)
                )
            self._resolved[id(stand_in)] = (stand_in, value)
            return stand_in
        if isinstance(value, list):
            return [self._replace(item) for item in value]
        if isinstance(value, tuple):
            items = [self._replace(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, dict):
            return {key: self._replace(item) for key, item in value.items()}
        return value

    def _write_back(self) -> None:
        everything = tables.writes_everything(self._name)
        first = {
            id(source_of(item))
            for item in sharded_in(mutated(self._func, self._args, self._kwargs))
        }
        if tables.writes_first(self._name):
            first |= {id(source_of(item)) for item in sharded_in(self._args[:1])}
        for copy in self._copies.values():
            if copy.node is not None and copy.full.grad_fn is not copy.node:
                raise RuntimeError(
                    f"{self._name}: a leaf Variable that requires grad is being used in an in-place"
                    f" operation: parameter {copy.source.name}; change it under torch.no_grad()"
                )
            is_named = everything or id(copy.source) in first
            if is_named or copy.full._version != copy.version:
                copy.source.write(copy.full, copy.field)

    def _wrap(self, result: Any) -> Any:
        """Return a result in which whatever is, or aliases, a copy is sharded again."""
        if isinstance(result, torch.Tensor) and not isinstance(result, SHARDED):
            return self._wrap_tensor(result)
        if isinstance(result, np.ndarray) and self._func in tables.ARRAYS:
            result.flags.writeable = False  # a write would be lost
        if isinstance(result, list):
            return [self._wrap(item) for item in result]
        if isinstance(result, tuple):
            items = tuple(self._wrap(item) for item in result)
            if any(new is not old for new, old in zip(items, result, strict=True)):
                return items if type(result) is tuple else type(result)(items)
        return result

    def _wrap_tensor(self, result: torch.Tensor) -> torch.Tensor:
        known = self._resolved.get(id(result))
        if known is not None:
            sharded: torch.Tensor = known[1]
            return sharded
        if result.layout is torch.strided and result.numel():
            storage = result.untyped_storage()._cdata
            for copy in self._copies.values():
                if copy.storage == storage:
                    return ShardedView.of(
                        copy.parameter,
                        result,
                        copy.field,
                        is_differentiable=result.requires_grad,
                    )
        return result


def mutated(func: Any, args: Arguments, kwargs: Keywords) -> list[Any]:
    """Return the arguments that an operator says it writes; below autograd no version moves."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    given.update(kwargs)
    return [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name in given
    ]


def sharded_in(value: Any) -> Iterator[Sharded]:
    """Yield the sharded parameters and views in nested arguments."""
    if isinstance(value, SHARDED):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from sharded_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from sharded_in(item)


def follows_gradient(item: Sharded) -> bool:
    """Tell whether a use of an argument now belongs into the graph of its parameter."""
    if not torch.is_grad_enabled():
        return False
    if isinstance(item, ShardedView):
        return item.is_differentiable
    return bool(run_plainly(tables.GET_REQUIRES_GRADIENT, (item,), {}))
