"""Train a tiny model with DeepSpeed, save it, and go on: what an importer is compared with.

    torchrun --nproc-per-node N tests/peer/make_deepspeed_checkpoint.py DIR STAGE {cpu,none}

Run it in an environment that has DeepSpeed 0.19 (DS_ACCELERATOR=cpu on a machine without a GPU). It
writes DIR/global_step3 and DIR/losses.json: the losses of all steps, averaged over the ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist
from model import make_peer_model, parameter_groups, peer_batch, peer_config

SAVED_STEPS, ALL_STEPS = 3, 8


def main() -> None:
    """Train, save and go on."""
    folder, stage, offload = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "cpu"
    deepspeed.init_distributed(dist_backend="gloo")
    model = make_peer_model()
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model),
        config=peer_config(stage, offload=offload),
    )
    losses = []
    for step in range(ALL_STEPS):
        if step == SAVED_STEPS:
            engine.save_checkpoint(str(folder), client_state={"note": "from the peer"})
        loss = engine(*peer_batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)  # its communication op aborts now and then while the interpreter ends


if __name__ == "__main__":
    main()
