"""Weights used by other code than their module: other models, parametrisations, hooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import nn
from torch.nn.utils import parametrizations

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme


@pytest.fixture
def config(scratch: Path) -> Iterator[dict[str, Any]]:
    yield make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="40KB",
        sub_group_size=1024,
    )


class Borrower(nn.Module):
    """Blocks that use each other's weights, a scalar of their parent, and weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            parametrizations.weight_norm(nn.Linear(16, 16)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) @ self.layers[0].weight.t()
        return F.linear(x, self.layers[1].weight).square().mean()


def test_borrowed_weights_scalars_and_weight_norm_train(config: dict[str, Any]) -> None:
    torch.manual_seed(2)
    ours = Borrower()
    torch.manual_seed(2)
    plain = Borrower()
    engine, _, _, _ = zero.initialize(model=ours, config=config)
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1
    )
    x = torch.randn(4, 16)
    for _ in range(3):
        loss, theirs = engine(x), plain(x)
        torch.testing.assert_close(loss, theirs)
        engine.backward(loss)
        engine.step()
        theirs.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, each in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).detach().clone(), each.detach())
    assert (ours.scale * torch.ones(3)).shape == (3,)
    engine.destroy()


def test_a_teacher_in_the_same_process_stays_plain(config: dict[str, Any]) -> None:
    student, teacher = make_model(seed=1), make_model(seed=2)
    engine, _, _, _ = zero.initialize(model=student, config=config)
    late = make_model(seed=3)
    for model in (teacher, late):
        assert all(type(each) is nn.Parameter for each in model.parameters())
    loss = engine(*make_batch(0)) + teacher(*make_batch(0)).detach()
    loss = loss + F.linear(torch.ones(1, 16), student.blocks[0].project.weight).sum()
    engine.backward(loss)
    engine.step()
    assert teacher.blocks[0].up.weight.grad is None
    engine.destroy()


@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_gathering_inside_a_hook_of_an_active_module(
    config: dict[str, Any], modifier_rank: int | None
) -> None:
    """Windows nest with a forward and a backward of the same unit."""
    model = make_model()
    plain = make_model()
    seen: list[float] = []

    def look(module: Any, *_: Any) -> None:
        chosen = [module.up.weight, module.down.weight, model.norm.weight]
        with zero.GatheredParameters(chosen, modifier_rank=modifier_rank):
            seen.append(module.up.weight.sum().item())
        assert type(module.up.weight) is nn.Parameter

    for block in model.blocks:
        block.register_forward_pre_hook(look)
        block.register_forward_hook(look)
    engine, _, _, _ = zero.initialize(model=model, config=config)
    loss = engine(*make_batch(0))
    assert loss.item() == plain(*make_batch(0)).item()
    assert seen == [each.up.weight.sum().item() for each in plain.blocks for _ in range(2)]
    if modifier_rank is None:
        engine.backward(loss)
        engine.step()
    engine.destroy()


def test_a_model_on_meta_is_taken_over_and_trains(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    engine, _, _, _ = zero.initialize(model=model, config=config)
    before = model[1].weight.detach().clone()
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()
    assert torch.isfinite(model[1].weight).all()
    assert not torch.equal(model[1].weight, before)
    engine.destroy()


def test_graphs_of_other_code_outlive_windows(config: dict[str, Any]) -> None:
    """A weight that a graph holds lies open for it while windows of its unit come and go."""
    ours, plain = make_model(), make_model()
    engine, _, _, _ = zero.initialize(model=ours, config=config)
    weights = [model.blocks[0].project.weight for model in (ours, plain)]
    outside = [F.linear(torch.ones(2, 16), weight).square().sum() for weight in weights]
    for model, loss in zip((ours, plain), outside, strict=True):
        model(*make_batch(0)).backward()
        loss.backward()
    torch.testing.assert_close(weights[0].grad.clone(), weights[1].grad)
    inside = [model(*make_batch(1)) for model in (ours, plain)]
    asked = [
        torch.autograd.grad(loss, [weight], retain_graph=True)[0]
        for loss, weight in zip(inside, weights, strict=True)
    ]
    torch.testing.assert_close(*asked)
    for loss, weight in zip(inside, weights, strict=True):
        (loss + (weight * weight).sum()).backward()
    torch.testing.assert_close(weights[0].grad.clone(), weights[1].grad)
    stale = (weights[0] * weights[0]).sum()
    engine.step()
    with pytest.raises(RuntimeError, match=r"blocks\.0\.project\.weight, which was read"):
        stale.backward()
    engine.destroy()
