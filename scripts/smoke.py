"""Check an installation in seconds: native modules, kernel parity, a paged step."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import aio_ops
import offload
import zero
from offload import AdamWScalars, load_kernels

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
    """Native and numpy kernels give equal bits."""
    scalars = AdamWScalars.from_hyperparameters(
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.7
    )
    results = []
    for kind in ("native", "numpy"):
        generator = np.random.default_rng(0)
        param, grad, first = (generator.standard_normal(NUMEL).astype(np.float32) for _ in range(3))
        second = np.abs(generator.standard_normal(NUMEL)).astype(np.float32)
        load_kernels("native" if kind == "native" else "numpy").adamw_fp32(
            param, grad, first, second, scalars
        )
        results.append(np.concatenate([param, first, second]).view(np.uint32))
    if not np.array_equal(results[0], results[1]):
        raise RuntimeError("native and numpy kernels differ in bits")
    return f"AdamW of {NUMEL:,} elements, equal bits"


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
