"""What happens when code touches a sharded parameter outside its window.

[Note: touch] Every operator on a `ShardedParameter` or `ShardedView` comes here. Each sharded
argument is replaced by a private copy of its values, gathered over the ranks, and the operator
runs on that. Afterwards
1. what was written is seen from the version counter of the copy, and goes to the shards;
2. what aliases the copy is seen from its storage, and becomes a `ShardedView`;
3. what is the copy itself is the parameter again.
With gradients enabled the copy of a parameter comes out of an autograd node that hands its gradient
to the parameter, so a weight that another module uses trains. On several ranks a touch is a
collective, and the ranks agree on it first, see `Communicator.join`.
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
from zero.parameter import Sharded, ShardedParameter, ShardedView, refusal, source_of
from zero.source import ShardSource, StoreSource

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
_SHARDED = (ShardedParameter, ShardedView)


def touch(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Run a torch function that was called with sharded arguments."""
    if torch._C._get_tracing_state() is not None:  # it would read what is not there
        sharded = next(_sharded_in((args, kwargs)), None)
        raise refusal(
            sharded, "torch.jit.trace", "trace inside `with zero.GatheredParameters(...):`"
        )
    special = _SPECIAL.get(func)
    if special is not None:
        found = special(func, args, kwargs)
        if found is not NotImplemented:
            return found
    if func in tables.METADATA:
        return _plainly(func, args, kwargs)
    if func in tables.AUTOGRAD and not any(
        isinstance(item, ShardedView) for item in _sharded_in((args, kwargs))
    ):
        return _plainly(func, args, kwargs)
    return _Call(func, args, kwargs).run()


def dispatch(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator that reached a view below autograd, where no gradient can be followed."""
    for item in _sharded_in((args, kwargs)):
        if isinstance(item, ShardedView) and item.is_differentiable:
            raise refusal(
                item,
                f"operator {func}",
                "gather it first: `with zero.GatheredParameters([parameter]):`",
            )
    return _Call(func, args, kwargs).run()


def _plainly(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
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
            name = source_of(ctx.parameter).name if isinstance(ctx.parameter, _SHARDED) else "?"
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


class _Call:
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
        sharded = list(_sharded_in((self._args, self._kwargs)))
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
        if not isinstance(target, _SHARDED) or _follows_gradient(target):
            return None
        source = source_of(target)
        if isinstance(target, ShardedView) and (
            target.shape != source.shape or not target.is_contiguous()
        ):
            return None
        others = _sharded_in((self._args[1:], self._kwargs))
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
                    torch.empty(source.shape, dtype=source.dtype(field))
                    if blank
                    else source.read(field)
                )
            parameter = item.parameter if isinstance(item, ShardedView) else item
            self._copies[key] = _Copy(parameter, source, field, full, full._version)
        copy = self._copies[key]
        if copy.node is None and _follows_gradient(item):
            copy.full = _HandGradient.apply(copy.parameter, [copy.full])  # type: ignore[no-untyped-call]
            copy.node = copy.full.grad_fn

    def _replace(self, value: Any) -> Any:
        """Return nested arguments with every sharded item replaced by its stand-in."""
        if isinstance(value, _SHARDED):
            if isinstance(value, ShardedParameter):
                if self._func in tables.AUTOGRAD:
                    return value
                full = self._copies[id(source_of(value)), Field.PARAMETER].full
                stand_in = full if _follows_gradient(value) else full.detach()
                if not _follows_gradient(value) and full.grad_fn is None:
                    stand_in = full
            else:
                stand_in = self._copies[id(value.source), value.field].geometry(
                    value, with_gradient=_follows_gradient(value)
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
        first = set()
        if tables.writes_first(self._name):
            first = {id(source_of(item)) for item in _sharded_in(self._args[:1])}
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
        if isinstance(result, torch.Tensor) and not isinstance(result, _SHARDED):
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


def _sharded_in(value: Any) -> Iterator[Sharded]:
    """Yield the sharded parameters and views in nested arguments."""
    if isinstance(value, _SHARDED):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sharded_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sharded_in(item)


def _follows_gradient(item: Sharded) -> bool:
    """Tell whether a use of an argument now belongs into the graph of its parameter."""
    if not torch.is_grad_enabled():
        return False
    if isinstance(item, ShardedView):
        return item.is_differentiable
    return bool(_plainly(tables.GET_REQUIRES_GRADIENT, (item,), {}))


# What is not answered by gathering. Each returns NotImplemented to fall through to it.


def _refuse(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    sharded = next(_sharded_in((args, kwargs)), None)
    raise refusal(sharded, getattr(func, "__name__", str(func)))


def _never(_func: Callable[..., Any], _args: Arguments, _kwargs: Keywords) -> bool:
    return False


def _format(_func: Callable[..., Any], args: Arguments, _kwargs: Keywords) -> Any:
    """Describe what has dimensions; format the number of what has none."""
    item, specification = args
    is_described = isinstance(item, _SHARDED) and item.dim()
    return object.__format__(item, specification) if is_described else NotImplemented


def _whole(item: Sharded, *, is_differentiable: bool) -> ShardedView:
    """Return a view of all that a parameter or view shows, without reading it."""
    if isinstance(item, ShardedView):
        with torch._C.DisableTorchFunctionSubclass():
            return ShardedView.of(
                item.parameter, _blueprint(item), item.field, is_differentiable=is_differentiable
            )
    return ShardedView.of(
        item, _blueprint(item), Field.PARAMETER, is_differentiable=is_differentiable
    )


def _blueprint(item: Sharded) -> torch.Tensor:
    """Return a tensor on `meta` with the geometry of a parameter or view."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(mode=False):
        size, stride = item.size(), item.stride()
        if isinstance(item, ShardedParameter):
            return torch.empty_strided(size, stride, dtype=item.dtype, device="meta")
        extent = item.storage_offset() + sum(
            (length - 1) * step for length, step in zip(size, stride, strict=True)
        )
        base = torch.empty(max(extent + 1, 0), dtype=item.dtype, device="meta")
        return base.as_strided(size, stride, item.storage_offset())


def _detached(_func: Callable[..., Any], args: Arguments, _kwargs: Keywords) -> Any:
    return _whole(args[0], is_differentiable=False)


def _view(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Return views from shapes alone, where the arguments say enough."""
    item = args[0] if args else None
    if not isinstance(item, _SHARDED) or not _is_static((args[1:], kwargs)):
        return NotImplemented
    blueprint = _blueprint(item)
    with torch.no_grad():
        result = func(blueprint, *args[1:], **kwargs)
    follows = _follows_gradient(item)

    def wrap(part: Any) -> Any:
        if part is blueprint:
            return item
        if part.untyped_storage()._cdata != blueprint.untyped_storage()._cdata:
            raise _NotAView
        parameter = item.parameter if isinstance(item, ShardedView) else item
        field = item.field if isinstance(item, ShardedView) else Field.PARAMETER
        return ShardedView.of(parameter, part, field, is_differentiable=follows)

    try:
        if isinstance(result, list | tuple):
            return type(result)(wrap(part) for part in result)
        return wrap(result)
    except _NotAView:
        return NotImplemented


class _NotAView(Exception):  # noqa: N818  never leaves this module
    """The blueprint showed that the result has memory of its own."""


def _is_static(value: Any) -> bool:
    """Tell whether arguments are numbers, slices and the like: no tensor, list of indices, mask."""
    if isinstance(value, bool):
        return False
    if value is None or value is Ellipsis or isinstance(value, int | slice | torch.dtype):
        return True
    if isinstance(value, dict):
        return all(map(_is_static, value.values()))
    return isinstance(value, tuple | torch.Size) and all(map(_is_static, value))


def _cast(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Return the parameter itself if it is what the cast asks for, without reading it."""
    item = args[0]
    if not isinstance(item, _SHARDED) or any(isinstance(each, torch.Tensor) for each in args[1:]):
        return NotImplemented
    if kwargs.get("copy") or len(args) > 3:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.empty_strided(
            (1,) * item.dim(), (1,) * item.dim(), dtype=item.dtype, device=item.device
        )
        is_same = func(probe, *args[1:], **kwargs) is probe and item.is_contiguous()
    return item if is_same else NotImplemented


def _set_data(_func: Callable[..., Any], args: Arguments, _kwargs: Keywords) -> None:
    """Write values through if they fit the parameter."""
    item, value = args
    if not isinstance(item, ShardedParameter):
        if isinstance(item, ShardedView):
            raise refusal(item, "setting .data of a view", "use copy_ on it")
        raise refusal(value, "setting .data to a sharded parameter", "use copy_ of its values")
    if value is item:
        return
    if value.shape != item.shape or value.dtype != item.dtype or value.device != item.device:
        raise refusal(
            item,
            f"setting .data to {value.dtype} of shape {tuple(value.shape)} on {value.device}",
            "only values of the same type and shape can be written; choose the type in the"
            " configuration or before zero.initialize, and change the shape with"
            " zero.resize_parameter",
        )
    with torch.no_grad():
        touch(torch.Tensor.copy_, (item, value), {})


def _get_gradient(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Return the gradient that autograd left, else a view of the sharded one, else None."""
    item = args[0]
    raw = _plainly(func, args, kwargs)
    if raw is not None or not isinstance(item, ShardedParameter):
        return raw
    source = source_of(item)
    if not source.is_alive or not source.has(Field.GRADIENT):
        return None
    geometry = torch.empty(source.shape, dtype=source.dtype(Field.GRADIENT), device="meta")
    return ShardedView.of(item, geometry, Field.GRADIENT, is_differentiable=False)


def _set_gradient(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> None:
    """Set the sharded gradient, or drop it."""
    item, value = args[0], args[1] if len(args) > 1 else None
    if not isinstance(item, ShardedParameter):
        if value is None or isinstance(item, ShardedView):
            return
        raise refusal(value, "setting .grad to a sharded tensor", "set a clone of it")
    source = source_of(item)
    if isinstance(value, ShardedView) and value.source is source:
        return
    if value is None:
        _plainly(tables.SET_GRADIENT, (item, None), {})
        if isinstance(source, StoreSource) and source.is_alive:
            source.drop_gradient()
        return
    if value.shape != item.shape:
        raise refusal(item, f"setting .grad to shape {tuple(value.shape)}", "use its own shape")
    if not isinstance(source, StoreSource) or not source.is_trained:
        _plainly(func, (item, value), kwargs)
        return
    source.communicator.join(f"setting the gradient of {source.name}")
    with torch.no_grad():
        source.write(value.to(source.dtype(Field.GRADIENT), copy=True), Field.GRADIENT)


def _get_requires_gradient(_func: Callable[..., Any], args: Arguments, _kwargs: Keywords) -> Any:
    item = args[0]
    return item.is_differentiable if isinstance(item, ShardedView) else NotImplemented


def _get_is_leaf(_func: Callable[..., Any], args: Arguments, _kwargs: Keywords) -> Any:
    item = args[0]
    return not item.is_differentiable if isinstance(item, ShardedView) else NotImplemented


def _get_gradient_function(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Return a node of the parameter's graph, which only a gathered view has."""
    item = args[0]
    if not isinstance(item, ShardedView) or not item.is_differentiable:
        return NotImplemented
    with torch.enable_grad():
        return _Call(func, args, kwargs).run()


def _set_requires_gradient(_func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    item = args[0]
    if not isinstance(item, ShardedView):
        return NotImplemented
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if bool(wanted) == item.is_differentiable:
        return item
    raise refusal(
        item, "requires_grad_ on an alias", "make a tensor of its own: parameter.detach().clone()"
    )


_Special = Callable[[Callable[..., Any], Arguments, Keywords], Any]

_SPECIAL: dict[Any, _Special] = {
    **dict.fromkeys(tables.VIEWS, _view),
    **dict.fromkeys(tables.CASTS, _cast),
    **dict.fromkeys(tables.DETACHED, _detached),
    **dict.fromkeys(tables.REFUSED, _refuse),
    **dict.fromkeys(tables.NEVER, _never),
    **dict.fromkeys(tables.SET_REQUIRES_GRADIENT, _set_requires_gradient),
    tables.FORMAT: _format,
    tables.SET_DATA: _set_data,
    tables.GET_GRADIENT: _get_gradient,
    tables.SET_GRADIENT: _set_gradient,
    tables.DELETE_GRADIENT: _set_gradient,
    tables.GET_REQUIRES_GRADIENT: _get_requires_gradient,
    tables.GET_IS_LEAF: _get_is_leaf,
    tables.GET_GRADIENT_FUNCTION: _get_gradient_function,
}
