"""Element-wise optimizers without a kernel: on every tier as unsharded torch, others refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

import zero
from tests.support.configs import make_config
from tests.support.generic import OPTIMIZERS
from tests.support.tiny import make_batch, make_model
from zero.errors import ConfigError

CLIP = 0.5
STEPS = 4


class MeanStep(torch.optim.Optimizer):
    """Moves by the mean of a tensor's gradient: not element-wise."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.mean())


def settings(device: str, scratch: Path, **changes: Any) -> dict[str, Any]:
    config = make_config(
        parameters=device,
        optimizer=device,
        nvme_path=str(scratch),
        clip=CLIP,
        host_memory=90_000 if device == "nvme" else "1GB",
        sub_group_size=2048,
        **changes,
    )
    del config["optimizer"]
    return config


@pytest.fixture(scope="module")
def unsharded() -> Iterator[Callable[[str], list[torch.Tensor]]]:
    """Return the parameters that plain torch trains, trained once for each optimizer."""
    made: dict[str, list[torch.Tensor]] = {}

    def train(name: str) -> list[torch.Tensor]:
        if name not in made:
            model = make_model()
            optimizer = OPTIMIZERS[name](model.parameters())
            for step in range(STEPS):
                optimizer.param_groups[0]["lr"] = rate(name, step)
                model(*make_batch(step)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            made[name] = [each.detach().clone() for each in model.parameters()]
        return made[name]

    yield train


def rate(name: str, step: int) -> float:
    lr = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
    return lr / (1 + step)


@pytest.mark.nvme
@pytest.mark.parametrize("device", ["none", "nvme"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_unsharded_torch(unsharded, scratch: Path, name: str, device: str) -> None:
    model = make_model()
    start = [each.detach().clone() for each in model.parameters()]
    given = OPTIMIZERS[name](model.parameters())
    engine, optimizer, _, _ = zero.initialize(
        model=model, optimizer=given, config=settings(device, scratch)
    )
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(name, step)
        engine.backward(engine(*make_batch(step)))
        engine.step()
    if device == "nvme":
        assert engine.ledger.snapshot().nvme_write_bytes > 0
        assert len(engine.plan.memory.sub_groups) > len(engine.plan.memory.request.segments)
    with zero.GatheredParameters(list(engine.module.parameters())):
        pairs = list(zip(engine.module.parameters(), unsharded(name), start, strict=True))
        assert max((wanted - old).abs().max() for _, wanted, old in pairs if old.numel()) > 1e-5
        for ours, wanted, _ in pairs:
            assert torch.allclose(ours, wanted, rtol=0, atol=1e-6)
    engine.destroy()


@pytest.mark.nvme
def test_exact_and_fp32_formats_have_equal_bits(scratch: Path) -> None:
    digests = []
    for device, state_format in (("none", "fp32"), ("none", "exact"), ("nvme", "exact")):
        model = make_model()
        config = settings(device, scratch, dtype="bf16", state_format=state_format)
        given = optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
        engine, _, _, _ = zero.initialize(model=model, optimizer=given, config=config)
        for step in range(STEPS):
            engine.backward(engine(*make_batch(step)))
            engine.step()
        with zero.GatheredParameters(list(engine.module.parameters())):
            flat = torch.cat([each.detach().flatten() for each in engine.module.parameters()])
            digests.append(flat.view(torch.int16).clone())
        engine.destroy()
    assert torch.equal(digests[0], digests[1])
    # A cut elsewhere may change an ulp of torch's own arithmetic, and so a bf16 here and there.
    assert torch.count_nonzero(digests[0] != digests[2]) < digests[0].numel() // 100


def test_by_name_from_the_configuration() -> None:
    config = make_config(host_memory="1GB")
    config["optimizer"] = {"type": "RMSprop", "params": {"lr": 1e-3, "alpha": 0.9}}
    engine, optimizer, _, _ = zero.initialize(model=make_model(), config=config)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    assert optimizer.param_groups[0]["alpha"] == 0.9
    engine.destroy()
    for kind, parameters, words in (
        ("RMSprop", {"lr": 1e-3, "betas": [0.9, 0.99]}, r"optimizer.params of RMSprop: .*betas"),
        ("Adafactor", {"momentum": 0.9}, r"'momentum'; known are \['beta2_decay', 'd', 'eps'"),
        ("NAdam", {"betas": [0.9]}, "optimizer.params of NAdam: .*out of range"),
        ("Muon", {"lr": -1}, "optimizer.params.lr: must be a finite number of at least 0, got -1"),
        ("Muon", {"adam_lr": "1"}, "optimizer.params.adam_lr: must be a finite number .*got '1'"),
        ("NAdam", {"lr": float("inf")}, "optimizer.params.lr: must be a finite number, got inf"),
        ("Muon", {"eps": float("nan")}, "optimizer.params.eps: must be a finite number, got nan"),
    ):
        config["optimizer"] = {"type": kind, "params": parameters}
        with pytest.raises(ConfigError, match=words):
            zero.initialize(model=make_model(), config=config)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (MeanStep, "MeanStep is not element-wise"),
        (optim.LBFGS, "LBFGS"),
    ],
)
def test_what_cannot_run_on_slices_is_refused_by_name_with_the_way_out(make, words) -> None:
    model = make_model()
    config = make_config(host_memory="1GB")
    del config["optimizer"]
    with pytest.raises(ConfigError, match=rf"{words}.*RMSprop"):
        zero.initialize(model=model, optimizer=make(model.parameters()), config=config)
