"""Values that are put in place to evaluate leave those in training as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config

pytestmark = pytest.mark.nvme

WIDTH = 64
Wrap = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Four blocks, and a head that stays with the root unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return self.out(x).square().mean()


def make_engine(tier: str, folder: Path) -> zero.ZeroEngine:
    config = make_config(
        parameters=tier, optimizer=tier, nvme_path=str(folder), sub_group_size=1024,
        host_memory="64KB" if tier == "nvme" else "4MB",
    )  # fmt: skip
    return zero.initialize(model=Net(), config=config)[0]


def step(engine: zero.ZeroEngine, number: int) -> float:
    loss = engine(torch.full((2, WIDTH), 1.0 + number))
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("through", ["the engine", "its model"])
@pytest.mark.parametrize("wrap", [torch.Tensor.clone, nn.Parameter], ids=["tensors", "parameters"])
def test_a_functional_call_trains_nothing(
    tier: str, through: str, wrap: Wrap, scratch: Path
) -> None:
    """As averages are evaluated, and as meta-learning asks for gradients of given values."""
    reference = make_engine("none", scratch)
    wanted = [step(reference, number) for number in range(3)]
    engine = make_engine(tier, scratch)
    losses = [step(engine, 0)]
    if tier == "nvme":
        assert engine.ledger.snapshot().nvme_write_bytes > 0
    plain, x = Net(), torch.ones(2, WIDTH)
    given = {
        name: wrap(torch.full_like(each, 0.05)).requires_grad_()
        for name, each in plain.named_parameters()
    }
    model, prefix = (engine, "module.") if through == "the engine" else (engine.module, "")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            prefixed = {prefix + name: each for name, each in given.items()}
            found = torch.func.functional_call(model, prefixed, (x,))
            expected = torch.func.functional_call(plain, given, (x,))
        assert torch.equal(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, list(given.values())),
        torch.autograd.grad(expected, list(given.values())),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    losses += [step(engine, number) for number in (1, 2)]
    assert losses == wanted
    assert engine.global_steps == 3
    engine.destroy()
    reference.destroy()


def test_a_parameter_put_in_place_is_still_adopted(scratch: Path) -> None:
    engine = make_engine("nvme", scratch)
    engine.module.out.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.25))
    engine(torch.ones(2, WIDTH))
    assert engine.module.out.weight.detach().clone().unique().tolist() == [0.25]
    engine.destroy()


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_parameters_that_are_put_in_place_to_evaluate_are_not_adopted(
    tier: str, scratch: Path
) -> None:
    """As `store`, `copy_to` and `restore` of averages do with the objects."""
    reference = make_engine("none", scratch)
    wanted = [step(reference, number) for number in range(3)]
    engine = make_engine(tier, scratch)
    found, model = [step(engine, 0)], engine.module
    for mode in (torch.no_grad, torch.inference_mode):
        own = [layer.weight for layer in (model.out, model.h[1][0])]
        plain = Net()
        plain.load_state_dict({name: each.clone() for name, each in model.state_dict().items()})
        for net in (model, plain):
            for layer in (net.out, net.h[1][0]):
                layer.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.01))
        with mode():
            x = torch.ones(2, WIDTH)
            assert torch.equal(engine(x), plain(x))
        for layer, weight in zip((model.out, model.h[1][0]), own, strict=True):
            layer.weight = weight
    found += [step(engine, number) for number in (1, 2)]
    assert found == wanted
    engine.destroy()
    reference.destroy()


def test_what_is_adopted_late_was_evaluated_with_already(scratch: Path) -> None:
    engine = make_engine("nvme", scratch)
    new = {name: torch.full_like(each, 0.02) for name, each in Net().state_dict().items()}
    engine.module.load_state_dict(new, assign=True)
    plain = Net()
    plain.load_state_dict(new)
    with torch.no_grad():
        assert torch.equal(engine(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))
    loss = step(engine, 0)
    assert loss == plain(torch.ones(2, WIDTH)).item()
    assert type(engine.module.out.weight) is not nn.Parameter, "sharded again"
    engine.destroy()


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_a_loss_from_before_a_freeze_says_so_where_it_is_lost(tier: str, scratch: Path) -> None:
    engine = make_engine(tier, scratch)
    step(engine, 0)
    loss = engine(torch.ones(2, WIDTH))
    engine.module.h[0][0].weight.requires_grad_(requires_grad=False)
    engine(torch.ones(2, WIDTH))
    if tier == "nvme":
        with pytest.raises(
            RuntimeError, match="before parameters were frozen, unfrozen or resized"
        ):
            engine.backward(loss)
    else:
        engine.backward(loss)
        engine.step()
    step(engine, 1)
    assert engine.global_steps == 2 + (tier == "none")
    engine.destroy()
