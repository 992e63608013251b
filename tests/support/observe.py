"""What tests read from an engine: full parameters, full gradients, pieces, and kernel counters."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

import zero
from estimators import shard_pieces
from offload.arrays import torch_dtype


def as_bits(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy as fp32 values or as bf16 bits (uint16), flat."""
    flat = tensor.detach().reshape(-1).cpu().clone()
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.uint16).numpy()
    return flat.numpy()


def full_parameters(engine: zero.ZeroEngine) -> dict[str, np.ndarray]:
    """Return every parameter, gathered, by name in `named_parameters` order."""
    named = dict(engine.module.named_parameters())
    with zero.GatheredParameters(list(named.values())):
        return {name: as_bits(parameter) for name, parameter in named.items()}


def full_gradients(engine: zero.ZeroEngine) -> dict[str, np.ndarray]:
    """Return the accumulated gradient of every trainable parameter, gathered, by name in order."""
    runtime = engine._runtime
    found = {}
    for segment in runtime.segments:
        if not segment.spec.trainable:
            continue
        if runtime.is_kept(segment.index):
            for member in segment.members:
                gradient = zero.safe_get_full_grad(member.parameter)
                if gradient is None:
                    gradient = torch.zeros_like(member.parameter)
                found[member.name] = as_bits(gradient.reshape(-1).cpu())
            continue
        device = runtime.store.device
        flat = device.empty(segment.layout.padded_numel, torch_dtype(segment.spec.gradient))
        own = runtime.communicator.own_slice(flat)
        if flat.numel():
            device.join(runtime.store.read_gradient(segment.index, device.memory_of(own)))
        runtime.communicator.all_gather_in_place(flat)
        for name, offset, numel in zip(
            segment.spec.names, segment.layout.offsets, segment.layout.numels, strict=True
        ):
            found[name] = as_bits(flat[offset : offset + numel])
    return {name: found[name] for name, _ in engine.module.named_parameters() if name in found}


def rank_pieces(engine: zero.ZeroEngine) -> dict[str, list[tuple[int, int]]]:
    """Return which elements of each parameter each rank owns."""
    pieces: dict[str, list[tuple[int, int]]] = {}
    for segment in engine._runtime.segments:
        for name in segment.spec.names:
            pieces[name] = []
        for rank in range(engine.world_size):
            for piece in shard_pieces(segment.layout, rank):
                name = segment.spec.names[piece.index]
                pieces[name].append((piece.first, piece.first + piece.numel))
    return pieces


def digest(arrays: dict[str, np.ndarray]) -> str:
    """Return a hash of names and bits."""
    total = hashlib.sha256()
    for name, array in arrays.items():
        total.update(name.encode())
        total.update(array.tobytes())
    return total.hexdigest()


def process_io_bytes() -> tuple[int, int]:
    """Return what the kernel says this process has read from and written to disks."""
    fields = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    )
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def state_digest(engine: zero.ZeroEngine) -> str:
    """Return a hash of the bits of all that is kept of every parameter; a collective."""
    total = hashlib.sha256()
    for state in sorted(zero.iterate_states(engine.module), key=lambda each: each.name):
        for key in ("value", "fp32_param", "exp_avg", "exp_avg_sq", "grad"):
            tensor = getattr(state, key)
            if tensor is not None:
                total.update(f"{state.name} {key} {tuple(tensor.shape)}".encode())
                total.update(
                    tensor.reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()
                )
    return total.hexdigest()
