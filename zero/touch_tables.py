"""Which torch functions need no values of a parameter, and which cannot be right on a sharded one.

Nothing here decides whether something writes or aliases: that is seen from version counters and
storages, so an operator that is in no table is still right. The tables only save reading values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ATTRIBUTES = _words(
    """
    shape dtype device layout ndim requires_grad is_leaf grad_fn is_sparse
    is_cuda is_cpu is_meta is_mkldnn is_nested is_xla is_mps is_xpu is_mtia is_vulkan
    is_ipu is_maia is_sparse_csr _version output_nr name names retains_grad nbytes
    itemsize _backward_hooks _post_accumulate_grad_hooks _base grad_dtype
    """
)

_METHODS = _words(
    """
    size dim numel nelement stride element_size is_floating_point is_complex is_signed
    is_contiguous register_hook register_post_accumulate_grad_hook requires_grad_ __len__
    get_device storage_offset is_same_size new_empty new_zeros new_ones new_full
    new_empty_strided ndimension is_inference __hash__ has_names detach_ dim_order is_conj
    is_neg retain_grad is_distributed is_coalesced sparse_dim dense_dim
    """
)

_FUNCTIONS = _words(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like numel is_floating_point
    is_complex is_same_size is_inference is_conj is_neg _has_compatible_shallow_copy_type
    result_type
    """
)

_REFUSED_METHODS = _words(
    """
    data_ptr untyped_storage storage _typed_storage set_ share_memory_ __dlpack__
    __dlpack_device__ resize_ resize_as_ is_set_to as_subclass
    """
)

_OVERWRITES = _words(
    """
    copy_ zero_ fill_ normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ log_normal_
    geometric_
    """
)

_VIEWS = _words(
    """
    view t transpose permute unsqueeze squeeze expand narrow select view_as expand_as
    unbind chunk split __getitem__ swapaxes swapdims movedim diagonal unfold adjoint
    """
)

_VIEW_ATTRIBUTES = ("T", "mT", "H", "mH")

_CASTS = _words(
    """
    to float half bfloat16 double cpu contiguous
    """
)


def _found(owner: Any, names: Iterable[str]) -> set[Any]:
    return {getattr(owner, name) for name in names if hasattr(owner, name)}


def _descriptors(names: Iterable[str], verbs: tuple[str, ...]) -> set[Any]:
    found: set[Any] = set()
    for name in names:
        descriptor = getattr(torch.Tensor, name, None)
        found.update(getattr(descriptor, verb) for verb in verbs if hasattr(descriptor, verb))
    return found


def _accessor(name: str, verb: str) -> Any:
    """Return what torch passes as the function when an attribute is read, set or deleted."""
    return getattr(getattr(torch.Tensor, name), verb)


METADATA: frozenset[Any] = frozenset(
    _descriptors(_ATTRIBUTES, ("__get__", "__set__", "__delete__"))
    | _found(torch.Tensor, _METHODS)
    | _found(torch, _FUNCTIONS)
)
"""Answered by the object itself: its shape and type are true."""

_DEVICE_ATTRIBUTES = ("device", "is_quantized", "is_cpu", "is_meta", "is_cuda", "is_xpu", "is_mps")

_FACTORIES = _words(
    """
    get_device new_empty new_zeros new_ones new_full new_tensor new_empty_strided
    zeros_like ones_like empty_like full_like rand_like randn_like
    _has_compatible_shallow_copy_type result_type
    """
)

DEVICE: frozenset[Any] = frozenset(
    _descriptors(_DEVICE_ATTRIBUTES, ("__get__",))
    | _found(torch.Tensor, _FACTORIES)
    | _found(torch, _FACTORIES)
)
"""Depend on dispatch keys, which are only true of a stand-in, see [Note: seal]."""

AUTOGRAD: frozenset[Any] = frozenset(
    {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
)
"""Given the parameter itself, not its values."""

REFUSED: frozenset[Any] = frozenset(_found(torch.Tensor, _REFUSED_METHODS))
"""Would hand out memory that is not there, or move the parameter off its own."""

NEVER: frozenset[Any] = frozenset(_found(torch.Tensor, ["is_pinned"]))
"""Answered with False."""

IS_SHARED = torch.Tensor.is_shared
"""True of all memory on a GPU, says torch."""

OVERWRITES: frozenset[Any] = frozenset(_found(torch.Tensor, _OVERWRITES))
"""Set every element of their first argument, so its old values need not be read."""

VIEWS: frozenset[Any] = frozenset(
    _found(torch.Tensor, _VIEWS)
    | _found(torch, [name for name in _VIEWS if not name.startswith("_")])
    | _descriptors(_VIEW_ATTRIBUTES, ("__get__",))
)
"""Need shapes only; what they return is a view with a geometry of its own."""

CASTS: frozenset[Any] = frozenset(_found(torch.Tensor, _CASTS))
"""Return the parameter itself if it already is what they ask for."""

ARRAYS: frozenset[Any] = frozenset(_found(torch.Tensor, ["numpy", "__array__"]))
"""Return a numpy array of a private copy, so it must not be written."""

DETACHED: frozenset[Any] = frozenset(
    {torch.Tensor.detach, torch.detach, _accessor("data", "__get__")}
)
"""Return an alias without gradient."""

FORMAT = torch.Tensor.__format__
GET_GRADIENT: Any = _accessor("grad", "__get__")
SET_GRADIENT: Any = _accessor("grad", "__set__")
DELETE_GRADIENT: Any = _accessor("grad", "__delete__")
SET_DATA: Any = _accessor("data", "__set__")
GET_REQUIRES_GRADIENT: Any = _accessor("requires_grad", "__get__")
GET_IS_LEAF: Any = _accessor("is_leaf", "__get__")
GET_GRADIENT_FUNCTION: Any = _accessor("grad_fn", "__get__")
SET_REQUIRES_GRADIENT: frozenset[Any] = frozenset(
    {_accessor("requires_grad", "__set__"), torch.Tensor.requires_grad_}
)


def writes_everything(name: str) -> bool:
    """Tell whether a function writes all it is given without moving a version counter."""
    return name.startswith(("_fused_", "_amp_foreach_"))


def writes_first(name: str) -> bool:
    """Tell whether a function's name says that it writes its first argument.

    Most move its version counter as well; `apply_` and `map_` do not.
    """
    return name.endswith("_") and not name.endswith("__")
