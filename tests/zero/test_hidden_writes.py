"""Writes that no counter shows: through `.data`, arrays and aliases, in any window of a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.observe import full_parameters
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme
NAME = "blocks.0.up.weight"


@pytest.fixture(scope="module")
def engine(module_scratch: Path) -> Iterator[zero.ZeroEngine]:
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(module_scratch),
        host_memory="40KB",
        sub_group_size=1024,
    )
    made, _, _, _ = zero.initialize(model=make_model(), config=config)
    assert made.plan.memory.swap_file_bytes > 0
    for step in range(3):  # six windows of every unit
        made.backward(made(*make_batch(step)))
        made.step()
    yield made
    made.destroy()


def weight(engine: zero.ZeroEngine) -> nn.Parameter:
    return engine.module.blocks[0].up.weight


def in_the_window(engine: zero.ZeroEngine, touch: Callable[[nn.Parameter], Any]) -> list[Any]:
    """Run a forward in which `touch` gets the weight while its module runs; return its results."""
    results = []
    hook = engine.module.blocks[0].up.register_forward_pre_hook(
        lambda module, _args: results.append(touch(module.weight))
    )
    try:
        engine(*make_batch(9))
    finally:
        hook.remove()
    return results


@torch.no_grad()
def fused(w: nn.Parameter) -> None:
    ones = [torch.ones_like(w) for _ in range(3)]
    torch._fused_sgd_(
        [w],
        [ones[0]],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "data.mul_": lambda w: w.data.mul_(2),
    "data row": lambda w: w.data[0].__setitem__(0, 5.0),
    "init on data": lambda w: nn.init.normal_(w.data),
    "set data": lambda w: setattr(w, "data", w.data * 2),
    "detach": lambda w: w.detach().mul_(2),
    "no_grad": torch.no_grad()(lambda w: w.mul_(2)),
    "numpy": lambda w: w.detach().numpy().__setitem__(0, 3.0),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).fill_(1.0),
    "storage": lambda w: w.untyped_storage().fill_(0),
    "foreach on data": lambda w: torch._foreach_mul_([w.data], 2.0),
    "fused": fused,
}


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("how", WRITES)
def test_a_write_inside_a_forward_raises(
    engine: zero.ZeroEngine, how: str, *, with_gradient: bool
) -> None:
    before = full_parameters(engine)
    with (
        torch.set_grad_enabled(with_gradient),
        pytest.raises(RuntimeError, match=rf"{NAME}.*is lost.*modifier_rank=0"),
    ):
        in_the_window(engine, WRITES[how])
    after = full_parameters(engine)
    assert all((before[name] == after[name]).all() for name in before)
    engine.zero_grad()
    engine.backward(engine(*make_batch(4)))
    engine.step()


ALIASES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "a row": torch.no_grad()(lambda w: w[1]),
    "a row in the graph": lambda w: w.t()[1],
    "array": lambda w: torch.from_numpy(w.detach().numpy()),
    "storage": lambda w: torch.empty(0).set_(w.untyped_storage()),
}


@pytest.mark.parametrize("how", ALIASES)
@pytest.mark.parametrize("then", ["forward", "step", "read", "gather"])
def test_memory_kept_from_a_window_is_readable_and_a_late_write_raises(
    engine: zero.ZeroEngine, how: str, then: str
) -> None:
    expected = ALIASES[how](torch.nn.Parameter(weight(engine).detach().clone())).clone()
    (alias,) = in_the_window(engine, ALIASES[how])
    if alias.numel() == expected.numel():
        assert torch.equal(alias.view(expected.shape), expected)
    engine.zero_grad()
    engine.backward(engine(*make_batch(4)))
    with torch.no_grad():
        alias.detach().mul_(2)
    use: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine(*make_batch(5)),
        "step": engine.step,
        "read": lambda: weight(engine).sum(),
        "gather": lambda: zero.GatheredParameters([weight(engine)]).__enter__(),
    }
    with pytest.raises(RuntimeError, match=rf"{NAME}.*kept from a window.*lost"):
        use[then]()
    engine.zero_grad()
    engine.backward(engine(*make_batch(6)))  # told once, and the engine goes on
    engine.step()


def test_memory_kept_from_a_gather_window_is_watched_too(engine: zero.ZeroEngine) -> None:
    with zero.GatheredParameters([weight(engine)], modifier_rank=0):
        alias = weight(engine).data
        alias.mul_(2)
    engine(*make_batch(0))
    alias.mul_(2)
    with pytest.raises(RuntimeError, match=rf"{NAME}.*kept from a window.*lost"):
        engine(*make_batch(0))


def test_memory_that_nobody_keeps_is_free(engine: zero.ZeroEngine) -> None:
    kept = [in_the_window(engine, ALIASES["data"]) for _ in range(3)]
    segment = next(
        segment
        for segment in engine._runtime.segments
        if NAME in [member.name for member in segment.members]
    )
    engine(*make_batch(0))
    assert len(segment.aliases) == 3
    del kept
    engine(*make_batch(0))
    assert len(segment.aliases) == 0
