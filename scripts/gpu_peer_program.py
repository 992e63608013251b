"""The peers of the GPU benchmark: DeepSpeed's ZeRO-3 with offload, plain torch, and FSDP2.

    gpu_peer.py gpu_peer_program.py CASE HIDDEN LAYERS BATCH LENGTH STEPS

Cases of DeepSpeed: `none`, `cpu` (optimizer on the host), `nvme` (optimizer) and `nvme_param`
(both); of torch: `gpu` (all on the device, the floor) and `fsdp2` (all on the host). The last line
is JSON, told in scripts/README.md, "Peers of the GPU benchmark". Settings are those that made
DeepSpeed fastest on an H200. In the environment `BF16` adds keys to that section, as JSON, `CKPT`
asks for activation checkpointing, and `PBUFS` and `PBUF` are count and elements of the buffers of
parameters on NVMe.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# With PYTHONSAFEPATH set, Python does not look for modules beside the script by itself.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_model import make_tokens, make_transformers
from gpu_process import resident
from gpu_sizes import Sizes

LEARNING_RATE = 1e-4
CLIPPING = 1.0
VOCABULARY = 32000
BUFFERS, PARAMETER_BUFFERS, PARAMETER_BUFFER_NUMEL = 12, 60, 70_000_000
DEEPSPEED_CASES = ("none", "cpu", "nvme", "nvme_param")
TORCH_CASES = ("gpu", "fsdp2")


@dataclass(frozen=True)
class Trainer:
    """A model in the hands of a peer."""

    numel: int
    loss: Callable[[torch.Tensor], torch.Tensor]
    """Of tokens, shape `[batch, length]`."""
    backward: Callable[[torch.Tensor], Any]
    update: Callable[[], Any]


def deepspeed_config(case: str, batch: int, folder: Path) -> dict[str, Any]:
    """Return the configuration of a case of DeepSpeed; its swap files go into `folder`."""
    stage: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 100_000_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
    }
    if case != "none":
        stage["offload_optimizer"] = {
            "device": "cpu" if case == "cpu" else "nvme",
            "nvme_path": str(folder),
            "pin_memory": True,
            "buffer_count": BUFFERS,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    if case == "nvme_param":
        stage["offload_param"] = {
            "device": "nvme",
            "nvme_path": str(folder),
            "pin_memory": True,
            "buffer_count": int(os.environ.get("PBUFS", PARAMETER_BUFFERS)),
            "buffer_size": int(float(os.environ.get("PBUF", PARAMETER_BUFFER_NUMEL))),
            "max_in_cpu": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True, **json.loads(os.environ.get("BF16", "{}"))},
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": stage,
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 1_000_000,
    }


def with_deepspeed(case: str, sizes: Sizes, folder: Path) -> Trainer:
    """Return the model as DeepSpeed trains it."""
    deepspeed: Any = importlib.import_module("deepspeed")
    stand_alone()
    deepspeed.init_distributed()
    config = deepspeed_config(case, sizes.batch, folder)
    if case == "nvme_param":  # the peer says where modules are built
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = make_transformers(sizes)
    else:
        with device():
            model = make_transformers(sizes).to(torch.bfloat16)
    if os.environ.get("CKPT"):
        model.gradient_checkpointing_enable()
    numel = sum(getattr(each, "ds_numel", each.numel()) for each in model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return Trainer(numel, loss_of(engine), engine.backward, engine.step)


def with_torch(sizes: Sizes) -> Trainer:
    """Return the model on the device: bf16 parameters, and fp32 masters with torch's AdamW."""
    with device():
        model = make_transformers(sizes).to(torch.bfloat16)
    parameters = list(model.parameters())
    masters = [each.detach().float().requires_grad_() for each in parameters]
    optimizer = adamw(masters)

    def update() -> None:
        for master, parameter in zip(masters, parameters, strict=True):
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIPPING)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
        optimizer.zero_grad()

    numel = sum(each.numel() for each in parameters)
    return Trainer(numel, loss_of(model), torch.Tensor.backward, update)


def with_fsdp2(sizes: Sizes) -> Trainer:
    """Return the model in host memory, as FSDP2 with its offload trains it: bf16 compute."""
    fsdp: Any = importlib.import_module("torch.distributed.fsdp")
    stand_alone()
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    model = make_transformers(sizes)
    parameters = list(model.parameters())
    numel = sum(each.numel() for each in parameters)
    types = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    pins = torch.cuda.is_available()
    policies = {"mp_policy": types, "offload_policy": fsdp.CPUOffloadPolicy(pin_memory=pins)}
    for block in model.model.layers:
        fsdp.fully_shard(block, **policies)
    fsdp.fully_shard(model, **policies)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device())
    optimizer = adamw(model.parameters())

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(numel, loss_of(model), torch.Tensor.backward, update)


def device() -> torch.device:
    """Return where to train."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.AdamW:
    """Return torch's optimizer as the configuration of DeepSpeed has it."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)


def loss_of(model: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what computes the loss of a model of transformers, or of what wraps it."""

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return loss


def stand_alone() -> None:
    """Be a group of one rank, as no launcher says otherwise."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def transferred() -> tuple[int, int]:
    """Return the bytes that this process has read from disks and written to them."""
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    found = {name: int(value) for name, value in pairs}
    return found["read_bytes"], found["write_bytes"]


def train(trainer: Trainer, tokens: torch.Tensor) -> list[float]:
    """Take a step, and return seconds of its phases and of all, the loss, and GB on disks."""
    torch.cuda.synchronize()
    times, before = [time.perf_counter()], transferred()
    loss = trainer.loss(tokens)
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    trainer.backward(loss)
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    trainer.update()
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    spent = [times[1] - times[0], times[2] - times[1], times[3] - times[2], times[3] - times[0]]
    moved = [(after - was) / 1e9 for was, after in zip(before, transferred(), strict=True)]
    return [*(round(each, 3) for each in spent), round(loss.item(), 4), *moved]


def main() -> None:
    """Train what the command line names."""
    case = sys.argv[1] if len(sys.argv) == 7 else ""
    if case not in (*DEEPSPEED_CASES, *TORCH_CASES):
        raise SystemExit(__doc__)
    hidden, layers, batch, length, steps = map(int, sys.argv[2:])
    sizes = Sizes(hidden, layers, VOCABULARY, length, batch, fuses_norms=False)
    folder = Path(tempfile.gettempdir()) / "tierzero-peer-swap"
    shutil.rmtree(folder, ignore_errors=True)  # of one that was ended
    folder.mkdir()
    begin = time.perf_counter()
    if case in DEEPSPEED_CASES:
        trainer = with_deepspeed(case, sizes, folder)
    else:
        trainer = with_torch(sizes) if case == "gpu" else with_fsdp2(sizes)
    startup_seconds = time.perf_counter() - begin
    tokens = make_tokens(sizes, device())
    rows = [train(trainer, tokens) for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    swapped = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    found = {
        "case": case,
        "params": trainer.numel,
        "init_s": round(startup_seconds, 2),
        "rows": rows,
        "gpu_peak_gb": round(peak / 1e9, 2),
        "rss_peak_gb": round(resident()["VmHWM"] / 1e9, 2),
        "swap_gb": round(swapped / 1e9, 2),
    }
    print(json.dumps(found), flush=True)
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
