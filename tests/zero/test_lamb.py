"""LAMB by name is its formula, and says what it cannot use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import zero
from tests.support.tiny import make_batch, make_model
from tests.support.whole import BUDGETS, LAMB, STEPS, config, far_from, train
from zero.errors import ConfigError
from zero.lamb import Lamb
from zero.whole import needs_whole_tensors


def lamb_in_fp64(model: nn.Module, options: dict[str, Any]) -> tuple[list[torch.Tensor], set[str]]:
    """Return what LAMB makes of a model, by its formula, and at which bounds its ratios were."""
    masters = [each.detach().double() for each in model.parameters()]
    moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in masters]
    (beta1, beta2), seen = options["betas"], set()
    for step in range(STEPS):
        model(*make_batch(step)).backward()
        factor = 1.0
        if options.get("bias_correction", True):
            factor = (1 - beta2 ** (step + 1)) ** 0.5 / (1 - beta1 ** (step + 1))
        for i, p in enumerate(model.parameters()):
            g, (m, v) = p.grad.double(), moments[i]
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            moments[i] = m, v
            inside = options.get("eps_inside_sqrt", False)
            root = (v + options["eps"]).sqrt() if inside else v.sqrt() + options["eps"]
            move = m / root + options["weight_decay"] * masters[i]
            ratio = 1.0
            if masters[i].norm() > 0 and move.norm() > 0:
                ratio = float(masters[i].norm() / move.norm())
                if ratio > options.get("max_coeff", 10.0):
                    ratio = options.get("max_coeff", 10.0)
                    seen.add("max")
                if ratio < options.get("min_coeff", 0.01):
                    ratio = options.get("min_coeff", 0.01)
                    seen.add("min")
            masters[i] = masters[i] - options["lr"] * factor * ratio * move
            p.grad, p.data = None, masters[i].float()
    return masters, seen


@pytest.mark.nvme
@pytest.mark.parametrize(
    ("more", "bounds"),
    [
        ({}, {"min"}),
        ({"max_coeff": 0.5, "min_coeff": 0.08}, {"max", "min"}),
        ({"bias_correction": False, "eps_inside_sqrt": True, "min_coeff": 0.0}, {"max"}),
    ],
)
def test_lamb_by_name_is_its_formula(scratch: Path, more: dict[str, Any], bounds: set[str]) -> None:
    options = config("nvme", scratch, host_memory=BUDGETS["lamb"][0], clip=0.0)
    params = {**LAMB, "betas": [0.9, 0.99], "max_grad_norm": 0.0, **more}
    options["optimizer"] = {"type": "lamb", "params": params}
    engine = zero.initialize(model=make_model(), config=options)[0]
    train(engine, 0, STEPS)
    assert engine.optimizer.fused.records.paged_bytes > 0
    wanted, seen = lamb_in_fp64(make_model(), {**LAMB, **more})
    assert seen == bounds
    assert far_from(engine, wanted) <= 1e-6
    free, _ = lamb_in_fp64(make_model(), {**LAMB, **more, "max_coeff": 2e9, "min_coeff": 0.0})
    assert far_from(engine, free) > 2e-5  # the bounds count
    engine.destroy()
    options["optimizer"]["params"] = {"lr": 1e-3, "max_coef": 1.0}
    with pytest.raises(ConfigError, match=r'params.max_coef: unknown.*did you mean "max_coeff"'):
        zero.initialize(model=make_model(), config=options)
    options["optimizer"]["params"] = {"max_grad_norm": 1.0}
    with pytest.raises(ConfigError, match=r'max_grad_norm: .*write "gradient_clipping"'):
        zero.initialize(model=make_model(), config=options)


def test_lamb_says_what_it_cannot_use() -> None:
    given = [nn.Parameter(torch.ones(3))]
    for options, words in (
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff 2.0 is above max_coeff 1.0"),
        ({"betas": (0.9, 1.0)}, "below 1 are needed"),
        ({"lr": -1.0}, "a finite number of at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            Lamb(given, **options)
    with pytest.raises(TypeError, match=r"\['trust'\] cannot be used with Lamb; known are"):
        Lamb(given, trust=1)
    # A class of that name that says nothing is taken for it.
    assert needs_whole_tensors(type("Lamb", (optim.SGD,), {})(given))
    assert not needs_whole_tensors(optim.SGD(given))


def test_a_rate_that_is_a_tensor_stays_as_it_is() -> None:
    found = []
    for lr in (0.5, torch.tensor(0.5)):
        given = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
        optimizer = Lamb(given, lr=lr)
        for _ in range(2):
            for each in given:
                each.grad = torch.full((3,), 0.1)
            optimizer.step()
        found.append(torch.cat([each.detach() for each in given]))
    assert float(lr) == 0.5
    assert torch.equal(*found)


def test_the_norms_of_lamb_are_right_for_large_tensors() -> None:
    """Torch's own, which add up in fp32, are not: here by 2e-5."""
    start = torch.randn(1_000_001, generator=torch.Generator().manual_seed(1))
    given = nn.Parameter(start.clone())
    given.grad = start.sin()
    Lamb([given], lr=1.0, bias_correction=False, betas=(0.0, 0.0), eps=0.0).step()
    # The step is the sign of the gradient, so its norm is a root; its length is the parameter's.
    wanted = start.double().norm() / start.numel() ** 0.5
    assert float(((start - given.detach()).abs() / wanted - 1).abs().median()) < 1e-6
