"""What a forward keeps for its backward, as autograd counts it; on `meta` nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _Fused(torch.autograd.Function):
    """Attention that keeps what the fused kernels keep: its inputs, its output, a sum a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *outer, heads, rows, _ = query.shape
        # As the kernels lay it out: the heads of a token next to each other.
        made = query.new_empty(*outer, rows, heads, value.shape[-1]).transpose(-2, -3)
        sums = query.new_empty(*outer, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, made, sums)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _FusedAttention(TorchFunctionMode):
    """Replaces attention by what the fused kernels of a GPU keep."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _Fused.apply(*args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def kept_bytes(model: nn.Module, forward: Callable[[], Any], *, fused: bool = True) -> int:
    """Return the bytes that a forward keeps for its backward, parameters and buffers aside.

    Args:
        model: the model, on `meta` or anywhere.
        forward: runs it and returns its loss.
        fused: whether attention runs in a fused kernel.
    """
    own = [*model.parameters(), *model.buffers()]
    known = {each.untyped_storage()._cdata for each in own}
    kept: list[Tensor] = []
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            kept.append(tensor)  # while it lives its storage's address is its own
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if fused:
            with _FusedAttention():
                forward()
        else:
            forward()
    return total
