"""What sees through memory is refused before anything happens; the engine goes on as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.zero.test_other_values import WIDTH, make_engine, step

pytestmark = [pytest.mark.nvme, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

Call = Callable[[zero.ZeroEngine, torch.Tensor], Any]
MOVES = "moves between memories, which"
COMPILED = r"compile what is inside of a unit, block.forward = torch.compile\(block.forward\)"


def compiled(engine: zero.ZeroEngine, x: torch.Tensor) -> Any:
    return torch.compile(engine, backend="eager")(x)


CALLS: dict[str, tuple[Call, str]] = {
    "grad": (lambda engine, x: torch.func.grad(engine)(x), MOVES),
    "jacrev": (lambda engine, x: torch.func.jacrev(engine)(x), MOVES),
    "jvp": (lambda engine, x: torch.func.jvp(engine, (x,), (x,)), MOVES),
    "vmap": (lambda engine, x: torch.func.vmap(engine)(x), MOVES),
    "trace": (lambda engine, x: torch.jit.trace(engine.module, (x,)), MOVES),
    "compile": (compiled, COMPILED),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_transform_of_units_that_move_is_refused(name: str, scratch: Path) -> None:
    call, reason = CALLS[name]
    reference = make_engine("none", scratch)
    wanted = [step(reference, number) for number in range(3)]
    engine = make_engine("nvme", scratch)
    found = [step(engine, 0)]
    with pytest.raises(Exception, match=reason):
        call(engine, torch.ones(2, WIDTH))
    torch._dynamo.reset()
    found += [step(engine, number) for number in (1, 2)]
    assert found == wanted
    assert engine.ledger.snapshot().nvme_write_bytes > 0
    engine.destroy()
    reference.destroy()


@pytest.mark.parametrize("name", ["grad", "vmap"])
def test_where_nothing_moves_transforms_work(name: str, scratch: Path) -> None:
    engine, x = make_engine("none", scratch), torch.ones(2, WIDTH)
    found = CALLS[name][0](engine, x)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(engine(leaf), leaf)
    assert torch.allclose(found, slope if name == "grad" else engine(x).expand(2))
    engine.destroy()


def test_what_torch_has_besides_follows_units_that_move(scratch: Path) -> None:
    """The message says so."""
    engine, x = make_engine("nvme", scratch), torch.ones(2, WIDTH)
    found = torch.autograd.functional.jacobian(engine, x)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(engine(leaf), leaf)
    assert torch.equal(found, slope)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(engine(dual)).tangent
    assert torch.allclose(tangent, slope.sum())
    engine.destroy()
