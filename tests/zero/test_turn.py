"""What is on a device at the loss, and what is copied to it in a forward and its backward."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
import zero.planning
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.observe import digest, full_parameters
from tests.support.simulated_device import SimulatedDevice

pytestmark = pytest.mark.nvme
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


class Mixture(nn.Module):
    """A gate and two experts, both of which see every word."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        first, second = (expert(x) for expert in self.experts)
        return gates[..., :1] * first + gates[..., 1:] * second


class Routed(nn.Module):
    """A block with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixture(self.a(x))


class AtTheLoss(torch.autograd.Function):
    """Looks at a model in the forward and in the backward of its loss."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, model: Net) -> torch.Tensor:
        ctx.model = model
        model.look()
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.model.look()
        return gradient, None


class Net(nn.Module):
    """Blocks between an embedding and a head, which belong to the root unit."""

    def __init__(self, returns: Returns, block: type[nn.Module]) -> None:
        super().__init__()
        self.inp = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList(block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.returns = returns
        self.look = lambda: None

    def loss(self, logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())
        found: torch.Tensor = AtTheLoss.apply(loss, self)  # type: ignore[no-untyped-call]
        return found

    def forward(self, words: torch.Tensor) -> Any:
        x = self.inp(words)
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        if self.returns is Returns.LOGITS:
            return logits
        loss = self.loss(logits, words)
        return loss if self.returns is Returns.LOSS else (loss, logits)


def trained(
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: str,
    returns: Returns = Returns.BOTH,
    block: type[nn.Module] = Block,
    **zero_keys: Any,
) -> dict[str, Any]:
    """Train four steps beside a device, and return what was there at the loss of the last one."""
    monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(3))
    torch.manual_seed(2)
    memory = "60MB" if parameters == "cpu" else "2MB"
    config = make_config(
        parameters=parameters, optimizer=parameters, nvme_path=str(scratch), host_memory=memory
    )
    section = config["zero_optimization"]
    if parameters == "nvme":
        section["offload_param"]["max_in_cpu"] = 0
    section.pop("stage3_max_reuse_distance")
    section |= zero_keys
    net = Net(returns, block)
    engine, _, _, _ = zero.initialize(model=net, config=config)
    units = engine._runtime.units
    seen: list[Any] = []

    def look() -> None:
        live = {unit.name: unit.live_bytes for unit in units if unit.live_bytes}
        seen.append([sum(live.values()), sorted(live)])

    net.look = look
    losses = []
    for step in range(4):
        words = torch.arange(12).view(3, 4) + step
        seen.clear()
        engine.ledger.events.clear()
        before = engine.ledger.snapshot()
        output = engine(words)
        loss = net.loss(output, words) if returns is Returns.LOGITS else output
        loss = loss[0] if isinstance(loss, tuple) else loss
        engine.backward(loss)
        moved = engine.ledger.snapshot().minus(before)
        losses.append(loss.item())
        engine.step()
    plan, events = engine.plan.memory, list(engine.ledger.events)
    found = {
        "bits": [digest(full_parameters(engine)), losses],
        "at the loss": seen,
        "copied": moved.copied_bytes["in"],
        "full": {unit.name: unit.full_bytes for unit in units},
        "turn": plan.turn_bytes,
        "live": (engine.ledger.peaks["parameters unsharded (peak)"], plan.live_parameter_bytes),
        **{what: count(events, what) for what in ("prefetch", "kept", "gather")},
    }  # fmt: skip
    engine.destroy()
    return found


def count(events: Iterable[tuple[str, str]], what: str) -> Counter[str]:
    """Return how often something was done, by the name of the unit."""
    return Counter(name.partition("[")[0] for event, name in events if event == what)


@pytest.mark.parametrize("returns", Returns)
def test_at_the_loss_the_root_unit_alone_is_there(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, returns: Returns
) -> None:
    """Nothing is copied that is not used, and each block comes ahead where that costs no memory."""
    found = trained(scratch, monkeypatch, "cpu", returns)
    root, *blocks = (found["full"][name] for name in ("<root>", *BLOCKS))
    assert min(root, *blocks) > 0
    assert found["at the loss"] == 2 * [[root, ["<root>"]]]
    assert found["turn"] == root
    assert found["copied"] == root + 2 * sum(blocks)
    late = {BLOCKS[-1]: 1} if returns is Returns.LOSS else {}  # nothing tells when the loss is over
    assert found["kept"] == {"<root>": 1} and found["gather"] == {"<root>": 1} | late
    assert found["prefetch"] == dict.fromkeys(BLOCKS, 2) | late
    assert found["live"][0] == found["live"][1]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("block", [Block, Routed])
def test_ranks_agree_on_what_is_there(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, block: type[nn.Module], world_size: int
) -> None:
    """Each rank gathers a block once in each pass, and nothing that it does not use."""

    def work(rank: int) -> list[dict[str, Any]]:
        keys: list[dict[str, int]] = [{}, {"stage3_max_reuse_distance": 0}]
        folder = scratch / str(rank)
        return [trained(folder, monkeypatch, "cpu", block=block, **each) for each in keys]

    for default, never in on_ranks(work, world_size, scratch):
        root = default["full"]["<root>"]
        assert default["at the loss"] == never["at the loss"] == 2 * [[root, ["<root>"]]]
        assert default["turn"] == root
        assert default["kept"] == {"<root>": 1} and not never["kept"]
        assert default["bits"] == never["bits"]
        if block is Block:
            assert default["prefetch"] == dict.fromkeys(BLOCKS, 2)


def test_what_a_drive_holds_is_kept_over_the_loss(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(scratch, monkeypatch, "nvme")
    never = trained(scratch, monkeypatch, "nvme", stage3_max_reuse_distance=0)
    sizes, kept = found["full"], BLOCKS[-3:]
    there = sum(sizes[name] for name in ("<root>", *kept))
    assert found["kept"] == dict.fromkeys(("<root>", *kept), 1)
    assert found["at the loss"] == 2 * [[there, ["<root>", *kept]]]
    assert found["turn"] == there == found["live"][1]
    assert never["at the loss"] == 2 * [[sizes["<root>"], ["<root>"]]]
    assert never["turn"] == sizes["<root>"]
    assert never["copied"] - found["copied"] == there
    assert found["bits"] == never["bits"]
