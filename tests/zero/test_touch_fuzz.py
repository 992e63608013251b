"""Random sequences of touches give what a plain parameter gives; so do aliases kept of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme
Pair = tuple[Any, Any]
"""The same thing of a sharded and of a plain model."""


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
    yield made
    made.destroy()


VIEWS: list[Callable[[Any, random.Random], Any]] = [
    lambda t, r: t.data,
    lambda t, r: t.detach(),
    lambda t, r: t.t(),
    lambda t, r: t[r.randrange(4) :],
    lambda t, r: t[:, :: r.randint(1, 3)],
    lambda t, r: t[r.randrange(2) : 3, 1:],
    lambda t, r: t.unsqueeze(0).squeeze(0),
    lambda t, r: t.narrow(0, 1, 2),
    lambda t, r: t.chunk(2)[r.randrange(2)],
    lambda t, r: t.T,
]
WRITES: list[Callable[[Any, random.Random], Any]] = [
    lambda t, r: t.fill_(r.random()),
    lambda t, r: t.mul_(1 + r.random()),
    lambda t, r: t.add_(t.mean()),
    lambda t, r: t.normal_(0, 1, generator=torch.Generator().manual_seed(r.randrange(99))),
    lambda t, r: t.copy_(torch.full_like(t, r.random())),
    lambda t, r: t.__setitem__(r.randrange(2), r.random()),
    lambda t, r: t.__setitem__((slice(None), 0), t[:, 1].clone()),
    lambda t, r: torch.add(t, 1.0, out=t),
    lambda t, r: torch._foreach_mul_([t], 0.5),
    lambda t, r: t.clamp_(-0.5, 0.5),
    lambda t, r: t.zero_(),
    lambda t, r: t.detach().apply_(lambda x: x / 2),
    lambda t, r: torch.nn.init.uniform_(t, generator=torch.Generator().manual_seed(1)),
]
READS: list[Callable[[Any], Any]] = [
    lambda t: t + 0,
    lambda t: t.sum(),
    lambda t: t.clone(),
    lambda t: t @ t.t(),
    lambda t: torch.cat([t, t]),
    lambda t: t[t > 0].sum(),
    lambda t: torch.tensor(t.tolist()),
    lambda t: t.float().mean(0),
]


def one_step(pairs: list[Pair], chance: random.Random) -> str:
    """Do one thing to one of the pairs and return what; views are added to the pairs."""
    ours, theirs = pairs[chance.randrange(len(pairs))]
    seed = chance.randrange(1 << 30)
    kind = chance.choice(("view", "write", "write", "read"))
    number = chance.randrange(len({"view": VIEWS, "write": WRITES, "read": READS}[kind]))
    if kind == "view" and theirs.dim() == 2 and min(theirs.shape) >= 4:
        pairs.append(
            (VIEWS[number](ours, random.Random(seed)), VIEWS[number](theirs, random.Random(seed)))
        )
    elif kind == "write":
        WRITES[number](ours, random.Random(seed))
        WRITES[number](theirs, random.Random(seed))
    elif kind == "read":
        assert torch.equal(READS[number](ours).clone(), READS[number](theirs))
    return f"{kind} {number}"


MANY = [pytest.param(seed, marks=pytest.mark.full) for seed in range(25, 400)]


@pytest.mark.parametrize("seed", [*range(25), *MANY])
def test_random_touches(engine: Any, seed: int) -> None:
    touch_randomly(engine, make_model(), seed, make_batch(seed))


def touch_randomly(engine: Any, plain: Any, seed: int, batch: Sequence[torch.Tensor]) -> None:
    """Touch parameters of an engine and of a plain model alike, and compare them each time."""
    chance = random.Random(seed)
    names = ["blocks.0.project.weight", "embedding.weight", "blocks.1.down.weight"]
    with torch.no_grad():
        for name in names:
            engine.module.get_parameter(name).copy_(plain.get_parameter(name))
        pairs = [(engine.module.get_parameter(n), plain.get_parameter(n)) for n in names]
        done = []
        for _ in range(14):
            if chance.random() < 0.05:
                engine(*batch)  # windows come and go between touches
                done.append("forward")
            done.append(one_step(pairs, chance))
            for ours, theirs in pairs:
                assert torch.equal(ours.clone(), theirs), done
