"""Adam, Lion, Adagrad and SGD: every implementation has the bits of the reference."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from offload import (
    AdagradScalars,
    AdamScalars,
    AdamWScalars,
    LionScalars,
    SgdScalars,
    StateArrays,
)
from offload.kernels import Kernels
from tests.support.kernels import HYPERPARAMETERS as ADAMW
from tests.support.kernels import PATTERNS, assert_same_bits, hostile, ordinary
from tests.support.reference import ReferenceAdamW, round_to_fp16
from tests.support.reference_rules import HYPERPARAMETERS, ReferenceRule

SCALARS = {
    "adamw": AdamWScalars,
    "adam": AdamScalars,
    "lion": LionScalars,
    "adagrad": AdagradScalars,
    "sgd": SgdScalars,
}
CASES = {
    **{name: (name, values) for name, values in HYPERPARAMETERS.items()},
    "sgd, damped": ("sgd", {**HYPERPARAMETERS["sgd"], "nesterov": False, "dampening": 0.1}),
    "sgd, no momentum": ("sgd", {**HYPERPARAMETERS["sgd"], "nesterov": False, "momentum": 0.0}),
}
MOMENTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "adagrad": ("exp_avg_sq",),
    "sgd": ("exp_avg",),
}


@pytest.fixture(params=PATTERNS, ids=lambda pattern: pattern.__name__)
def pattern(request) -> Any:
    return request.param


def gradient_of(pattern: Any, numel: int, seed: int, element: str) -> np.ndarray:
    values = pattern(numel, seed)
    if element == "fp16":
        return round_to_fp16(values)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if element == "bf16" else values


@pytest.mark.parametrize("element", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_rules_have_the_bits_of_the_reference(any_kernels: Kernels, case, element, pattern) -> None:
    name, hyperparameters = CASES[case]
    numel = 1061
    named = {} if element == "fp32" else {element: {"p"}}
    reference = ReferenceRule(name, {"p": pattern(numel, 1)}, **named)
    reference.exp_avg["p"] = pattern(numel, 2)
    squares = pattern(numel, 3)
    reference.exp_avg_sq["p"] = squares if pattern is hostile else abs(squares)
    masters = {"master": reference.masters["p"].copy()} if element == "fp16" else {}
    param = reference.param("p").copy()
    if element == "bf16":
        masters = {"residual": reference.residual("p").copy()}
    moments = {each: getattr(reference, each)["p"].copy() for each in MOMENTS[name]}
    state = StateArrays(**moments, **masters)
    for step in (1, 2, 3):
        grad = gradient_of(pattern, numel, 10 + step, element)
        reference.step({"p": grad}, **hyperparameters)
        scalars = SCALARS[name].from_hyperparameters(step=step, grad_scale=1.0, **hyperparameters)
        any_kernels.update(param, grad, state, scalars)
        for each in MOMENTS[name]:
            assert_same_bits(
                getattr(state, each), getattr(reference, each)["p"], f"step {step} {each}"
            )
        assert_same_bits(param, reference.param("p"), f"step {step} param")
        if element == "bf16":
            assert_same_bits(state.residual, reference.residual("p"), f"step {step} residual")
        if element == "fp16":
            assert_same_bits(state.master, reference.masters["p"], f"step {step} master")


@pytest.mark.full
@pytest.mark.parametrize("state_format", ["own", "residual", "master"])
@pytest.mark.parametrize("case", ["adamw", *CASES])
def test_fifty_steps_have_the_bits_of_the_reference(
    any_kernels: Kernels, case: str, state_format: str, pattern: Any
) -> None:
    name, hyperparameters = CASES.get(case, ("adamw", ADAMW))
    numel = 2049
    start = {"p": pattern(numel, 1)}
    bf16 = () if state_format == "own" else {"p"}
    made = ReferenceAdamW if name == "adamw" else functools.partial(ReferenceRule, name)
    reference = made(start, bf16=bf16)
    param = reference.param("p").copy()
    weights = {
        "own": {},
        "residual": {"residual": reference.residual("p").copy()},
        "master": {"master": reference.masters["p"].copy()},
    }[state_format]
    moments = {each: np.zeros(numel, np.float32) for each in MOMENTS[name]}
    state = StateArrays(**moments, **weights)
    for step in range(1, 51):
        grad = gradient_of(pattern, numel, 10 + step, "fp32" if state_format == "own" else "bf16")
        reference.step({"p": grad}, **hyperparameters)
        scalars = SCALARS[name].from_hyperparameters(step=step, grad_scale=1.0, **hyperparameters)
        any_kernels.update(param, grad, state, scalars)
    assert_same_bits(param, reference.param("p"), "param")
    for each in MOMENTS[name]:
        assert_same_bits(getattr(state, each), getattr(reference, each)["p"], each)
    for each, kept in weights.items():
        wanted = reference.residual("p") if each == "residual" else reference.masters["p"]
        assert_same_bits(kept, wanted, each)


@pytest.mark.parametrize("case", [case for case in CASES if case != "lion"])
def test_the_reference_is_close_to_torch(case) -> None:
    name, hyperparameters = CASES[case]
    hyperparameters = {**hyperparameters, **({"eps": 1e-4} if name != "sgd" else {})}
    start = ordinary(1000, 1)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    classes = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
    optimizer = classes[name]([theirs], **hyperparameters)
    reference = ReferenceRule(name, {"p": start})
    for step in range(20):
        grad = ordinary(1000, 100 + step)
        theirs.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        reference.step({"p": grad}, **hyperparameters)
    moved = np.abs(start - reference.param("p")).max()
    assert moved > 0.02
    assert np.abs(theirs.detach().numpy() - reference.param("p")).max() < 1e-6


def test_lion_steps_by_the_sign_of_its_average() -> None:
    """Lion by its paper, in fp64; torch has none to compare with."""
    hyperparameters = HYPERPARAMETERS["lion"]
    start = ordinary(1000, 1)
    reference = ReferenceRule("lion", {"p": start})
    p, m = start.astype(np.float64), np.zeros(1000)
    (beta1, beta2), lr = hyperparameters["betas"], hyperparameters["lr"]
    for step in range(20):
        grad = ordinary(1000, 100 + step)
        reference.step({"p": grad}, **hyperparameters)
        p = p - lr * (np.sign(beta1 * m + (1 - beta1) * grad) + hyperparameters["weight_decay"] * p)
        m = beta2 * m + (1 - beta2) * grad
    assert np.abs(start - p).max() > 1e-3
    assert np.abs(reference.param("p") - p).max() < 1e-5


def test_a_moment_that_the_rule_keeps_must_be_there(any_kernels: Kernels) -> None:
    scalars = LionScalars.from_hyperparameters(step=1, grad_scale=1.0, **HYPERPARAMETERS["lion"])
    values = np.ones(64, np.float32)
    with pytest.raises(TypeError, match="exp_avg must be a"):
        any_kernels.update(values, values.copy(), StateArrays(exp_avg_sq=values.copy()), scalars)
    with pytest.raises(ValueError, match="nesterov needs a momentum"):
        SgdScalars.from_hyperparameters(
            step=1, grad_scale=1.0, **{**HYPERPARAMETERS["sgd"], "momentum": 0.0}
        )
