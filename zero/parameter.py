"""A parameter between its uses: true shape and type, and an error instead of false values.

[Note: sharded parameter] The object never changes. While its unit is unsharded its class is
`nn.Parameter` and its storage is full; between uses the storage is empty and the class is
`ShardedParameter`, so that whatever would touch values raises with the fix instead of reading
freed memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

REFERENCE_ATTRIBUTE = "_tierzero"


@dataclass(frozen=True, slots=True, eq=False)
class ParameterReference:
    """What a managed parameter knows about itself."""

    name: str
    unit_name: str
    owner: weakref.ref[Any]
    """The runtime; opaque here. A model keeps no engine alive."""
    unit_index: int

    @property
    def is_alive(self) -> bool:
        """Whether the engine of the parameter can still give its values."""
        runtime = self.owner()
        return runtime is not None and not runtime.store.is_closed

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    return None


class ShardedAccessError(RuntimeError):
    """The values of a sharded parameter were touched while they are not in memory."""


_ATTRIBUTES = [
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "grad",
    "is_leaf",
    "grad_fn",
    "is_sparse",
    "is_quantized",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_mkldnn",
    "is_nested",
    "_version",
    "output_nr",
    "name",
    "names",
    "retains_grad",
    "nbytes",
    "itemsize",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_base",
    "is_xla",
    "is_mps",
    "is_xpu",
    "is_sparse_csr",
]

_METHODS = [
    "size",
    "dim",
    "numel",
    "nelement",
    "stride",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_contiguous",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "__len__",
    "get_device",
    "storage_offset",
    "is_same_size",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "ndimension",
    "is_inference",
    "__hash__",
    "backward",
    "has_names",
]

_FUNCTIONS = [
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "numel",
    "is_floating_point",
    "is_complex",
    "is_same_size",
    "is_inference",
]


def _metadata_functions() -> frozenset[Any]:
    """Return the torch functions that need no values."""
    found: set[Any] = {torch.autograd.grad, torch.autograd.backward}
    for name in _ATTRIBUTES:
        descriptor = getattr(torch.Tensor, name, None)
        for verb in ("__get__", "__set__", "__delete__"):
            if hasattr(descriptor, verb):
                found.add(getattr(descriptor, verb))
    found.update(getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name))
    found.update(getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name))
    return frozenset(found)


_METADATA = _metadata_functions()


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
        """Answer questions about metadata; refuse everything that needs values."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _refusal(_first_sharded((args, kwargs)), getattr(func, "__name__", str(func)))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise _refusal(self, "copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refusal(self, "pickling")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        reference = getattr(self, REFERENCE_ATTRIBUTE, None)
        name = reference.name if reference is not None else "?"
        return (
            f"ShardedParameter({name}, shape={tuple(self.shape)}, dtype={self.dtype},"
            f" requires_grad={self.requires_grad})"
        )


def _first_sharded(value: Any) -> ShardedParameter | None:
    """Return a sharded parameter found in nested arguments."""
    if isinstance(value, ShardedParameter):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            found = _first_sharded(item)
            if found is not None:
                return found
    return None


def _refusal(parameter: ShardedParameter | None, what: str) -> ShardedAccessError:
    reference = getattr(parameter, REFERENCE_ATTRIBUTE, None)
    name = reference.name if reference is not None else "a parameter"
    unit = reference.unit_name if reference is not None else "?"
    shape = tuple(parameter.shape) if parameter is not None else ()
    if reference is not None and not reference.is_alive:
        return ShardedAccessError(
            f"{what}: parameter {name} (shape {shape}, unit {unit}) was sharded, and its engine is"
            " destroyed or gone, and its values with it"
        )
    return ShardedAccessError(
        f"{what}: parameter {name} (shape {shape}, unit {unit}) is sharded, its values are only in"
        " memory while its module runs; read or change it inside"
        " `with zero.GatheredParameters([parameter], modifier_rank=...):`"
    )
