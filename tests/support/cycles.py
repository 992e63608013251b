"""Make and destroy engines in a process of its own, and say what the process holds meanwhile.

Run as `python cycles.py NVME_PATH COUNT`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import zero
from tests.support.configs import make_config
from tests.support.inference import Generator, generate, inference_config
from tests.support.tiny import make_batch, make_model


def train_once(nvme_path: str) -> zero.ZeroEngine:
    """Train one step."""
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=nvme_path, host_memory="200KB"
    )
    engine, _, _, _ = zero.initialize(model=make_model(layers=6), config=config)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    return engine


def generate_once(nvme_path: str) -> zero.ZeroEngine:
    """Generate two tokens without an optimizer."""
    config = inference_config("nvme", nvme_path, "fp32", "100KB")
    engine, _, _, _ = zero.initialize(model=Generator(12), config=config)
    with torch.no_grad():
        generate(engine, 2)
    return engine


def cycle(nvme_path: str) -> int:
    """Make, use and destroy two engines, and return the bytes that they read."""
    read = []
    for use in (train_once, generate_once):
        engine = use(nvme_path)
        read.append(engine.ledger.snapshot().nvme_read_bytes)
        engine.destroy()
        engine.destroy()  # twice does no harm
        try:
            engine(torch.zeros(1, 1, dtype=torch.long))
        except RuntimeError as error:
            if "was destroyed" not in str(error):
                raise
    return min(read)


def held() -> dict[str, Any]:
    """Return descriptors, threads and resident bytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  names only
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def main() -> None:
    """Let allocators and caches fill, then count."""
    path, count = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    for _ in range(20):
        cycle(path)
    before = held()
    read = min(cycle(path) for _ in range(count))
    sys.stdout.write(json.dumps({"before": before, "after": held(), "least_read": read}) + "\n")


if __name__ == "__main__":
    main()
