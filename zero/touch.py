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

from collections.abc import Callable
from typing import Any

import torch

from offload import Field
from zero import touch_tables as tables
from zero.parameter import Sharded, ShardedParameter, ShardedView, refusal, source_of
from zero.source import StoreSource
from zero.touch_call import (
    SHARDED,
    Arguments,
    Call,
    Keywords,
    follows_gradient,
    run_plainly,
    sharded_in,
)


def touch(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Run a torch function that was called with sharded arguments."""
    if torch._C._get_tracing_state() is not None:  # it would read what is not there
        sharded = next(sharded_in((args, kwargs)), None)
        raise refusal(
            sharded, "torch.jit.trace", "trace inside `with zero.GatheredParameters(...):`"
        )
    special = _SPECIAL.get(func)
    if special is not None:
        found = special(func, args, kwargs)
        if found is not NotImplemented:
            return found
    if func in tables.DEVICE:
        return _on_stand_ins(func, args, kwargs)
    if func in tables.METADATA:
        return run_plainly(func, args, kwargs)
    if func in tables.AUTOGRAD and not any(
        isinstance(item, ShardedView) for item in sharded_in((args, kwargs))
    ):
        return run_plainly(func, args, kwargs)
    return Call(func, args, kwargs).run()


def dispatch(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Run an operator that reached a view below autograd, where no gradient can be followed."""
    for item in sharded_in((args, kwargs)):
        if isinstance(item, ShardedView) and item.is_differentiable:
            raise refusal(
                item,
                f"operator {func}",
                "gather it first: `with zero.GatheredParameters([parameter]):`",
            )
    return Call(func, args, kwargs).run()


# What is not answered by gathering. Each returns NotImplemented to fall through to it.


def _refuse(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    sharded = next(sharded_in((args, kwargs)), None)
    name = getattr(func, "__name__", str(func))
    fix = ""
    if torch._guards.TracingContext.try_get() is not None or torch.compiler.is_compiling():
        fix = (
            "torch.compile and torch.export look at parameters before they run: compile what is"
            " inside of a unit, block.forward = torch.compile(block.forward)"
        )
    elif "storage" in name or name == "data_ptr":
        fix = (
            "give whoever asks (a writer of files, say) plain tensors: clone it, or {name:"
            " value.clone() for name, value in model.state_dict().items()}, or use"
            " zero.GatheredParameters"
        )
    raise refusal(sharded, name, fix)


def _on_stand_ins(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Answer what depends on the device with tensors there, where parameters belong."""

    def stand_in(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(stand_in, value))
        if not isinstance(value, SHARDED):
            return value
        device = source_of(value).device
        with torch._C.DisableTorchFunctionSubclass():
            return torch.empty((), dtype=value.dtype, device=device).expand(value.size())

    with torch.no_grad():
        found = tuple(stand_in(value) for value in args)
        named = {name: stand_in(value) for name, value in kwargs.items()}
    return func(*found, **named)


def _never(_func: Callable[..., Any], _args: Arguments, _kwargs: Keywords) -> bool:
    return False


def _is_shared(_func: Callable[..., Any], args: Arguments, _kwargs: Keywords) -> bool:
    return source_of(args[0]).device.type == "cuda"


def _format(_func: Callable[..., Any], args: Arguments, _kwargs: Keywords) -> Any:
    """Describe what has dimensions; format the number of what has none."""
    item, specification = args
    is_described = isinstance(item, SHARDED) and item.dim()
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
    if not isinstance(item, SHARDED) or not _is_static((args[1:], kwargs)):
        return NotImplemented
    blueprint = _blueprint(item)
    with torch.no_grad():
        result = func(blueprint, *args[1:], **kwargs)
    follows = follows_gradient(item)

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
    if not isinstance(item, SHARDED) or any(isinstance(each, torch.Tensor) for each in args[1:]):
        return NotImplemented
    if kwargs.get("copy") or len(args) > 3:
        return NotImplemented
    device = source_of(item).device
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.empty_strided(
            (1,) * item.dim(), (1,) * item.dim(), dtype=item.dtype, device=device
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
    fits = value.dtype == item.dtype and value.device == item.device
    if fits and value.dim() == item.dim() and value.shape != item.shape:
        # `resize_token_embeddings` of model libraries does this.
        from zero.replan import Resize
        from zero.resizing import apply_resize

        with torch.no_grad():
            apply_resize(Resize(item, value.shape, None, value.detach().clone()))
        return
    if not fits or value.shape != item.shape:
        raise refusal(
            item,
            f"setting .data to {value.dtype} of shape {tuple(value.shape)} on {value.device}",
            "only values of the same type and dimensions can be written; choose the type in the"
            " configuration or before zero.initialize",
        )
    with torch.no_grad():
        touch(torch.Tensor.copy_, (item, value), {})


def _get_gradient(func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Return the gradient that autograd left, else a view of the sharded one, else None."""
    item = args[0]
    raw = run_plainly(func, args, kwargs)
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
        run_plainly(tables.SET_GRADIENT, (item, None), {})
        if isinstance(source, StoreSource) and source.is_alive:
            source.drop_gradient()
        return
    if value.shape != item.shape:
        raise refusal(item, f"setting .grad to shape {tuple(value.shape)}", "use its own shape")
    if not isinstance(source, StoreSource) or not source.is_trained:
        run_plainly(func, (item, value), kwargs)
        return
    source.communicator.join(f"setting the gradient of {source.name}")
    with torch.no_grad():
        dense = value if value.layout is torch.strided else value.to_dense()
        source.write(dense.to(source.dtype(Field.GRADIENT), copy=True), Field.GRADIENT)


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
        return Call(func, args, kwargs).run()


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
    tables.IS_SHARED: _is_shared,
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
