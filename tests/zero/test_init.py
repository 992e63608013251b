"""zero.Init: modules are sharded as they are built, and initialisers take effect (B1, B2, B7)."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

import zero
from tests.support.configs import make_config
from tests.support.hf_like import LateModel, Layer, init_weights, make_tokens
from tests.support.initial_weights import digests
from tests.support.launch import run_worker
from zero.parameter import ShardedParameter

pytestmark = pytest.mark.nvme


def sharded_names(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if type(each) is ShardedParameter}


def nvme(scratch: Path, **changes: Any) -> dict[str, Any]:
    return make_config(
        **{
            "parameters": "nvme",
            "optimizer": "nvme",
            "nvme_path": str(scratch),
            "host_memory": "96KB",
            "sub_group_size": 1024,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def alone(module_scratch: Path) -> dict[str, str]:
    return digests(str(module_scratch))


def test_every_way_to_build_gives_the_weights_of_an_unsharded_model(alone: dict[str, str]) -> None:
    cases = {key.rpartition(" ")[0] for key in alone}
    assert len(cases) == 3
    for case in cases:
        found = {way: value for way, value in alone.items() if way.startswith(case)}
        assert len(found) == 6
        assert len(set(found.values())) == 1, found


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3])
def test_initial_weights_do_not_depend_on_the_world_size(
    alone: dict[str, str], scratch: Path, tmp_path: Path, world_size: int
) -> None:
    done = run_worker("initial_weights.py", str(tmp_path), str(scratch), world_size=world_size)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(world_size):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        assert set(found) == set(alone)
        for key, value in alone.items():
            assert found[key].split()[:2] == value.split()[:2], (rank, key)


def test_modules_are_sharded_as_soon_as_they_are_built() -> None:
    seen: list[int] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList()
            for _ in range(4):
                self.blocks.append(Layer(16))
                plain = [each for each in self.parameters() if type(each) is nn.Parameter]
                seen.append(sum(each.numel() for each in plain))
            self.own = nn.Parameter(torch.full((5,), 2.0))
            self.stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            seen.append(len([each for each in self.stack if type(each.weight) is nn.Parameter]))

    with zero.Init() as context:
        model = Watching()
    assert seen == [0, 0, 0, 0, 0]
    assert sharded_names(model) == {name for name, _ in model.named_parameters()}
    assert (model.own == 2.0).all()
    assert "partitioned over 1 ranks" in context.report
    numel = sum(each.numel() for each in model.parameters())
    assert f"{numel:,} elements" in context.report
    assert f"{4 * numel:,} bytes in host memory" in context.report


def test_nothing_is_patched_and_hooks_go_with_the_context() -> None:
    def state() -> tuple[Any, ...]:
        return (
            nn.Module.__init__,
            nn.Module.apply,
            nn.Linear.__init__,
            torch.nn.functional.linear,
            torch.empty,
            torch.Tensor.__new__,
            dict(torch_modules._global_parameter_registration_hooks),
            dict(torch_modules._global_module_registration_hooks),
        )

    before = state()
    with zero.Init():
        assert state()[:6] == before[:6]
        nn.Linear(3, 3)
    assert state() == before
    with pytest.raises(KeyError), zero.Init():
        raise KeyError
    assert state() == before
    outside = nn.Linear(3, 3)
    assert type(outside.weight) is nn.Parameter


def test_contexts_nest_and_second_models_are_their_own(scratch: Path) -> None:
    with zero.Init():
        first = nn.Linear(4, 4)
        with zero.Init(enabled=False):
            second = nn.Linear(4, 4)
        with zero.Init(dtype=torch.bfloat16) as inner:
            third = nn.Linear(4, 4)
        assert sharded_names(third) == {"weight", "bias"}
        assert "2 parameters" in inner.report
        fourth = nn.Linear(4, 4)
    assert third.weight.dtype is torch.bfloat16
    assert all(sharded_names(each) == {"weight", "bias"} for each in (first, second, fourth))
    student = LateModel()
    with zero.Init():
        teacher = LateModel()
    engine, _, _, _ = zero.initialize(model=student, config=nvme(scratch))
    other = copy.deepcopy(teacher)
    assert not sharded_names(other)
    loss = engine(make_tokens()) + teacher(make_tokens()).detach()
    engine.backward(loss)
    engine.step()
    assert torch.equal(teacher.head.weight, other.head.weight)
    engine.destroy()


def test_a_model_without_an_engine_works(scratch: Path) -> None:
    torch.manual_seed(0)
    plain = LateModel()
    torch.manual_seed(0)
    with zero.Init(remote_device="nvme", config_dict_or_path=nvme(scratch)) as context:
        model = LateModel()
    assert str(scratch) in context.report
    for each in (plain, model):
        each(make_tokens()).backward()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        optimizer.step()
        each.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.clone(), theirs.clone(), msg=name)
    state = model.state_dict()
    fresh = LateModel()
    fresh.load_state_dict(state)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.head.weight, plain.head.weight)


def test_gathering_before_there_is_an_engine() -> None:
    with zero.Init():
        model = nn.Linear(4, 3)
    with zero.GatheredParameters(model.weight, modifier_rank=0):
        with zero.GatheredParameters([model.weight], modifier_rank=0):
            assert type(model.weight) is nn.Parameter
            nn.init.constant_(model.weight, 0.5)
        model.weight.data[0] = 2.0
    assert model.weight.tolist() == [[2.0] * 4, [0.5] * 4, [0.5] * 4]
    with (
        pytest.raises(RuntimeError, match=r"Linear\.weight.*modifier_rank=0"),
        zero.GatheredParameters(model.weight),
    ):
        model.weight.data.add_(1)
    assert model.weight.tolist() == [[2.0] * 4, [0.5] * 4, [0.5] * 4]


def test_an_engine_takes_the_values_over_and_the_spool_is_freed(scratch: Path) -> None:
    with zero.Init(config_dict_or_path=nvme(scratch)) as context:
        model = LateModel()
    model.apply(init_weights)
    view = model.head.weight.data
    expected = copy.deepcopy(model)
    objects = dict(model.named_parameters())
    spool = weakref.ref(context._nursery.spool)
    del context
    engine, _, _, _ = zero.initialize(model=model, config=nvme(scratch))
    gc.collect()
    assert spool() is None
    for name, parameter in model.named_parameters():
        assert parameter is objects[name]
        assert torch.equal(parameter, expected.get_parameter(name))
    engine.backward(engine(make_tokens()))
    engine.step()
    assert torch.equal(view, model.head.weight)
    assert not torch.equal(view, expected.head.weight)
    engine.destroy()


def test_lazy_and_odd_parameters_are_left_alone() -> None:
    with zero.Init():
        lazy = nn.LazyLinear(3)
        model = nn.Linear(3, 3)
        model.index = nn.Parameter(torch.arange(3), requires_grad=False)
        model.none = nn.Parameter(torch.empty(0))
        model.scalar = nn.Parameter(torch.tensor(2.0))
    assert type(model.index) is nn.Parameter
    assert sharded_names(model) >= {"weight", "bias", "scalar"}
    assert (model.scalar * torch.ones(2)).tolist() == [2.0, 2.0]
    assert model.none.numel() == 0
    assert model.none.sum() == 0
    lazy(torch.ones(1, 2))
    assert lazy.weight.shape == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"remote_device": "nvme"}, "no path is known"),
        ({"remote_device": "gpu"}, "remote_device must be"),
        ({"dtype": torch.int8}, "int8 cannot be trained"),
        ({"param_swapper": object()}, "param_swapper is not available"),
        ({"config": {"zero_optimisation": {}}}, "zero_optimization"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(zero.ConfigError, match=message):
        zero.Init(**arguments)
    with pytest.raises(TypeError, match="no argument 'modle'"):
        zero.Init(modle=None)
    zero.Init(**{**arguments, "enabled": False})


class Rotary(nn.Module):
    """Rotates by frequencies that lose digits in 16 bits, which a loss would show (G8)."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("frequencies", 1.3 / 10000 ** (torch.arange(0, 16, 2) / 16))
        self.register_buffer("hidden", torch.linspace(0.1, 3, 7), persistent=False)
        self.register_buffer("places", torch.arange(300))
        self.register_buffer("mask", torch.ones(300, 1).bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = self.places[:, None] * self.frequencies
        turned = self.inp(x).float() * torch.cat([angles.cos(), angles.sin()], dim=1) * self.mask
        return (self.out(turned.to(x.dtype)).float() * self.hidden.sum()).square().mean()


@pytest.mark.parametrize("way", ["built before", "under Init", "under Init, given a type"])
def test_buffers_keep_type_and_bits_however_a_model_is_built(scratch: Path, way: str) -> None:
    torch.manual_seed(2)
    plain = Rotary()
    bits = {name: each.clone() for name, each in plain.named_buffers()}
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()
    torch.manual_seed(2)
    config = nvme(scratch, dtype="bf16")
    dtype = torch.bfloat16 if "type" in way else None
    with zero.Init(config_dict_or_path=config, enabled="Init" in way, dtype=dtype):
        model = Rotary()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    for step in range(2):
        x = torch.randn(300, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = engine(x)
        if not step:
            assert torch.equal(loss, plain(x))
        engine.backward(loss)
        engine.step()
        found = dict(model.named_buffers())
        assert {name: each.dtype for name, each in found.items()} == {
            name: each.dtype for name, each in bits.items()
        }
        assert all(torch.equal(found[name], each) for name, each in bits.items())
    engine.destroy()
