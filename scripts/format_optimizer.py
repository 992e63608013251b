"""An optimizer for an ordinary torch model whose state is stored in one of the formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from estimators import ElementType, StateFormat, record_layout
from offload import (
    AdamWScalars,
    DeviceKernels,
    RoundingKey,
    load_device_kernels,
    state_tensors,
)


@dataclass(slots=True)
class Piece:
    """Parameters that one call updates, and the bytes of their state on their device."""

    name: str
    parameter: Tensor  # shape [numel], bf16
    gradient: Tensor  # shape [numel], bf16
    state_format: StateFormat
    record: Tensor  # uint8


class FormatAdamW:
    """AdamW on a bf16 model, through the kernels and records of the engine, all on one device.

    What `compact` keeps exact by default (embeddings and 1-D parameters) is in `exact` here too.
    """

    def __init__(self, model: nn.Module, state_format: StateFormat, seed: int) -> None:
        self.seed = seed
        self.step_count = 0
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        device = named[0][1].device
        self.kernels: DeviceKernels = load_device_kernels(device)
        embeddings = {
            id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
        }
        by_format: dict[StateFormat, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            keeps = parameter.ndim < 2 or id(parameter) in embeddings
            exact = state_format is StateFormat.COMPACT and keeps
            chosen = StateFormat.EXACT if exact else state_format
            by_format.setdefault(chosen, []).append((name, parameter))
        self.pieces = [
            piece for chosen, members in by_format.items() for piece in _pieces(chosen, members)
        ]

    @property
    def state_bytes(self) -> int:
        """Bytes of all records."""
        return sum(piece.record.numel() for piece in self.pieces)

    @torch.no_grad()
    def step(self, grad_scale: float, hyperparameters: Mapping[str, object]) -> None:
        """Update every parameter once and drop the gradients."""
        self.step_count += 1
        scalars = AdamWScalars.from_hyperparameters(
            step=self.step_count,
            grad_scale=grad_scale,
            **hyperparameters,  # type: ignore[arg-type]
        )
        for piece in self.pieces:
            layout = record_layout(piece.state_format, ElementType.BF16, piece.parameter.numel())
            key = RoundingKey.derive(self.seed, self.step_count, piece.name, 0)
            state = state_tensors(layout, piece.record)
            self.kernels.update(
                piece.parameter,
                piece.gradient,
                state,
                scalars,
                key if piece.state_format.is_lossy else None,
            )
            piece.gradient.zero_()

    def gradients(self) -> list[Tensor]:
        """Return the gradients, which stay the same tensors."""
        return [piece.gradient for piece in self.pieces]


def _pieces(
    state_format: StateFormat, members: Iterable[tuple[str, nn.Parameter]]
) -> Iterable[Piece]:
    """Put exact parameters together in one buffer; a lossy one rounds by its own name."""
    members = list(members)
    groups = [[each] for each in members] if state_format.is_lossy else [members]
    for group in groups:
        numel = sum(parameter.numel() for _, parameter in group)
        flat = torch.cat([parameter.detach().flatten() for _, parameter in group]).bfloat16()
        gradient = torch.zeros_like(flat)
        start = 0
        for _, parameter in group:
            stop = start + parameter.numel()
            parameter.data = flat[start:stop].view(parameter.shape)
            parameter.grad = gradient[start:stop].view(parameter.shape)
            start = stop
        size_bytes = record_layout(state_format, ElementType.BF16, numel).size_bytes
        record = torch.zeros(size_bytes, dtype=torch.uint8, device=flat.device)
        yield Piece(group[0][0], flat, gradient, state_format, record)
