"""A parameter between its uses, and views of one: true shape and type, values on demand.

[Note: sharded parameter] The object never changes. While its unit is unsharded its class is
`nn.Parameter` and its storage is full; between uses the storage is empty and the class is
`ShardedParameter`, so that every touch from Python lands in `zero.touch`, which gathers the values
into a private copy and writes back what was changed. What aliases a parameter (`.data`, a slice, an
entry of `state_dict()`) is a `ShardedView`: it holds no memory, and each use of it finds the values
of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from offload import Field
from zero.errors import ShardedAccessError
from zero.source import ShardSource

REFERENCE_ATTRIBUTE = "_tierzero"


@dataclass(frozen=True, slots=True, eq=False)
class ParameterReference:
    """What a managed parameter knows about itself; a copy of the parameter knows nothing."""

    source: ShardSource

    @property
    def name(self) -> str:
        """Name of the parameter in the model."""
        return self.source.name

    @property
    def is_alive(self) -> bool:
        """Whether the engine of the parameter can still give its values."""
        return self.source.is_alive

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    return None


def reference_of(parameter: object) -> ParameterReference | None:
    """Return what a managed parameter knows about itself, or None if nobody manages it."""
    reference = getattr(parameter, REFERENCE_ATTRIBUTE, None)
    return reference if isinstance(reference, ParameterReference) else None


def raw_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return what autograd itself has put at a parameter, sharded or not."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return what autograd has put at a parameter, and take it away."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
        parameter.grad = None
        return gradient


class ShardedParameter(nn.Parameter):
    """The class of a managed parameter while it is sharded; never constructed."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer questions about metadata; gather for everything that needs values."""
        from zero.touch import touch

        return touch(func, tuple(args), kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with the full values; a collective."""
        twin = nn.Parameter(full_value(self, "copy.deepcopy"), self.requires_grad)
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter with the full values; a collective."""
        plain = nn.Parameter(full_value(self, "pickling"), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def set_(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: torch lets no `__torch_function__` see this one."""
        raise refusal(self, "set_", "write values with copy_")

    def __copy__(self) -> NoReturn:
        raise refusal(self, "copy.copy", "use copy.deepcopy, or clone() for its values")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        reference = reference_of(self)
        name = reference.name if reference is not None else "?"
        return (
            f"ShardedParameter({name}, shape={tuple(self.shape)}, dtype={self.dtype},"
            f" requires_grad={self.requires_grad})"
        )


class ShardedView(torch.Tensor):
    """An alias of a sharded parameter, or its sharded gradient: geometry without memory."""

    parameter: nn.Parameter
    field: Field
    is_differentiable: bool

    @property
    def source(self) -> ShardSource:
        """Where the values of the parameter come from at this moment."""
        return source_of(self.parameter)

    @staticmethod
    def of(
        parameter: nn.Parameter, geometry: torch.Tensor, field: Field, *, is_differentiable: bool
    ) -> ShardedView:
        """Return a view with the size, strides, offset and type of `geometry`."""
        with torch._C.DisableTorchFunctionSubclass():
            view: ShardedView = torch.Tensor._make_wrapper_subclass(
                ShardedView,
                geometry.size(),
                strides=geometry.stride(),
                storage_offset=geometry.storage_offset(),
                dtype=geometry.dtype,
                device=source_of(parameter).device,
            )
        view.parameter = parameter
        view.field = field
        view.is_differentiable = is_differentiable
        return view

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer questions about metadata; gather for everything that needs values."""
        from zero.touch import touch

        return touch(func, tuple(args), kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Catch what reached the operators without `__torch_function__`."""
        from zero.touch import dispatch

        return dispatch(func, tuple(args), kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain tensor with the values; a collective."""
        twin = full_value(self, "copy.deepcopy").clone()
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor with the values; a collective."""
        plain = full_value(self, "pickling").clone()
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def set_(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuse: torch lets no `__torch_function__` see this one."""
        raise refusal(self, "set_", "write values with copy_")

    def __copy__(self) -> NoReturn:
        raise refusal(self, "copy.copy", "use copy.deepcopy, or clone() for its values")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardedView({self.field.value} of {self.source.name}, shape={tuple(self.shape)},"
            f" dtype={self.dtype})"
        )


Sharded = ShardedParameter | ShardedView


def source_of(sharded: torch.Tensor) -> ShardSource:
    """Return where the values of a sharded parameter or view come from."""
    if isinstance(sharded, ShardedView):
        sharded = sharded.parameter
    reference = reference_of(sharded)
    if reference is None:
        raise ShardedAccessError(
            f"a parameter of shape {tuple(sharded.shape)} was sharded, and what knew its values is"
            " gone; build the model anew"
        )
    return reference.source


def full_value(sharded: Sharded, what: str) -> torch.Tensor:
    """Return a private plain tensor with the values of a parameter or view; a collective."""
    from zero.touch import touch

    with torch.no_grad():
        found: torch.Tensor = touch(torch.clone, (sharded,), {})
    if isinstance(found, ShardedParameter | ShardedView):
        raise refusal(sharded, what, "clone it")
    return found


def refusal(sharded: Sharded | None, what: str, fix: str = "") -> ShardedAccessError:
    """Return the error for a touch that cannot be right: parameter, unit, and what to do."""
    advice = fix or (
        "read or change it inside `with zero.GatheredParameters([parameter], modifier_rank=...):`"
    )
    if sharded is None:
        return ShardedAccessError(f"{what}: a sharded parameter is not in memory; {advice}")
    source = source_of(sharded)
    return ShardedAccessError(
        f"{what}: parameter {source.name} (shape {tuple(source.shape)}, unit {source.unit_name}) is"
        f" sharded, its values are only in memory while its module runs; {advice}"
    )
