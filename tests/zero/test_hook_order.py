"""A user's hooks run in the order and with the values of plain torch, whatever moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks

pytestmark = pytest.mark.nvme
WIDTH = 8
Seen = list[tuple[str, str, list[float]]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        found: torch.Tensor = x + scale * self.b(torch.tanh(self.a(x)))
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.h:
            x = block(x, scale=0.5)
        return x


def sums(value: Any) -> list[float]:
    """Return a number for each tensor of what a hook is given."""
    if isinstance(value, torch.Tensor):
        return [round(value.double().sum().item(), 5)]
    if isinstance(value, tuple | list):
        return [number for each in value for number in sums(each)]
    if isinstance(value, dict):
        return sums(list(value.values()))
    return []


class Hooks:
    """Every kind of hook on every module and parameter; some change what passes."""

    def __init__(self, model: nn.Module, seen: Seen, mark: str) -> None:
        self.seen = seen
        for name, module in model.named_modules():
            self._on_module(f"{mark} {name}", module)
        for name, parameter in model.named_parameters():
            self._on_parameter(f"{mark} {name}", parameter)

    def _on_module(self, name: str, module: nn.Module) -> None:
        def forward_pre(_: nn.Module, args: Any, kwargs: Any) -> Any:
            weights = sums([each.detach().clone() for each in module.parameters(recurse=False)])
            self.seen.append((name, "forward pre", sums((args, kwargs)) + weights))
            return (args[0] * 1.01,), kwargs

        def forward(_: nn.Module, args: Any, output: Any) -> Any:
            self.seen.append((name, "forward", sums((args, output))))
            return output * 0.99

        def backward_pre(_: nn.Module, gradients: Any) -> Any:
            self.seen.append((name, "backward pre", sums(gradients)))
            return (gradients[0] * 1.02,)

        def backward(_: nn.Module, inputs: Any, outputs: Any) -> None:
            self.seen.append((name, "backward", sums((inputs, outputs))))

        module.register_forward_pre_hook(forward_pre, with_kwargs=True)
        module.register_forward_hook(forward)
        module.register_full_backward_pre_hook(backward_pre)
        module.register_full_backward_hook(backward)

    def _on_parameter(self, name: str, parameter: nn.Parameter) -> None:
        def gradient(arrived: torch.Tensor) -> torch.Tensor:
            self.seen.append((name, "gradient", sums(arrived)))
            return arrived * 2.0

        def accumulated(owner: torch.Tensor) -> None:
            self.seen.append((name, "accumulated", sums(owner.grad)))

        parameter.register_hook(gradient)
        parameter.register_post_accumulate_grad_hook(accumulated)


def run(model: nn.Module, call: Any, backward: Any, rank: int, seen: Seen) -> None:
    """Run a forward and a backward without gradients left over."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    backward(call(x).square().sum())
    seen.append(("x", "gradient", sums(x.grad)))


def outcomes(scratch: Path, rank: int, tier: str) -> list[Any]:
    torch.manual_seed(5)
    plain = Net()
    expected: Seen = []
    Hooks(plain, expected, "before")
    Hooks(plain, expected, "after")
    run(plain, plain, lambda loss: loss.backward(), rank, expected)
    torch.manual_seed(5)
    model = Net()
    seen: Seen = []
    Hooks(model, seen, "before")
    config = make_config(
        parameters=tier, optimizer=tier, nvme_path=str(scratch), host_memory="100KB"
    )
    engine, _, _, _ = zero.initialize(model=model, config=config)
    Hooks(model, seen, "after")
    run(model, engine, engine.backward, rank, seen)
    doubled = []
    for name, each in model.named_parameters():
        found = zero.safe_get_full_grad(each)
        doubled.append((name, round(found.double().sum().item(), 4)))
    engine.destroy()
    total = [(name, sums(each.grad)) for name, each in plain.named_parameters()]
    return [seen, expected, doubled, total]


@pytest.mark.parametrize(("tier", "world_size"), [("none", 1), ("nvme", 1), ("nvme", 2)])
def test_hooks_keep_their_order_and_values(scratch: Path, tier: str, world_size: int) -> None:
    results = on_ranks(lambda rank: outcomes(scratch, rank, tier), world_size, scratch)
    for seen, expected, _, _ in results:
        assert len(expected) > 100
        assert [each[:2] for each in seen] == [each[:2] for each in expected]
        for ours, theirs in zip(seen, expected, strict=True):
            assert ours[2] == pytest.approx(theirs[2], rel=1e-4, abs=1e-4), ours[:2]
    for position, (_, gradient) in enumerate(results[0][2]):
        mean = sum(result[3][position][1][0] for result in results) / world_size
        assert gradient == pytest.approx(mean, rel=1e-3, abs=1e-3)
