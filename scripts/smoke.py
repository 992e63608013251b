"""Check an installation in seconds: native modules, kernel parity, a paged step."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import aio_ops
import offload
import zero
from estimators import ElementType, StateField, StateFormat, record_layout
from offload import (
    AdamWScalars,
    DeviceKernels,
    Kernels,
    RoundingKey,
    StateArrays,
    load_device_kernels,
    load_kernels,
    state_tensors,
    update_sub_group,
)

NUMEL = 1_000_003


def check_native() -> str:
    """Both native modules are loaded."""
    for package in (aio_ops, offload):
        if not package.native_available():
            raise RuntimeError(f"{package.__name__}: {package.native_unavailable_reason()}")
    engine = aio_ops.open_engine()
    engine.close()
    return f"engine {engine.name} ({engine.reason})"


def check_kernels() -> str:
    """Native, numpy and the device's kernels give equal bits in every format of the state."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    native, plain, there = (
        load_kernels("native"),
        load_kernels("numpy"),
        load_device_kernels(device),
    )
    for state_format in StateFormat:
        wanted = updated(native, state_format, None)
        for kernels, place in ((plain, None), (there, device)):
            if not torch.equal(updated(kernels, state_format, place), wanted):
                raise RuntimeError(
                    f"{kernels.name} and native kernels differ in {state_format.value}"
                )
    formats = ", ".join(each.value for each in StateFormat)
    return (
        f"AdamW of {NUMEL:,} elements, {formats}: {plain.name} and, on {device},"
        f" {there.name} kernels give the native ones' bits"
    )


def updated(
    kernels: Kernels | DeviceKernels, state_format: StateFormat, device: torch.device | None
) -> torch.Tensor:
    """Return the bytes of a record after two steps, and those of its bf16 parameter behind them.

    Without a device the kernels get numpy arrays.

    Raises:
        RuntimeError: if a step has changed nothing.
    """
    operand = as_array if device is None else torch.Tensor.contiguous
    layout = record_layout(state_format, ElementType.BF16, NUMEL)
    generator = torch.Generator().manual_seed(0)
    both = torch.zeros(layout.size_bytes + 2 * NUMEL, dtype=torch.uint8, device=device)
    param = both[layout.size_bytes :].view(torch.bfloat16)
    param.copy_(torch.randn(NUMEL, generator=generator))
    fields = {field: state_tensors(layout, both).get(field) for field in StateField}
    present = {field: operand(each) for field, each in fields.items() if each is not None}
    for step in (1, 2):
        before = both.clone()
        grad = torch.randn(NUMEL, generator=generator).bfloat16().to(device)
        scalars = AdamWScalars.from_hyperparameters(
            lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.7
        )
        key = RoundingKey.derive(0, step, "weight", 0)
        state = StateArrays.of(present)
        update_sub_group(kernels, operand(param), operand(grad), state, scalars, key)
        if torch.equal(both, before):
            raise RuntimeError(
                f"step {step} of {kernels.name} changed nothing in {state_format.value}"
            )
    return both.cpu()


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a tensor on the host as the kernels there take it: bf16 as its bits."""
    bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return bits.numpy()


def check_step() -> str:
    """One step through NVMe gives the bits of one in memory."""
    losses, moved = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for device in ("nvme", "none"):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
            offloads = {
                key: {"device": device, "nvme_path": folder}
                for key in ("offload_param", "offload_optimizer")
                if device != "none"
            }
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "zero_optimization": {
                    "stage": 3,
                    "stage3_param_persistence_threshold": 0,
                    **offloads,
                },
                "tiers": {"host_memory": "1MB" if device == "nvme" else "1GB"},
            }
            engine, _, _, _ = zero.initialize(model=model, config=config)
            generator = torch.Generator().manual_seed(1)
            loss = torch.tensor(float("nan"))
            for _ in range(3):
                x = torch.randn(4, 256, generator=generator).to(engine.device)
                loss = (engine(x) - x).square().mean()
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
            moved = max(moved, engine.ledger.snapshot().nvme_write_bytes)
            engine.destroy()
    if losses[0] != losses[1] or not moved:
        raise RuntimeError(f"paged loss {losses[0]}, plain loss {losses[1]}, {moved} bytes paged")
    return f"loss {losses[0]:.6f} both ways, {moved:,} bytes paged out"


def main(arguments: list[str] | None = None) -> int:
    """Run every check; return the exit code."""
    description = "Check an installation: native modules, kernel parity, a paged step."
    argparse.ArgumentParser(description=description).parse_args(arguments)
    checks: list[Callable[[], str]] = [check_native, check_kernels, check_step]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {device}")
    for check in checks:
        print(f"{check.__name__.removeprefix('check_')}: {check()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
