"""Ranks that do not do the same: each case says how long it took and what came of it.

Run under torchrun as `python divergence.py NVME_PATH PATIENCE CASE...`; every rank prints a line
`RANK: SECONDS OUTCOME` a case. The last case may leave the ranks apart.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable

import torch

import zero
from tests.support.configs import make_config
from tests.support.ranks import config
from tests.support.tiny import TinyTransformer, make_batch


class Branching(TinyTransformer):
    """Uses the blocks that it is told."""

    order: tuple[int, ...] = (0, 1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        logits = self.head(self.norm(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(path: str, patience: float, *, stage: int = 3) -> zero.ZeroEngine:
    """Return an engine whose ranks ask after `patience` seconds."""
    torch.manual_seed(0)
    chosen = config(path) if stage == 3 else make_config(stage=stage, host_memory="1GB")
    engine, _, _, _ = zero.initialize(model=Branching(), config=chosen)
    engine._runtime.communicator.rendezvous.patience_s = patience
    return engine


def train(engine: zero.ZeroEngine, steps: int) -> None:
    """Train some steps."""
    for step in range(steps):
        engine.backward(engine(*batch(engine, step)))
        engine.step()


def batch(engine: zero.ZeroEngine, step: int) -> tuple[torch.Tensor, ...]:
    """Return a batch where the engine computes."""
    return tuple(each.to(engine.device) for each in make_batch(step, engine.global_rank))


def slow(engine: zero.ZeroEngine, rank: int, patience: float) -> str:
    """Compute for long on the last rank: it is waited for."""
    train(engine, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        until = time.monotonic() + 5 * patience
        while rank == engine.world_size - 1 and time.monotonic() < until:
            torch.randn(64, 64).square().sum()
        train(engine, 1)
    said = [str(each.message) for each in caught if "waits for" in str(each.message)]
    return f"completed {said[:1]}"


def branches(engine: zero.ZeroEngine, rank: int, patience: float) -> str:
    """Take another branch on rank 1."""
    engine.module.order = (1, 0) if rank == 1 else (0, 1)
    train(engine, 1)
    return "completed"


def early_step(engine: zero.ZeroEngine, rank: int, patience: float) -> str:
    """Ask for the norm of a step on rank 1 while the others run another forward."""
    train(engine, 1)
    engine.backward(engine(*batch(engine, 1)))
    if rank == 1:
        engine.step()
    else:
        engine(*batch(engine, 2))
    return "completed"


def ends_early(engine: zero.ZeroEngine, rank: int, patience: float) -> str:
    """Train fewer steps on rank 1, which then ends."""
    train(engine, 1 if rank == 1 else 3)
    engine.destroy()
    return "completed"


def saves_alone(engine: zero.ZeroEngine, rank: int, patience: float) -> str:
    """Read all weights on rank 0, while the others wait for it at a barrier."""
    train(engine, 1)
    if rank == 0:
        {name: each.clone() for name, each in engine.module.state_dict().items()}
    torch.distributed.barrier()
    return "completed"


def backward_alone(engine: zero.ZeroEngine, rank: int, patience: float) -> str:
    """Run a backward on rank 0, on another thread as a GPU does; the others read a weight."""
    loss = engine(*batch(engine, 0))
    if rank != 0:
        zero.safe_get_full_fp32_param(engine.module.norm.weight)
        return "completed"
    failures: list[BaseException] = []

    def run() -> None:
        try:
            engine.backward(loss)
        except BaseException as error:  # noqa: BLE001  raised by the thread that waits
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return "completed"


CASES: dict[str, Callable[[zero.ZeroEngine, int, float], str]] = {
    case.__name__: case
    for case in (slow, branches, early_step, ends_early, saves_alone, backward_alone)
}


def main() -> None:
    """Run the cases, each with an engine of its own."""
    torch.set_num_threads(1)
    zero.init_distributed()
    rank = torch.distributed.get_rank()
    path, patience = sys.argv[1], float(sys.argv[2])
    for name in sys.argv[3:]:
        engine = make(path, patience, stage=2 if name == "backward_alone" else 3)
        begin = time.monotonic()
        try:
            outcome = CASES[name](engine, rank, patience)
        except RuntimeError as error:
            outcome = f"{type(error).__name__} {error}".replace("\n", " ")
        sys.stdout.write(f"{rank}: {time.monotonic() - begin:.1f} {outcome}\n")
        sys.stdout.flush()
        with contextlib.suppress(RuntimeError):
            engine.destroy()


if __name__ == "__main__":
    main()
