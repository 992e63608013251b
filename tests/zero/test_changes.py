"""Freezing, unfreezing, late groups and resizing plan anew at a step boundary (B3, B13)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import nn

import zero
from estimators import Section
from tests.support.configs import BETAS, EPS, LR, WEIGHT_DECAY, make_config
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme


@pytest.fixture(params=["nvme", "none"])
def config(scratch: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return make_config(
        parameters=request.param,
        optimizer=request.param,
        nvme_path=str(scratch),
        host_memory="40KB" if request.param == "nvme" else "1GB",
        sub_group_size=1024,
    )


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def freeze(model: nn.Module, *, block: int, is_frozen: bool) -> None:
    for parameter in model.blocks[block].parameters():
        parameter.requires_grad = not is_frozen


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.detach().clone(), expected[name].detach(), msg=name)


def step_plain(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = model(*make_batch(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_freezing_and_unfreezing_follow_torch(config: dict[str, Any]) -> None:
    """Each swap is followed like torch's own AdamW does it: state waits, step counts go on."""
    ours, plain = make_model(), make_model()
    for model in (ours, plain):
        freeze(model, block=1, is_frozen=True)
    engine, _, _, _ = zero.initialize(model=ours, config=config)
    objects = dict(ours.named_parameters())
    optimizer = adamw(plain.parameters())
    start = ours.blocks[1].up.weight.detach().clone()
    frozen = {0: (1, False), 2: (0, True), 4: (0, False), 5: (1, True), 7: (1, False)}
    for step in range(9):
        if step in frozen:
            block, is_frozen = frozen[step]
            for model in (ours, plain):
                freeze(model, block=block, is_frozen=is_frozen)
        loss = engine(*make_batch(step))
        engine.backward(loss)
        engine.step()
        assert loss.item() == pytest.approx(step_plain(plain, optimizer, step), rel=1e-5)
    assert not torch.equal(ours.blocks[1].up.weight, start)
    assert_close(ours, plain)
    assert all(parameter is objects[name] for name, parameter in ours.named_parameters())
    engine.destroy()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_goes_on_keeps_all_its_bits(scratch: Path, dtype: str) -> None:
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="48KB",
        sub_group_size=1024,
        dtype=dtype,
        loss_scale=1.0,
    )
    model = make_model()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    for step in range(2):
        engine.backward(engine(*make_batch(step)))
        engine.step()
    before = {state.name: state for state in zero.iterate_states(model)}
    freeze(model, block=1, is_frozen=True)
    engine.backward(engine(*make_batch(2)))
    engine.zero_grad()
    for state in zero.iterate_states(model):
        old = before[state.name]
        assert torch.equal(state.value, old.value), state.name
        if state.name.startswith("blocks.1"):
            assert state.fp32_param is None
            continue
        for ours, theirs in (
            (state.fp32_param, old.fp32_param),
            (state.exp_avg, old.exp_avg),
            (state.exp_avg_sq, old.exp_avg_sq),
        ):
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours, theirs), state.name
    engine.destroy()


def test_unfreezing_works_without_calling_the_engine(config: dict[str, Any]) -> None:
    ours, plain = make_model(), make_model()
    for model in (ours, plain):
        freeze(model, block=1, is_frozen=True)
    engine, _, _, _ = zero.initialize(model=ours, config=config)
    optimizer = adamw(plain.parameters())
    for step in range(4):
        if step == 2:
            for model in (ours, plain):
                freeze(model, block=1, is_frozen=False)
        ours(*make_batch(step)).backward()
        engine.step()
        step_plain(plain, optimizer, step)
    assert_close(ours, plain)
    engine.destroy()


def test_unfreezing_within_a_window_is_refused(config: dict[str, Any]) -> None:
    model = make_model()
    freeze(model, block=1, is_frozen=True)
    config["gradient_accumulation_steps"] = 2
    engine, _, _, _ = zero.initialize(model=model, config=config)
    engine.backward(engine(*make_batch(0)))
    freeze(model, block=1, is_frozen=False)
    engine.backward(engine(*make_batch(1)))
    with pytest.raises(RuntimeError, match=r"blocks\.1\..* was unfrozen while gradients"):
        engine.step()
    engine.destroy()


def test_a_plan_that_cannot_grow_is_refused_with_numbers(scratch: Path) -> None:
    model = make_model()
    freeze(model, block=1, is_frozen=True)
    config = make_config(parameters="cpu", optimizer="cpu", host_memory="1GB")
    probe = zero.plan_memory(make_model(), config).memory.host_bytes
    config["tiers"]["host_memory"] = probe - 64
    engine, _, _, _ = zero.initialize(model=model, config=config)
    before = copy.deepcopy(model)
    freeze(model, block=1, is_frozen=False)
    with pytest.raises(zero.PlanError, match=rf"{probe - 64} bytes, but it needs \d+"):
        engine(*make_batch(0))
    freeze(model, block=1, is_frozen=True)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    assert not torch.equal(model.blocks[0].up.weight, before.blocks[0].up.weight)
    assert torch.equal(model.blocks[1].up.weight, before.blocks[1].up.weight)
    engine.destroy()


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank path beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(base.out_features)
        self.a = nn.Parameter(torch.randn(2, base.in_features, generator=generator) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)

    def merge(self) -> None:
        with torch.no_grad():
            self.base.weight += self.b @ self.a


def adapt(model: Any) -> list[nn.Parameter]:
    model.requires_grad_(requires_grad=False)
    added = []
    for block in model.blocks:
        block.up = Adapter(block.up)
        added += [block.up.a, block.up.b]
    return added


def test_adapters_train_on_a_frozen_base_whose_pages_stay_clean(scratch: Path) -> None:
    """The base is written once; merging and the saved state equal an unsharded run (B5)."""
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="40KB",
        sub_group_size=1024,
    )
    ours, plain = make_model(), make_model()
    adapt(ours)
    optimizer = adamw(adapt(plain))
    engine, _, _, _ = zero.initialize(model=ours, config=config)
    trained = sum(each.numel() for each in ours.parameters() if each.requires_grad)
    frozen = sum(each.numel() for each in ours.parameters() if not each.requires_grad)
    assert frozen > 10 * trained
    before = engine.ledger.snapshot()
    for step in range(3):
        engine.backward(engine(*make_batch(step)))
        engine.step()
        step_plain(plain, optimizer, step)
    written = engine.ledger.snapshot().minus(before)
    plan = engine.plan.memory
    stored = [
        size
        for group in plan.sub_groups
        if plan.request.segments[group.segment].trainable and group.extent is not None
        for section, _, size in group.extent.sections
        if section is Section.PARAMETER
    ]
    assert len(stored) < len(plan.sub_groups)
    assert written.bytes_by_class["nvme read parameter"] > 4 * frozen
    # Of the base nothing was written again.
    assert written.bytes_by_class["nvme write parameter"] == 3 * sum(stored) > 0
    assert_close(ours, plain)
    state = {name: value.clone() for name, value in ours.state_dict().items()}
    assert all(value.numel() for name, value in state.items() if "nothing" not in name)
    fresh = make_model()
    adapt(fresh)
    fresh.load_state_dict(state)
    assert_close(ours, fresh)
    for model in (ours, plain):
        for block in model.blocks:
            block.up.merge()
    assert_close(ours, plain)
    engine.destroy()


def test_adapters_may_come_after_the_engine(config: dict[str, Any]) -> None:
    ours, plain = make_model(), make_model()
    engine, _, _, _ = zero.initialize(model=ours, config=config)
    torch_optimizer = adamw(plain.parameters())
    engine.backward(engine(*make_batch(0)))
    engine.step()
    step_plain(plain, torch_optimizer, 0)
    torch_optimizer.add_param_group({"params": adapt(plain)})
    assert engine.optimizer is not None
    engine.optimizer.add_param_group({"params": adapt(ours)})
    for step in range(1, 4):
        engine.backward(engine(*make_batch(step)))
        engine.step()
        step_plain(plain, torch_optimizer, step)
    assert_close(ours, plain)
    assert ours.blocks[0].up.b.abs().sum() > 0
    engine.destroy()


class Language(nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.mix(self.embedding(tokens))), tokens)


@pytest.mark.parametrize("tied", [True, False])
def test_vocabularies_grow_and_shrink(config: dict[str, Any], *, tied: bool) -> None:
    model = Language(tied=tied)
    engine, _, _, _ = zero.initialize(model=model, config=config)
    weight = model.embedding.weight
    for _ in range(2):
        engine.backward(engine(torch.arange(10)))
        engine.step()
    old = weight.detach().clone()
    moments = zero.safe_get_full_optimizer_state(weight, "exp_avg")
    assert moments is not None
    for parameter in {id(each): each for each in (weight, model.head.weight)}.values():
        zero.resize_parameter(engine, parameter, (12, 8), init=lambda new: new.fill_(0.5))
    assert model.embedding.weight is weight
    assert (model.head.weight is weight) == tied
    assert (model.embedding.num_embeddings, model.head.out_features) == (12, 12)
    assert weight.shape == model.head.weight.shape == (12, 8)
    assert torch.equal(weight[:10], old)
    assert (weight[10:] == 0.5).all()
    grown = zero.safe_get_full_optimizer_state(weight, "exp_avg")
    assert grown is not None
    assert torch.equal(grown[:10], moments)
    assert (grown[10:] == 0).all()
    engine.backward(engine(torch.arange(12)))
    engine.step()
    assert not torch.equal(weight[10:], torch.full((2, 8), 0.5))
    with zero.GatheredParameters(weight):
        assert weight.shape == (12, 8)
    zero.resize_parameter(engine, weight, (3, 8))
    assert weight.shape == (3, 8)
    engine.destroy()


@pytest.mark.parametrize("tied", [True, False])
def test_data_of_another_length_resizes(config: dict[str, Any], *, tied: bool) -> None:
    """Model libraries resize embeddings so: new values are built, and set as `.data`."""
    model = Language(tied=tied)
    engine, _, _, _ = zero.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.arange(10)))
        engine.step()
    moments = zero.safe_get_full_optimizer_state(model.head.weight, "exp_avg")
    assert moments is not None
    expected = {}
    for module in (model.embedding, model.head):
        if module.weight.shape[0] == 13:
            continue
        new = torch.full((13, 8), 0.25)
        new[:10] = module.weight.data[:10]
        module.weight.data = new
        expected[module] = new
    zero.resize_parameter(engine, model.mix.weight, (8, 8))  # what is pending comes first
    assert model.head.weight.shape == (13, 8)
    engine.backward(engine(torch.arange(13)))
    for module, new in expected.items():
        assert torch.equal(module.weight, new)
    engine.step()
    grown = zero.safe_get_full_optimizer_state(model.head.weight, "exp_avg")
    assert grown is not None
    assert grown.shape == (13, 8)
    assert not torch.equal(model.head.weight[10:], torch.full((3, 8), 0.25))
    engine.backward(engine(torch.arange(13)))
    with pytest.raises(RuntimeError, match="between steps"):
        resize_now(engine, model.head)
    engine.destroy()


def resize_now(engine: zero.ZeroEngine, head: nn.Linear) -> None:
    head.weight.data = torch.ones(14, 8)
    engine.step()


def test_resizing_before_there_is_an_engine_and_what_cannot_be_resized() -> None:
    with zero.Init():
        model = Language(tied=True)
    zero.resize_parameter(model, model.head.weight, (12, 8))
    assert model.embedding.weight.shape == (12, 8)
    assert (model.embedding.weight[10:] == 0).all()
    plain = Language(tied=True)
    zero.resize_parameter(plain, plain.head.weight, (12, 8))
    assert plain(torch.arange(12)).isfinite()
    with pytest.raises(ValueError, match="not in the model"):
        zero.resize_parameter(model, plain.head.weight, (12, 8))
    with pytest.raises(ValueError, match="give 2 lengths"):
        zero.resize_parameter(model, model.head.weight, (12,))
    engine, _, _, _ = zero.initialize(model=plain, config=make_config(host_memory="1GB"))
    with (
        zero.GatheredParameters(plain.mix.weight),
        pytest.raises(RuntimeError, match="leave the block"),
    ):
        zero.resize_parameter(engine, plain.head.weight, (14, 8))
    engine.backward(engine(torch.arange(12)))
    with pytest.raises(RuntimeError, match="between steps"):
        zero.resize_parameter(engine, plain.head.weight, (14, 8))
    engine.destroy()
