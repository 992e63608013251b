"""Ranks whose program ends without `engine.destroy()`. Run under torchrun.

Their threads ask the store without a pause, so that they are inside torch when the program ends.
"""

from __future__ import annotations

import sys

import torch

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model
from zero import rendezvous


def main() -> None:
    """Take a step and leave, after `destroy_process_group` or without it."""
    torch.set_num_threads(1)
    rendezvous._POLL_S = 0.0
    zero.init_distributed()
    engine, _, _, _ = zero.initialize(model=make_model(), config=make_config())
    engine.backward(engine(*make_batch(0, engine.global_rank)))
    engine.step()
    torch.distributed.barrier()
    sys.stdout.write(f"rank {engine.global_rank} trained\n")
    sys.stdout.flush()
    if sys.argv[1] == "destroyed":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
