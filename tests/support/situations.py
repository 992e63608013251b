"""The graphs that real training makes, each against the same model in plain torch.

Run under torchrun, or alone: every rank trains its own batches with everything that can page on
NVMe, and compares with a plain model that has seen the batches of all ranks. Prints one line a
situation: `RANK: name outcome`.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from tests.support.configs import make_config

WIDTH = 12
STEPS = 3
Forward = Callable[..., Any]
Backward = Callable[..., Any]


@dataclass
class Scene:
    """What a situation plays with: a model that may be an engine, and which batch it is."""

    call: Forward
    model: nn.Module
    rank: int
    step: int
    backward: Backward

    def batch(self, number: int = 0) -> torch.Tensor:
        seed = 1000 * self.step + 10 * self.rank + number
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


Play = Callable[[Scene], None]


class Block(nn.Module):
    """A residual layer that may be told to do something else."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)
        self.b = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    """Blocks between two linear layers; `walk` says which blocks run."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList(block() for _ in range(3))
        self.out = nn.Linear(WIDTH, 4)
        self.walk: Callable[[Net, torch.Tensor], torch.Tensor] = through_all

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.walk(self, self.inp(x)))
        return found


def through_all(net: Net, y: torch.Tensor) -> torch.Tensor:
    for block in net.h:
        y = block(y)
    return y


class Either(nn.Module):
    """Two ways to go on, of which each rank takes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.goes_left = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + (self.left(x) if self.goes_left else self.right(x))
        return found


class Mixture(nn.Module):
    """Every token goes to one of three experts; most batches leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        weight, chosen = scores.max(-1)
        y = x.clone()
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).reshape(-1)
            if len(rows):
                y = y.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return y


class Lender(nn.Module):
    """Hands its weight out, and takes another one in."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, borrowed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, nn.Parameter]:
        y = self.own(x)
        return (y if borrowed is None else F.linear(y, borrowed)), self.own.weight


class Lending(nn.Module):
    """Each block uses the weight that the one before handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Lender() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None
        for block in self.h:
            x, weight = block(x, weight)
        return x + F.linear(x, self.h[0].own.weight)


def loss_of(found: torch.Tensor) -> torch.Tensor:
    return found.square().mean()


def once(scene: Scene) -> None:
    scene.backward(loss_of(scene.call(scene.batch())))


def branch_by_step(scene: Scene) -> None:
    scene.model.walk = lambda net, y: net.h[scene.step % 2](net.h[2](y))
    once(scene)


def branch_by_rank(scene: Scene) -> None:
    for block in scene.model.h:
        block.goes_left = (scene.rank + scene.step) % 2 == 0
    once(scene)


def reused(scene: Scene) -> None:
    scene.model.walk = lambda net, y: net.h[1](net.h[0](net.h[1](net.h[1](y))))
    once(scene)


def forwards_then_one_backward(scene: Scene) -> None:
    found = [loss_of(scene.call(scene.batch(number))) for number in range(3)]
    scene.backward(found[0] + 2 * found[1] + found[2])


def forwards_then_backwards(scene: Scene) -> None:
    found = [loss_of(scene.call(scene.batch(number))) for number in range(3)]
    for loss in (found[1], found[2], found[0]):
        scene.backward(loss)


def two_losses(scene: Scene) -> None:
    y = scene.call(scene.batch())
    scene.backward(y[:, 0].square().mean(), retain_graph=True)
    scene.backward(y[:, 1:].abs().mean())


def gradient_penalty(scene: Scene) -> None:
    x = scene.batch().requires_grad_()
    y = scene.call(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    scene.backward(loss_of(y) + slope.square().mean())


def gradient_of_inputs_first(scene: Scene) -> None:
    x = scene.batch().requires_grad_()
    torch.autograd.grad(loss_of(scene.call(x)), x)
    once(scene)


def checkpointed(reentrant: bool) -> Play:  # noqa: FBT001
    def walk(net: Net, y: torch.Tensor) -> torch.Tensor:
        for block in net.h:
            y = checkpoint(block, y, use_reentrant=reentrant)
        return y

    def play(scene: Scene) -> None:
        scene.model.walk = walk
        once(scene)

    return play


def checkpointed_as_one(scene: Scene) -> None:
    scene.model.walk = lambda net, y: checkpoint(through_all, net, y, use_reentrant=False)
    once(scene)


def compiled(scene: Scene) -> None:
    if scene.step == 0:
        for block in scene.model.h:
            block.forward = torch.compile(block.forward, backend="aot_eager")
    once(scene)


def evaluated_between(scene: Scene) -> None:
    with torch.no_grad():
        scene.call(scene.batch(5))
    once(scene)
    with torch.inference_mode():
        scene.call(scene.batch(6))
    scene.model.eval()
    with torch.no_grad():
        scene.call(scene.batch(7))
    scene.model.train()


def unsynchronised(scene: Scene) -> None:
    if isinstance(scene.call, zero.ZeroEngine):
        with scene.call.no_sync():
            scene.backward(loss_of(scene.call(scene.batch(0))))
    else:
        scene.backward(loss_of(scene.call(scene.batch(0))))
    scene.backward(loss_of(scene.call(scene.batch(1))))


def plain_backward(scene: Scene) -> None:
    loss = loss_of(scene.call(scene.batch()))
    (loss if isinstance(scene.call, zero.ZeroEngine) else loss / WORLD[0]).backward()


def elsewhere(scene: Scene) -> None:
    y = scene.call(scene.batch())
    borrowed = F.linear(scene.batch(3), scene.model.h[1].a.weight)
    scene.backward(loss_of(y) + 0.1 * borrowed.square().mean())


def a_side_loss(scene: Scene) -> None:
    y = scene.call(scene.batch())
    decay = sum(parameter.square().sum() for parameter in scene.model.h[2].parameters())
    scene.backward(loss_of(y) + 1e-2 * decay)


def with_unused() -> nn.Module:
    net = Net()
    net.spare = nn.Parameter(torch.ones(3))
    net.h[1].spare = nn.Linear(3, 5)
    return net


def with_frozen_norms() -> nn.Module:
    net = Net(lambda: nn.Sequential(nn.LayerNorm(WIDTH), Block()))
    for block in net.h:
        block[0].requires_grad_(requires_grad=False)
    net.inp.requires_grad_(requires_grad=False)
    return net


def with_parametrizations() -> nn.Module:
    net = Net()
    nn.utils.parametrizations.weight_norm(net.h[0].a)
    nn.utils.parametrizations.orthogonal(net.h[1].a)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        nn.utils.weight_norm(net.h[2].b)
    return net


SITUATIONS: dict[str, tuple[Callable[[], nn.Module], Play]] = {
    "plain": (Net, once),
    "branch by step": (Net, branch_by_step),
    "branch by rank": (lambda: Net(Either), branch_by_rank),
    "unused parameters": (with_unused, once),
    "experts in blocks": (lambda: Net(Mixture), once),
    "experts alone": (Mixture, once),
    "experts, one backward": (lambda: Net(Mixture), forwards_then_one_backward),
    "experts, backwards": (lambda: Net(Mixture), forwards_then_backwards),
    "experts, two losses": (lambda: Net(Mixture), two_losses),
    "experts, penalty": (lambda: Net(Mixture), gradient_penalty),
    "experts, checkpoint": (lambda: Net(Mixture), checkpointed(reentrant=False)),
    "experts, reentrant": (lambda: Net(Mixture), checkpointed(reentrant=True)),
    "experts, all again": (lambda: Net(Mixture), checkpointed_as_one),
    "reused layers": (Net, reused),
    "forwards, one backward": (Net, forwards_then_one_backward),
    "forwards, backwards": (Net, forwards_then_backwards),
    "two losses, retain_graph": (Net, two_losses),
    "gradient penalty": (Net, gradient_penalty),
    "autograd.grad first": (Net, gradient_of_inputs_first),
    "checkpoint, reentrant": (Net, checkpointed(reentrant=True)),
    "checkpoint, not reentrant": (Net, checkpointed(reentrant=False)),
    "checkpoint of all blocks": (Net, checkpointed_as_one),
    "checkpoint with frozen": (with_frozen_norms, checkpointed(reentrant=False)),
    "reentrant with frozen": (with_frozen_norms, checkpointed(reentrant=True)),
    "compiled blocks": (Net, compiled),
    "evaluation between": (Net, evaluated_between),
    "no_sync": (Net, unsynchronised),
    "loss.backward": (Net, plain_backward),
    "parametrizations": (with_parametrizations, once),
    "weights handed on": (Lending, once),
    "a weight used elsewhere": (Net, elsewhere),
    "a loss on the weights": (Net, a_side_loss),
}
WORLD = [1]


def differing_gradient(model: nn.Module, plain: nn.Module) -> str | None:
    """Return the first parameter whose gradient is not that of the plain model."""
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if not theirs.requires_grad:
            continue
        found = zero.safe_get_full_grad(ours)
        if found is None and theirs.grad is not None and theirs.grad.any():
            return f"{name} has none"
        if found is None:
            continue
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-6):
            return f"{name} is off by {(found - expected).abs().max()}"
    return None


def start(model: nn.Module, path: str, play: Play) -> zero.ZeroEngine:
    """Return an engine that pages everything it can."""
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=path,
        host_memory=f"{24 * WORLD[0]}KB",
        sub_group_size=256,
    )
    config["zero_optimization"]["stage3_max_reuse_distance"] = 10**9
    config["tiers"]["double_backward"] = play is gradient_penalty
    config["gradient_clipping"] = 0.0
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0},
    }
    engine, _, _, _ = zero.initialize(model=model, config=config)
    return engine


def step_plainly(plain: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step as the engine does: a missing gradient counts as zero."""
    for parameter in plain.parameters():
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def compare(name: str, path: str, rank: int) -> str:
    """Train both and say how they differ."""
    make, play = SITUATIONS[name]
    torch.manual_seed(5)
    plain = make()
    torch.manual_seed(5)
    model = make()
    engine = start(model, path, play)
    is_moved = any(unit.moves for unit in engine._runtime.units)
    if len(engine._runtime.units) > 1:
        is_moved = is_moved and engine.plan.memory.swap_file_bytes > 0
    trained = [each for each in plain.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-4, weight_decay=0.0)

    def backward(loss: torch.Tensor, **options: Any) -> None:
        (loss / WORLD[0]).backward(**options)

    for step in range(STEPS):
        for other in range(WORLD[0]):
            play(Scene(plain, plain, other, step, backward))
        play(Scene(engine, model, rank, step, engine.backward))
        wrong = differing_gradient(model, plain)
        if wrong is not None:
            return f"step {step}: the gradient of {wrong}"
        engine.step()
        step_plainly(plain, optimizer)
    for (title, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if not torch.allclose(ours.detach().clone(), theirs, rtol=1e-3, atol=1e-5):
            return f"{title} is off"
    held = [unit.name for unit in engine._runtime.units if unit.is_unsharded]
    engine.destroy()
    return "right" if is_moved and not held else f"moved {is_moved}, held {held}"


def main() -> None:
    """Play the situations that are named, or all of them."""
    torch.set_num_threads(1)
    zero.init_distributed()
    rank = 0
    if torch.distributed.is_initialized():
        rank, WORLD[0] = torch.distributed.get_rank(), torch.distributed.get_world_size()
    warnings.filterwarnings("error", "the first step took")  # more than was planned
    for name in sys.argv[2:] or SITUATIONS:
        try:
            outcome = compare(name, sys.argv[1], rank)
        except Exception as error:  # noqa: BLE001  the outcome of this one, the next ones go on
            outcome = f"{type(error).__name__} {error}".replace("\n", " ")
            traceback.print_exc()
        sys.stdout.write(f"{rank}: {name}: {outcome}\n")
        sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
