"""Element-wise optimizers without a kernel: on every tier as unsharded torch, others refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model
from zero.errors import ConfigError

CLIP = 0.5
STEPS = 4


class ThreeStates(torch.optim.Optimizer):
    """Keeps three tensors of each element, the third of them from its second step on."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.blend = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, fast=torch.zeros_like(p), slow=torch.full_like(p, 0.1))
                state["step"] += 1
                state["fast"].mul_(self.blend).add_(p.grad)
                state["slow"] = state["slow"] * 0.9 + p.grad.abs()  # another tensor each time
                if state["step"] >= 2:
                    state.setdefault("late", torch.ones_like(p)).add_(p.grad.square())
                p.sub_(group["lr"] * state["fast"] / (state["slow"] + state.get("late", 1.0)))


class MeanStep(torch.optim.Optimizer):
    """Moves by the mean of a tensor's gradient: not element-wise."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.mean())


optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, eps=1e-4, momentum=0.9, centered=True),
    "nadam": lambda p: optim.NAdam(p, lr=1e-3, eps=1e-4, weight_decay=0.01),
    "radam": lambda p: optim.RAdam(p, lr=1e-3, eps=1e-4),
    "adamax": lambda p: optim.Adamax(p, lr=1e-3, eps=1e-4),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1, eps=1e-4),
    "asgd": lambda p: optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: optim.Rprop(p, lr=1e-4),
    "amsgrad": lambda p: optim.AdamW(p, lr=1e-3, eps=1e-4, amsgrad=True),
    "maximize": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, maximize=True),
    "user": ThreeStates,
}


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
    config["optimizer"]["params"] = {"lr": 1e-3, "betas": [0.9, 0.99]}
    with pytest.raises(ConfigError, match=r"optimizer.params of RMSprop: .*betas"):
        zero.initialize(model=make_model(), config=config)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (MeanStep, "MeanStep is not element-wise"),
        (lambda p: optim.Adafactor(p, lr=1e-3), "Adafactor"),
        (optim.LBFGS, "LBFGS"),
    ],
)
def test_what_needs_whole_tensors_is_refused_by_name_with_the_way_out(make, words) -> None:
    model = make_model()
    config = make_config(host_memory="1GB")
    del config["optimizer"]
    with pytest.raises(ConfigError, match=rf"{words}.*RMSprop"):
        zero.initialize(model=model, optimizer=make(model.parameters()), config=config)


def test_what_would_lose_its_state_is_refused(tmp_path: Path) -> None:
    model = make_model()
    config = make_config(host_memory="1GB")
    del config["optimizer"]
    frozen = model.blocks[0].up.weight
    given = optim.RMSprop([each for each in model.parameters() if each is not frozen], lr=1e-3)
    engine, optimizer, _, _ = zero.initialize(model=model, optimizer=given, config=config)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    with pytest.raises(RuntimeError, match=r"save_checkpoint: the state of RMSprop.*AdamW"):
        engine.save_checkpoint(str(tmp_path))
    optimizer.add_param_group({"params": [frozen], "lr": 1e-4})
    with pytest.raises(RuntimeError, match="planning the engine anew: the state of RMSprop"):
        engine.backward(engine(*make_batch(1)))
    engine.destroy()


def test_restored_state_without_what_is_carried_is_refused() -> None:
    model = make_model()
    config = make_config(host_memory="1GB")
    del config["optimizer"]
    given = optim.NAdam(model.parameters(), lr=1e-3)
    engine, optimizer, _, _ = zero.initialize(model=model, optimizer=given, config=config)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    optimizer.fused._carried.clear()
    engine.backward(engine(*make_batch(1)))
    with pytest.raises(RuntimeError, match="cannot go on from restored state"):
        engine.step()
    engine.destroy()
