"""Train through NVMe until killed, a line a step. Run as `train_forever.py PATH [STEPS]`."""

from __future__ import annotations

import itertools
import sys

import torch

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model


def main() -> None:
    """Train; the first line says that the swap file is in use."""
    torch.set_num_threads(1)
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else None
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=sys.argv[1],
        host_memory="40KB",
        sub_group_size=1024,
    )
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    for step in itertools.count() if limit is None else range(limit):
        loss = engine(*make_batch(step))
        engine.backward(loss)
        engine.step()
        moved = engine.ledger.snapshot().nvme_write_bytes
        print(f"step {step} loss {loss.item().hex()} written {moved}", flush=True)  # noqa: T201
    engine.destroy()


if __name__ == "__main__":
    main()
