"""Optimizers of whole tensors: on every tier and world size as unsharded torch, saved, loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import zero
import zero.planning
from tests.support.generic import Wrapper
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiny import make_batch, make_model
from tests.support.whole import (
    CLIP,
    OPTIMIZERS,
    STEPS,
    Declared,
    config,
    far_from,
    filled,
    start,
    train,
)
from zero.errors import ConfigError, PlanError
from zero.muon import make_muon

pytestmark = pytest.mark.nvme


@pytest.fixture(scope="module")
def unsharded() -> Iterator[Callable[[str], list[torch.Tensor]]]:
    made: dict[str, list[torch.Tensor]] = {}

    def trained(name: str) -> list[torch.Tensor]:
        if name not in made:
            model = make_model()
            optimizer = OPTIMIZERS[name](model)
            start = copy.deepcopy(model)
            for step in range(STEPS):
                model(*make_batch(step)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            made[name] = [each.detach().clone() for each in model.parameters()]
            moved = list(zip(made[name], start.parameters(), strict=True))
            assert max(float((a - b).detach().abs().max()) for a, b in moved if a.numel()) > 1e-3
        return made[name]

    yield trained


def check_state_moves(engine: zero.ZeroEngine, tier: str) -> None:
    """What rests on NVMe is read and written once a step, to the byte; all else is in memory.

    fp32 parameters keep nothing else as state.
    """
    paged = engine.optimizer.fused.records.paged_bytes
    before = engine.ledger.snapshot()
    train(engine, STEPS, STEPS + 1)
    moved = engine.ledger.snapshot().minus(before)
    assert moved.bytes_by_class["nvme read state"] == paged
    assert moved.bytes_by_class["nvme write state"] == paged
    assert (paged > 0) == (tier == "nvme")
    assert paged <= engine.plan.memory.whole.area_bytes
    if tier != "nvme":
        assert moved.resident_bytes["host state"] > 0


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_unsharded_torch(unsharded, scratch: Path, name: str, tier: str) -> None:
    engine = start(name, tier, scratch)
    train(engine, 0, STEPS)
    if tier == "nvme":
        assert engine.ledger.snapshot().nvme_write_bytes > 0
    assert engine.plan.memory.request.whole.state_bytes > 0
    assert far_from(engine, unsharded(name)) <= 1e-6
    check_state_moves(engine, tier)
    engine.destroy()


def test_beside_a_device_it_runs_on_the_host(
    unsharded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late copies are."""
    devices: list[SimulatedDevice] = []

    def open_simulated(_wanted: str) -> SimulatedDevice:
        devices.append(SimulatedDevice(len(devices)))
        return devices[-1]

    monkeypatch.setattr(zero.planning, "open_device", open_simulated)
    engine = start("lamb", "cpu", tmp_path)
    assert devices
    train(engine, 0, STEPS)
    assert far_from(engine, unsharded("lamb")) <= 1e-6
    engine.destroy()


class GroupCount(Declared):
    """Counts its steps in its group, which one copy a parameter would count wrongly."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class OwnCount(Declared):
    """Counts its steps on itself."""

    count = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.count += 1


class SharedCount(Declared):
    """Counts its steps in its state, for all parameters together."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["k"] = self.state.get("k", 0) + 1


class CountedMomentum(optim.SGD):
    """Element-wise, and counts in its group."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                p.data.sub_(p.grad * group["lr"] / group["k"])


@pytest.mark.parametrize(
    ("kind", "word"),
    [(GroupCount, "'k'"), (OwnCount, "'count'"), (SharedCount, "'k'"), (CountedMomentum, "'k'")],
)
def test_counting_outside_of_the_state_is_refused(kind: Any, word: str, tmp_path: Path) -> None:
    model = make_model()
    given = kind(filled(model), lr=1e-2)
    with pytest.raises(ConfigError, match=rf"changes {word} .*keep it in its state"):
        zero.initialize(model=model, optimizer=given, config=config("none", tmp_path))


class WholeWrapper(Wrapper):
    needs_whole_tensors = True


@pytest.mark.parametrize("kind", [Wrapper, WholeWrapper])
def test_a_wrapper_that_moves_nothing_is_refused(kind: Any, tmp_path: Path) -> None:
    model = make_model()
    given = kind(filled(model))
    with pytest.raises(ConfigError, match=r"does nothing to the parameters .* pass that one"):
        zero.initialize(model=model, optimizer=given, config=config("none", tmp_path))


def test_masters_of_16_bit_parameters_are_what_is_updated(scratch: Path) -> None:
    """Formats and tiers give the same bits: the arithmetic sees the same masters."""
    found = []
    for tier, state_format in (("none", "fp32"), ("cpu", "exact"), ("nvme", "compact")):
        engine = start("lamb", tier, scratch, dtype="bf16", state_format=state_format)
        train(engine, 0, 3)
        assert bool(engine.ledger.snapshot().nvme_write_bytes) == (tier == "nvme")
        masters = [zero.safe_get_full_fp32_param(each) for each in engine.module.parameters()]
        found.append(torch.cat([each.flatten() for each in masters if each is not None]))
        engine.destroy()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[0].bfloat16().float())


def test_what_does_not_fit_is_refused_with_its_numbers(scratch: Path) -> None:
    with pytest.raises(PlanError, match=r"of them \d+ of an optimizer of whole tensors"):
        start("lamb", "nvme", scratch, host_memory="20KB")


def test_muon_by_name_is_muon_and_adamw(scratch: Path) -> None:
    """Matrices but embeddings and the output layer by Muon, each with its own rate.

    Without clipping gradients have the bits of unsharded torch's. Muon works in bf16, where an ulp
    of difference may grow to a thousandth of an update.
    """
    model = make_model()
    options = config("nvme", scratch, host_memory="62KB", clip=0.0)
    parameters = {"lr": 1e-2, "muon_lr": 1e-3, "momentum": 0.9, "eps": 1e-4, "weight_decay": 0.01}
    options["optimizer"] = {"type": "Muon", "params": parameters}
    model.embedding.weight.use_muon = False
    twin = make_model()
    pairs = model.named_parameters()
    engine = zero.initialize(model=model, model_parameters=pairs, config=options)[0]
    named = dict(twin.named_parameters())
    hidden = [p for n, p in named.items() if p.dim() == 2 and "embed" not in n]
    others = [p for p in filled(twin) if not any(p is each for each in hidden)]
    beside = [
        optim.Muon(hidden, lr=1e-3, momentum=0.9, weight_decay=0.01),
        optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01),
    ]
    for step in range(STEPS):
        twin(*make_batch(step)).backward()
        for each in beside:
            each.step()
            each.zero_grad()
    train(engine, 0, STEPS)
    assert engine.optimizer.fused.records.paged_bytes > 0
    assert far_from(engine, [each.detach() for each in twin.parameters()]) == 0.0
    engine.destroy()


def test_groups_of_muon_differ_if_any_option_does() -> None:
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    for given in ([first, {"params": [second]}], [("a", first), ("b", second)]):
        assert len(make_muon({}, given, {}).param_groups) == 1
    for more in ({"name": "b"}, {"params": [("b", second)], "name": "b"}):
        group = {"params": [second], **more}
        for given in ([{"params": [first]}, group], [group, {"params": [first]}]):
            assert len(make_muon({}, given, {}).param_groups) == 2


GROWN = {
    "adafactor": {"row_var": (40, 1)},
    "lamb": {"exp_avg": (40, 16), "exp_avg_sq": (40, 16)},
    "declared": {"rows": (40,)},
}
"""The states of an embedding of 40 rows that has had 31."""


@pytest.mark.parametrize("tier", ["none", "nvme"])
@pytest.mark.parametrize("name", GROWN)
def test_a_resized_parameter_keeps_its_state_and_a_frozen_one(
    scratch: Path, name: str, tier: str
) -> None:
    """As tensors that torch trains, with a state that is grown by hand."""
    twin = make_model()
    given = OPTIMIZERS[name](twin)
    budget = {"adafactor": "40KB", "lamb": "90KB", "declared": "40KB"}[name]
    more = {"host_memory": budget} if tier == "nvme" else {}
    engine = start(name, tier, scratch, clip=0.0, **more)
    weight = engine.module.embedding.weight
    frozen = engine.module.blocks[1].norm1.weight
    for step in range(4):
        if step == 2:
            grow(twin.embedding.weight, given.state[twin.embedding.weight], GROWN[name])
            zero.resize_parameter(engine, weight, (40, 16), init=lambda new: new.fill_(0.25))
        for each in (twin.blocks[1].norm1.weight, frozen):
            each.requires_grad_(step != 2)
        twin(*make_batch(step)).backward()
        given.step()
        given.zero_grad()
        train(engine, step, step + 1)
    assert far_from(engine, [each.detach() for each in twin.parameters()]) == 0.0
    for key in GROWN[name]:
        found = zero.safe_get_full_optimizer_state(weight, key)
        assert torch.equal(found, given.state[twin.embedding.weight][key])
        assert float(found[31:].abs().max()) > 0
    assert (engine.optimizer.fused.records.paged_bytes > 0) == (tier == "nvme")
    engine.destroy()


def grow(weight: nn.Parameter, state: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    rows = weight.detach()
    weight.data = torch.full((40, 16), 0.25)
    weight.data[:31] = rows
    for key, shape in shapes.items():
        old, state[key] = state[key], torch.zeros(shape)
        state[key][:31] = old


class Basis(Declared):
    """Keeps a square matrix of the first length of each matrix."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2:
                    self.state[p].setdefault("basis", torch.eye(p.shape[0], device=p.device))


class KnowingBasis(Basis):
    """Says what becomes of its basis."""

    def resize_state(self, state: Any, old_shape: Any, new_shape: Any) -> Any:
        rows = torch.zeros(new_shape[0])
        common = min(old_shape[0], new_shape[0])
        rows[:common] = state["rows"][:common]
        return {"rows": rows, "basis": 2 * torch.eye(new_shape[0])}


def test_state_that_cannot_be_cut_is_refused_unless_its_optimizer_says_how(tmp_path: Path) -> None:
    found = []
    for kind in (Basis, KnowingBasis):
        model = make_model()
        given = kind(filled(model))
        engine = zero.initialize(model=model, optimizer=given, config=config("cpu", tmp_path))[0]
        train(engine, 0, 1)
        weight = model.blocks[1].up.weight
        before = weight.detach().clone()
        if kind is Basis:
            words = r"Basis keeps 'basis' of shape \(33, 33\) of blocks.1.up.weight, .*resize_state"
            with pytest.raises(ValueError, match=words):
                zero.resize_parameter(engine, weight, (40, 16))
        else:
            zero.resize_parameter(engine, weight, (40, 16))
            basis = zero.safe_get_full_optimizer_state(weight, "basis")
            assert torch.equal(basis, 2 * torch.eye(40))
            zero.resize_parameter(engine, weight, (33, 16))
        assert torch.equal(weight, before)
        train(engine, 1, 2)
        found.append(weight.detach().clone())
        for shape in ((0, 16), (33, 16)):  # without elements there is no state
            zero.resize_parameter(engine, weight, shape)
        assert zero.safe_get_full_optimizer_state(weight, "rows") is None
        engine.destroy()
    assert torch.equal(*found)  # nothing had changed, or all is as it was
