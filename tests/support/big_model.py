"""Build, load, train and evaluate a model three times the memory that this process may have.

Run as `big_model.py write FOLDER` once, then `big_model.py train FOLDER NVME_PATH`, alone or under
torchrun. What came of it is one JSON line a rank.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from safetensors.torch import save_file
from torch import nn

import zero
from tests.support.configs import make_config

WIDTH, INNER, BLOCKS = 1024, 4096, 49
LIMIT_BYTES = 512 << 20
FILES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(F.layer_norm(x, (WIDTH,)))))


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for block in self.blocks:
            y = block(y)
        return (y - x.flip(-1)).square().mean()


def weight_of(index: int, name: str) -> torch.Tensor:
    """Return the values of one weight, the same wherever it is asked."""
    generator = torch.Generator().manual_seed(2 * index + (name == "down"))
    shape = (INNER, WIDTH) if name == "up" else (WIDTH, INNER)
    return torch.randn(shape, generator=generator) * 0.005


def write(folder: Path) -> None:
    """Write the weights as sharded safetensors."""
    files = {}
    for number in range(FILES):
        name = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        part = {
            f"blocks.{index}.{key}.weight": weight_of(index, key)
            for index in range(number, BLOCKS, FILES)
            for key in ("up", "down")
        }
        save_file(part, folder / name)
        files.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def limit_memory(model_bytes: int) -> None:
    """Allow this process less than a third of the model, and prove it."""
    if model_bytes < 3 * LIMIT_BYTES:
        raise ValueError(f"{model_bytes} bytes are not three times {LIMIT_BYTES}")
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    try:
        torch.empty(LIMIT_BYTES, dtype=torch.uint8)
    except RuntimeError:
        return
    raise RuntimeError("the memory limit does not hold")


def train(folder: Path, nvme_path: str) -> dict[str, Any]:
    """Do all of it under the limit."""
    model_bytes = 4 * 2 * WIDTH * INNER * BLOCKS
    limit_memory(model_bytes)
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=nvme_path,
        host_memory=(32 << 20) * world_size(),
        sub_group_size=1 << 20,
    )
    config["optimizer"]["params"]["lr"] = 1e-5
    with zero.Init(config_dict_or_path=config) as context:
        model = Big()
    report = zero.load_weights(model, folder)
    engine, _, _, _ = zero.initialize(model=model, config=config)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(2):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        losses.append(engine(x).item())
    used = engine.ledger.snapshot()
    outcome = {
        "report": context.report,
        "loaded": report.loaded_numel,
        "losses": losses,
        "model_bytes": model_bytes,
        "limit_bytes": resource.getrlimit(resource.RLIMIT_DATA)[0],
        "swap_bytes": engine.plan.memory.swap_file_bytes,
        "read_bytes": used.nvme_read_bytes,
        "written_bytes": used.nvme_write_bytes,
        "norm": engine.get_global_grad_norm(),
    }
    engine.destroy()
    return outcome


def world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    if sys.argv[1] == "write":
        write(folder)
        return
    zero.init_distributed()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    outcome = train(folder, sys.argv[3])
    sys.stdout.write(f"{rank}: {json.dumps(outcome)}\n")
    sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
