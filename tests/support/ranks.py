"""Cases for several ranks, each ending in a line `RANK: outcome`. Run under torchrun."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch

import zero
from tests.support.configs import make_config
from tests.support.observe import digest, full_parameters
from tests.support.tiny import TinyTransformer, make_batch, make_model


def config(nvme_path: str) -> dict[str, object]:
    """Return a paging configuration for two ranks."""
    return make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=nvme_path,
        host_memory="80KB",
        sub_group_size=1024,
    )


def different_order(path: str, rank: int) -> str:
    """Run blocks of one shape in another order on rank 1."""
    engine, _, _, _ = zero.initialize(model=make_model(layers=3), config=config(path))
    blocks = engine.module.blocks
    x = torch.ones(1, 4, 16)
    with torch.no_grad():
        for block in blocks if rank == 0 else reversed(blocks):
            x = block(x)
    return "ran"


def different_models(path: str, rank: int) -> str:
    """Bring a model of another depth on rank 1."""
    zero.initialize(model=make_model(layers=2 + rank), config=config(path))
    return "ran"


def different_seeds(path: str, rank: int) -> str:
    """Start from other weights and buffers on each rank: rank 0's count."""
    model = make_model(seed=rank)
    model.register_buffer("scale", torch.full((3,), float(rank)))
    engine, _, _, _ = zero.initialize(model=model, config=config(path))
    for step in range(2):
        engine.backward(engine(*make_batch(step, rank)))
        engine.step()
    found = f"{digest(full_parameters(engine))[:12]} {model.scale.tolist()}"
    engine.destroy()
    return found


def unused_everywhere(path: str, rank: int) -> str:
    """Train with a block that no rank uses."""

    class Skipping(TinyTransformer):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.embedding(tokens))
            logits = self.head(self.norm(x))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    engine, _, _, _ = zero.initialize(model=Skipping(), config=config(path))
    for step in range(2):
        engine.backward(engine(*make_batch(step, rank)))
        engine.step()
    found = digest(full_parameters(engine))[:12]
    engine.destroy()
    return found


def touches(path: str, rank: int) -> str:
    """Read, write, initialise and differentiate sharded weights outside a forward."""
    engine, _, _, _ = zero.initialize(model=make_model(), config=config(path))
    weight, plain = engine.module.blocks[0].up.weight, make_model().blocks[0].up.weight
    said = []
    with torch.no_grad():
        said.append(("read", torch.equal(weight, plain)))
        weight.data[3].fill_(float(rank + 7))
        plain[3].fill_(7.0)
        said.append(("write", torch.equal(weight, plain)))
        torch.manual_seed(rank)
        torch.nn.init.normal_(weight)
        torch.manual_seed(0)
        said.append(("init", torch.equal(weight, torch.nn.init.normal_(plain))))
    ((rank + 1) * weight.square()).sum().backward()
    said.append(("gradient", torch.equal(weight.grad, 3 * plain.detach())))
    local = zero.safe_get_local_fp32_param(weight)
    assert local is not None
    count = engine._runtime.communicator.gather_rows(torch.tensor([local.numel()])).sum()
    said.append(("local", int(count) == weight.numel()))
    found = " ".join(f"{what} {int(good)}" for what, good in said)
    found += f" {digest(full_parameters(engine))[:12]}"
    engine.destroy()
    return found


def different_touches(engine: zero.ZeroEngine, rank: int) -> None:
    """Read another weight on each rank."""
    engine.module.blocks[rank].up.weight.sum()


def touch_on_one_rank(engine: zero.ZeroEngine, rank: int) -> None:
    """Read a weight on rank 0 alone."""
    engine._runtime.communicator.join_timeout_s = 2.0
    if rank == 0:
        engine.module.blocks[0].up.weight.sum()


def touching(path: str, rank: int) -> str:
    """Run all cases of touches on one launch; the last leaves the ranks apart."""
    said = [touches(path, rank)]
    engine, _, _, _ = zero.initialize(model=make_model(), config=config(path))
    for case in (different_touches, touch_on_one_rank):
        try:
            case(engine, rank)
            said.append("ran")
        except zero.RankError as error:
            said.append(f"RankError {error}".replace("\n", " "))
    return " | ".join(said)


CASES: dict[str, Callable[[str, int], str]] = {
    case.__name__: case
    for case in (
        different_order,
        different_models,
        different_seeds,
        unused_everywhere,
        touching,
    )
}


def main() -> None:
    """Run one case and print what came of it."""
    torch.set_num_threads(1)
    zero.init_distributed()
    rank = torch.distributed.get_rank()
    try:
        outcome = CASES[sys.argv[1]](sys.argv[2], rank)
    except RuntimeError as error:
        outcome = f"RuntimeError {error}"
    sys.stdout.write(f"{rank}: {outcome}\n")
    sys.stdout.flush()
    with contextlib.suppress(RuntimeError):  # ranks that are apart after a refusal
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
