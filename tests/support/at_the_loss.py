"""Models that are looked at while they are at their loss, and trained beside a device."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
import zero.planning
from tests.support.configs import make_config
from tests.support.observe import digest, full_parameters
from tests.support.simulated_device import SimulatedDevice

WIDTH = 32
WORDS = 300
LAYERS = 6
BLOCKS = tuple(f"h.{number}" for number in range(LAYERS))


class Returns(enum.Enum):
    """What the model gives back."""

    LOSS = "loss"
    BOTH = "loss and logits"
    LOGITS = "logits"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 4 * WIDTH)
        self.b = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Watched(nn.Module):
    """A model that is looked at when it is at its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.look = lambda: None

    def loss(self, logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.looked_at(nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()))

    def looked_at(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss at which the model is looked at, in the forward and in the backward."""
        found: torch.Tensor = AtTheLoss.apply(loss, self)  # type: ignore[no-untyped-call]
        return found


class AtTheLoss(torch.autograd.Function):
    """Looks at a model in the forward and in the backward of its loss."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, model: Watched) -> torch.Tensor:
        ctx.model = model
        model.look()
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.model.look()
        return gradient, None


class Net(Watched):
    """Blocks between an embedding and a head, which belong to the root unit."""

    def __init__(self, returns: Returns) -> None:
        super().__init__()
        self.inp = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.returns = returns

    def forward(self, words: torch.Tensor) -> Any:
        x = self.inp(words)
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        if self.returns is Returns.LOGITS:
            return logits
        loss = self.loss(logits, words)
        return loss if self.returns is Returns.LOSS else (loss, logits)


Pass = Callable[[zero.ZeroEngine, torch.Tensor], list[torch.Tensor]]
"""Runs forward and backward of a micro-batch, and returns the losses."""


def one_pass(engine: zero.ZeroEngine, words: torch.Tensor) -> list[torch.Tensor]:
    """Run a forward and its backward."""
    output = engine(words)
    loss = output[0] if isinstance(output, tuple) else output
    if loss.dim():
        loss = engine.module.loss(loss, words)
    engine.backward(loss)
    return [loss]


def trained(
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[], Watched],
    parameters: str = "cpu",
    *,
    passes: Pass = one_pass,
    on_host: int = 0,
    words: torch.Tensor | None = None,
    **zero_keys: Any,
) -> dict[str, Any]:
    """Train four steps beside a device, and return what the last one did and held.

    Where parameters rest on NVMe, `on_host` elements of them rest in memory.
    """
    monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(3))
    torch.manual_seed(2)
    config = make_config(
        parameters=parameters, optimizer=parameters, nvme_path=str(scratch), host_memory="2MB"
    )
    section = config["zero_optimization"]
    if parameters == "nvme":
        section["offload_param"]["max_in_cpu"] = on_host
    section.pop("stage3_max_reuse_distance")
    section |= zero_keys
    net = build()
    engine, _, _, _ = zero.initialize(model=net, config=config)
    units = engine._runtime.units
    seen: list[Any] = []

    def live() -> list[Any]:
        found = {unit.name: unit.live_bytes for unit in units if unit.live_bytes}
        return [sum(found.values()), sorted(found)]

    net.look = lambda: seen.append(live())
    losses = []
    for step in range(4):
        seen.clear()
        engine.ledger.events.clear()
        before = engine.ledger.snapshot()
        ours = torch.arange(12).view(3, 4) if words is None else words
        losses += [loss.item() for loss in passes(engine, ours + step)]
        moved = engine.ledger.snapshot().minus(before)
        left = live()
        engine.step()
    plan, events = engine.plan.memory, list(engine.ledger.events)
    found = {
        "bits": [digest(full_parameters(engine)), losses],
        "at the loss": seen,
        "left": left,
        "copied": moved.copied_bytes["in"],
        "full": {unit.name: unit.full_bytes for unit in units},
        "planned": plan.live_bytes_at_loss,
        "live": (engine.ledger.peaks["parameters unsharded (peak)"], plan.live_parameter_bytes),
        **{what: count(events, what) for what in ("prefetch", "kept", "gather")},
    }  # fmt: skip
    engine.destroy()
    return found


def count(events: Iterable[tuple[str, str]], what: str) -> Counter[str]:
    """Return how often something was done, by the name of the unit."""
    return Counter(name.partition("[")[0] for event, name in events if event == what)
