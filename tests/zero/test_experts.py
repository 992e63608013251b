"""Ranks that route differently: each expert is gathered where some rank is routed to it."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.observe import digest, full_gradients
from zero.units import find_blocks, router_of

pytestmark = pytest.mark.nvme
WIDTH = 16
EXPERTS = 5
Route = tuple[int, ...]
"""The experts that a rank goes to, in the order in which it does."""


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return found


class Mixture(nn.Module):
    """Rows go to the experts of a route in turn; a gate scales what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.route: Route = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        y = torch.zeros_like(x)
        for position, number in enumerate(self.route):
            rows = torch.arange(position, len(x), len(self.route))
            y = y.index_add(0, rows, gates[rows, number, None] * self.experts[number](x[rows]))
        return y


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = Mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.mixture(self.norm(x))
        return found


class Model(nn.Module):
    """Layers of experts, run as they are or again in the backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            if self.kind == "plain" or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.kind == "reentrant")
        return x.square().mean()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def routes_of(model: nn.Module, rank: int, routes: list[Route]) -> None:
    """Give each layer a route; the second one that of the next rank."""
    for position, layer in enumerate(model.layers):
        layer.mixture.route = routes[(rank + position) % len(routes)]


def start(
    scratch: Path, kind: str, *, threshold: int = 0, accumulation: int = 1
) -> zero.ZeroEngine:
    torch.manual_seed(3)
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="400KB",
        accumulation=accumulation,
    )
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 0
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    engine, _, _, _ = zero.initialize(model=Model(kind), config=config)
    return engine


def trained(scratch: Path, kind: str, rank: int, routes: list[Route]) -> dict[str, Any]:
    """Train two steps beside a plain model that sees all batches; return what came of it."""
    engine = start(scratch, kind)
    torch.manual_seed(3)
    plain = Model(kind)
    group = engine.optimizer.param_groups[0]
    options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(plain.parameters(), **options)
    worst, gathered = 0.0, Counter[str]()
    for step in range(2):
        routes_of(engine.module, rank, routes)
        with torch.no_grad():
            engine(batch(rank, step + 7))
        engine.ledger.events.clear()
        loss = engine(batch(rank, step))
        engine.backward(loss)
        events = [name for what, name in engine.ledger.events if what == "gather"]
        gathered = Counter(name.partition("[")[0] for name in events)
        for other in range(len(routes)):
            routes_of(plain, other, routes)
            (plain(batch(other, step)) / len(routes)).backward()
        pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
        for ours, theirs in pairs:
            found = zero.safe_get_full_grad(ours)
            expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            off = (0 if found is None else found) - expected
            worst = max(worst, (off.abs().max() / expected.abs().max().clamp(min=1e-3)).item())
            theirs.grad = expected
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        worst = max(worst, (ours.detach().clone() - theirs).abs().max().item())
    report = engine.memory_report()["first_step"]
    engine.destroy()
    return {
        "worst": worst,
        "gathered": gathered,
        "exceeds": [
            line["what"]
            for line in report
            if "unsharded" in line["what"] and line["actual_bytes"] > line["planned_bytes"]
        ],
    }


ROUTES: dict[str, list[Route]] = {
    "apart": [(0, 2), (1,)],
    "one has none": [(4, 1, 3), ()],
    "orders differ": [(0, 1, 2), (2, 1, 0)],
    "three ranks": [(0, 2, 3), (3,), ()],
}


def test_each_expert_is_a_unit_within_its_block() -> None:
    model = Model("plain")
    names = [name for name, _ in find_blocks(model)]
    assert names[:3] == ["layers.0", "layers.0.mixture.experts.0", "layers.0.mixture.experts.1"]
    assert len(names) == 2 * (1 + EXPERTS)
    router = router_of(model, names[1])
    assert router is not None and router == ("layers.0.mixture", model.layers[0].mixture)
    assert router_of(model, "layers.0") is None


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("plain", ["three ranks"]),
        ("again", ["one has none", "orders differ"]),
        pytest.param("plain", ["apart", "one has none", "orders differ"], marks=pytest.mark.full),
        pytest.param("again", ["three ranks"], marks=pytest.mark.full),
        pytest.param("reentrant", ["apart", "one has none"], marks=pytest.mark.full),
        pytest.param("reentrant", ["three ranks"], marks=pytest.mark.full),
    ],
)
def test_ranks_route_as_they_like(scratch: Path, kind: str, names: list[str]) -> None:
    chosen = [ROUTES[name] for name in names]

    def work(rank: int) -> list[dict[str, Any]]:
        return [trained(scratch, kind, rank, routes) for routes in chosen]

    for found in on_ranks(work, len(chosen[0]), scratch):
        for routes, each in zip(chosen, found, strict=True):
            assert each["worst"] < 2e-5, routes
            assert not each["exceeds"]
            wanted = {number for route in routes for number in route}
            in_order = all(list(route) == sorted(route) for route in routes)
            for layer, number in itertools.product(range(2), range(EXPERTS)):
                times = each["gathered"].get(f"layers.{layer}.mixture.experts.{number}", 0)
                if number not in wanted:
                    assert times == 0
                elif in_order:  # again for a forward that runs again
                    assert times == (2 if kind == "plain" else 3), (routes, layer, number)
                else:
                    assert times >= 2


def test_gradients_of_an_expert_arrive_together_where_forwards_run_again(scratch: Path) -> None:
    """Some ranks run more experts again than others, and none adds its gradients before these."""

    def work(rank: int) -> list[str]:
        said = []
        for threshold in (0, 10**5):
            engine = start(scratch, "again", threshold=threshold, accumulation=3)
            for step, routes in enumerate([[(0, 1), (1, 2)], [(0, 1, 3), (1,)], [(2,), (0, 1, 2)]]):
                routes_of(engine.module, rank, routes)
                engine.backward(engine(batch(rank, step)))
            said.append(digest(full_gradients(engine)))
            engine.destroy()
        return said

    for in_turns, staying in on_ranks(work, 2, scratch):
        assert in_turns == staying


def test_gathered_experts_let_ranks_run_freely(scratch: Path) -> None:
    def work(rank: int) -> list[float]:
        engine = start(scratch, "plain")
        routes_of(engine.module, rank, [(0, 2), (1,)])
        said = []
        with torch.no_grad(), zero.GatheredParameters(list(engine.module.parameters())):
            for step in range(1 + 2 * rank):
                said.append(engine.module(batch(rank, step)).item())
        engine.destroy()
        return said

    torch.manual_seed(3)
    plain = Model("plain")
    for rank, found in enumerate(on_ranks(work, 2, scratch)):
        routes_of(plain, rank, [(0, 2), (1,)])
        with torch.no_grad():
            expected = [plain(batch(rank, step)).item() for step in range(1 + 2 * rank)]
        assert found == pytest.approx(expected)
