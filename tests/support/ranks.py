"""Cases for several ranks, each ending in a line `RANK: outcome`. Run under torchrun."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
import time
import warnings
from collections.abc import Callable
from unittest import mock

import torch

import zero
from tests.support.configs import make_config
from tests.support.initial_weights import FEW, digests
from tests.support.observe import as_bits, digest, full_parameters
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


def batch(engine: zero.ZeroEngine, step: int) -> list[torch.Tensor]:
    """Return this rank's batch where the engine computes."""
    return [each.to(engine.device) for each in make_batch(step, engine.global_rank)]


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
        engine.backward(engine(*batch(engine, step)))
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
        engine.backward(engine(*batch(engine, step)))
        engine.step()
    found = digest(full_parameters(engine))[:12]
    engine.destroy()
    return found


def touches(path: str, rank: int) -> str:
    """Read, write, initialise and differentiate sharded weights outside a forward."""
    engine, _, _, _ = zero.initialize(model=make_model(), config=config(path))
    weight = engine.module.blocks[0].up.weight
    plain = make_model().to(engine.device).blocks[0].up.weight
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
    engine._runtime.communicator.rendezvous.patience_s = 1.0
    if rank == 0:
        engine.module.blocks[0].up.weight.sum()


def changes(path: str, rank: int) -> str:
    """Unfreeze a block, grow the tied embedding with other values on each rank, and train on."""
    model = make_model()
    model.blocks[1].requires_grad_(requires_grad=False)
    engine, _, _, _ = zero.initialize(model=model, config=config(path))
    average = zero.ShardedAverage(model)
    for step in range(3):
        if step == 1:
            model.blocks[1].requires_grad_(requires_grad=True)
            old = model.embedding.weight.detach().clone()
            zero.resize_parameter(
                engine, model.embedding.weight, (35, 16), init=lambda new: new.fill_(rank + 1.0)
            )
        engine.backward(engine(*batch(engine, step)))
        if step < 1:
            average.update()
            whole = average.full(model.norm.weight)
        engine.step()
        if step == 0:
            start = zero.safe_get_full_fp32_param(model.blocks[1].up.weight)
    weight = model.head.weight.detach().clone()
    said = [
        ("grown", weight.shape == (35, 16) and bool((weight[31:] > 0.9).all())),
        ("kept", bool((weight[:31] - old).abs().max() < 0.05)),
        ("thawed", start is None and model.blocks[1].up.weight.requires_grad),
        ("average", whole.shape == (16,)),
    ]
    found = " ".join(f"{what} {int(good)}" for what, good in said)
    found += f" {digest(full_parameters(engine))[:12]}"
    engine.destroy()
    return found


def loading(path: str, rank: int) -> str:
    """Build under zero.Init, load pieces from a dictionary, and say how much a rank holds."""
    with zero.Init() as context:
        model = make_model()
    numel = sum(each.numel() for each in model.parameters())
    held = int(context.report.rpartition(" bytes in")[0].rpartition(" ")[2].replace(",", ""))
    state = make_model(seed=6).state_dict()
    zero.load_weights(model, state)
    engine, _, _, _ = zero.initialize(model=model, config=config(path))
    same = all(torch.equal(each.cpu(), state[name]) for name, each in model.state_dict().items())
    engine.destroy()
    slack = 4 * 64 * len(state)
    return f"loaded {int(same)} half {int(held <= 4 * numel // 2 + slack)}"


def set_gradients(path: str, rank: int) -> str:
    """Set gradients of which one rank owns all, in three ways, before a first backward."""
    engine, _, _, _ = zero.initialize(model=make_model(), config=config(path))
    said = []
    for weight in (engine.module.norm.bias, engine.module.blocks[0].norm1.weight):
        for value in (1.0, 2.0, 3.0):
            if value == 1.0:
                zero.safe_set_full_grad(weight, torch.full_like(weight, value))
            elif value == 2.0:
                local = zero.safe_get_local_fp32_param(weight)
                zero.safe_set_local_grad(weight, torch.full_like(local, value))
            else:
                weight.grad = torch.full(weight.shape, value, device=engine.device)
            found = zero.safe_get_full_grad(weight)
            same = found is not None and bool((found == value).all())
            said.append(int(same and weight.grad is not None))
            engine.zero_grad()
        engine.backward(engine(*batch(engine, 0)))
        engine.step()
    found = f"{said} {digest(full_parameters(engine))[:12]}"
    engine.destroy()
    return found


class Odd(torch.nn.Module):
    """Parameters of every size around the world size, tied odd ones, and 3-D ones (B4, B12)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is nothing to initialise
            self.none = torch.nn.Linear(8, 0)
        self.one = torch.nn.Linear(256, 1)
        self.sizes = torch.nn.ParameterList(
            torch.nn.Parameter(torch.linspace(0.5, 1, size)) for size in (0, 1, 2, 3, 4)
        )
        self.scalar = torch.nn.Parameter(torch.tensor(1.5))
        self.experts = torch.nn.Parameter(torch.full((3, 5, 5), 0.1))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.low = torch.nn.Parameter(torch.ones(9, dtype=torch.bfloat16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scalar
        x = torch.einsum("bi,eij->bj", x, self.experts)
        extra = sum(each.square().sum() for each in self.sizes)
        extra = extra + self.one(torch.ones(1, 256)).sum() + self.none(torch.ones(1, 8)).sum()
        logits = self.head(x) * self.frozen.mean()
        return torch.nn.functional.cross_entropy(logits, tokens) + extra + self.low.sum().float()


def odd_sizes(path: str, rank: int) -> str:
    """Train and export odd parameters, built in both ways; a plain model loads the export."""
    said = []
    for under_init in (False, True):
        torch.manual_seed(4)
        with zero.Init(enabled=under_init):
            model = Odd()
        numels = [each.numel() for each in model.parameters()]
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        settings = {**config(path)}
        del settings["optimizer"], settings["bf16"]
        engine, _, _, _ = zero.initialize(model=model, optimizer=optimizer, config=settings)
        start = model.experts.detach().clone()
        for _ in range(2):
            engine.backward(engine(torch.arange(7)))
            engine.step()
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        fresh = Odd()
        fresh.load_state_dict(torch.load(buffer, weights_only=True))
        full = full_parameters(engine)
        same = all(
            (as_bits(each) == full[name]).all() and each.dtype == model.get_parameter(name).dtype
            for name, each in fresh.named_parameters()
        )
        moved = not torch.equal(start, model.experts)
        tied = fresh.head.weight is fresh.embedding.weight
        frozen = bool((model.frozen == 1).all())
        kept = numels == [each.numel() for each in model.parameters()]
        said.append(f"{int(same and moved and tied and frozen and kept)} {digest(full)[:12]}")
        engine.destroy()
    return " ".join(said)


def initial_weights(path: str, rank: int) -> str:
    """Build models in several ways and give the digests of their weights and masters."""
    return " ".join(value.rpartition(" ")[0] for value in digests(path, FEW).values())


def replan_failing(path: str, rank: int) -> str:
    """Rank 1 alone fails in each stage of planning anew; both raise, and train on if they can."""
    said = []
    places = {
        "zero.replan.make_blueprint": True,
        "zero.replan._make_spool": True,
        "zero.nursery.Spool.put": True,
        "zero.build.Store": False,
    }
    for place, goes_on in places.items():
        model = make_model()
        engine, _, _, _ = zero.initialize(model=model, config=config(path))
        engine.backward(engine(*make_batch(rank)))
        engine.step()
        before = model.blocks[0].up.weight.detach().clone()
        model.norm.weight.requires_grad_(requires_grad=False)
        kind = "nothing"
        begin = time.monotonic()
        full = OSError(errno.ENOSPC, "no space left")
        patch = mock.patch(place, side_effect=full) if rank == 1 else contextlib.nullcontext()
        with patch:
            try:
                engine(*make_batch(rank))
            except (OSError, RuntimeError) as error:
                kind = type(error).__name__
        in_time = time.monotonic() - begin < 30
        if goes_on:
            model.norm.weight.requires_grad_(requires_grad=True)
            same = torch.equal(model.blocks[0].up.weight.detach().clone(), before)
            engine.backward(engine(*make_batch(rank)))
            engine.step()
        else:
            try:
                engine(*make_batch(rank))
                same = False
            except RuntimeError as error:
                same = "planning the engine anew failed" in str(error)
        said.append(f"{kind} {in_time:d} {same:d}")
        engine.destroy()
    return ", ".join(said)


def touching(path: str, rank: int) -> str:
    """Run all cases of touches on one launch; the last leaves the ranks apart."""
    said = [touches(path, rank), changes(path, rank), loading(path, rank)]
    said.append(odd_sizes(path, rank))
    said.append(initial_weights(path, rank))
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
        set_gradients,
        replan_failing,
        touching,
        odd_sizes,
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
