"""What is at the loss of models of other forms, on ranks that differ, and in passes that differ."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero
from tests.support.at_the_loss import (
    BLOCKS,
    LAYERS,
    WIDTH,
    WORDS,
    Block,
    Net,
    Pass,
    Returns,
    Watched,
    one_pass,
    trained,
)
from tests.support.fork_ranks import on_ranks

pytestmark = pytest.mark.nvme
ROOT_ALONE = ["<root>"]


class Stack(Watched):
    """Blocks alone: the root unit has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(words % WIDTH, WIDTH).float()
        for block in self.h:
            x = block(x)
        return x


class Encoder(Stack):
    """Returns what its last block does, and leaves the loss to others."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Embedding(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.inp(words)
        for block in self.h:
            x = block(x)
        return x


class Number(nn.Module):
    """Makes of a number for each sample another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 100), nn.Linear(100, 1)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y + self.b(torch.tanh(self.a(y[:, None])))[:, 0]


class Numbers(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Embedding(WORDS, 1)
        self.h = nn.ModuleList(Number() for _ in range(LAYERS))

    def forward(self, words: torch.Tensor) -> Any:
        y = self.inp(words[:, 0])[:, 0]
        for block in self.h:
            y = block(y)
        return self.looked_at(y.square().mean())


class Looped(Net):
    """Uses its first blocks twice; a rank may hold on to what one of them is unsharded to."""

    def __init__(self, *, holds: bool) -> None:
        super().__init__(Returns.BOTH)
        held: list[torch.Tensor] = []
        if holds:
            self.h[1].register_forward_pre_hook(lambda block, _: held.append(block.a.weight.data))

    def forward(self, words: torch.Tensor) -> Any:
        x = self.inp(words)
        for number in (0, 1, 2, 0, 1, 2, 3, 4, 5):
            x = checkpoint(self.h[number], x, use_reentrant=False)
        logits = self.head(x)
        return self.loss(logits, words), logits


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x)
        at = int(x.shape[0] % 2)
        return x + torch.tanh(self.experts[at](x))


class Experts(Net):
    def __init__(self) -> None:
        super().__init__(Returns.BOTH)
        self.h = nn.ModuleList(Routed() for _ in range(LAYERS))


class Wide(Net):
    """Large blocks, and small ones after them."""

    def __init__(self) -> None:
        super().__init__(Returns.BOTH)
        self.h.extend(Narrow() for _ in range(8))


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.a(x)


def both() -> Net:
    return Net(Returns.BOTH)


def after(engine: zero.ZeroEngine, words: torch.Tensor, *, with_gradients: bool) -> Any:
    """Train twice, and run three forwards between that have no backward."""
    look, engine.module.look = engine.module.look, lambda: None
    losses = one_pass(engine, words)
    with torch.set_grad_enabled(with_gradients):
        for _ in range(3):
            engine(words)
    engine.module.look = look
    return losses + one_pass(engine, words)


def after_evaluations(engine: zero.ZeroEngine, words: torch.Tensor) -> Any:
    return after(engine, words, with_gradients=False)


def after_lost_forwards(engine: zero.ZeroEngine, words: torch.Tensor) -> Any:
    return after(engine, words, with_gradients=True)


def twice_backward(engine: zero.ZeroEngine, words: torch.Tensor) -> list[torch.Tensor]:
    loss, _ = engine(words)
    engine.backward(loss, retain_graph=True)
    assert not any(unit.live_bytes for unit in engine._runtime.units)
    engine.backward(loss)
    return [loss]


@pytest.mark.parametrize(
    ("passes", "looks", "ahead", "kept"),
    [
        (after_evaluations, 2, 5 + 2, 2),
        (after_lost_forwards, 2, 5 + 2, 0),  # nothing tells which forwards have a backward
        (twice_backward, 3, 1 + 2, 1),
    ],
)
def test_what_is_foreseen_ends_with_a_pass(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, passes: Pass, looks: int, ahead: int, kept: int
) -> None:
    """Neither another forward nor another backward is prepared while one is at its loss."""
    found = trained(scratch, monkeypatch, both, passes=passes)
    assert found["full"]["<root>"] == found["planned"] > 0
    assert found["at the loss"] == looks * [[found["planned"], ROOT_ALONE]]
    assert found["left"] == [0, []]
    assert found["prefetch"] == dict.fromkeys(BLOCKS, ahead)
    assert found["kept"] == Counter({"<root>": kept})
    never = trained(scratch, monkeypatch, both, passes=passes, stage3_max_reuse_distance=0)
    assert never["bits"] == found["bits"]


@pytest.mark.parametrize("build", [Stack, Encoder])
def test_blocks_come_ahead_where_the_root_unit_does_not_move(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, build: type[Stack]
) -> None:
    """Each block is copied once in each pass, and the last one stays for its backward.

    The root unit has no parameters, or all of them persist.
    """
    keys = {"stage3_param_persistence_threshold": WIDTH * WIDTH}
    found = trained(scratch, monkeypatch, build, **keys)
    first, *middle, last = BLOCKS
    block = found["full"][first]
    assert found["full"]["<root>"] == 0 < block
    assert found["copied"] == (2 * LAYERS - 1) * block
    assert found["prefetch"] == {first: 1, **dict.fromkeys(middle, 2), last: 1}
    assert found["kept"] == {last: 1}
    assert found["at the loss"] == 2 * [[block, [last]]]
    assert found["planned"] == block
    assert found["left"] == [0, []]


def test_the_root_unit_stays_where_a_block_is_used_before_it(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(scratch, monkeypatch, Encoder)
    root, block = found["full"]["<root>"], found["full"][BLOCKS[-1]]
    assert 0 < root < block
    assert found["at the loss"] == 2 * [[root, ROOT_ALONE]]
    assert found["planned"] == root
    assert found["kept"] == {"<root>": 1}
    assert found["copied"] == root + 2 * LAYERS * block


def test_ranks_with_one_sample_and_with_more_do_alike(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that gives one number for a sample is not taken for the loss."""

    def work(rank: int) -> dict[str, Any]:
        words = torch.arange(rank + 1).view(-1, 1)
        return trained(scratch / str(rank), monkeypatch, Numbers, words=words)

    for found in on_ranks(work, 2, scratch):
        assert found["prefetch"] == {**dict.fromkeys(BLOCKS, 2), BLOCKS[-1]: 1}
        assert found["at the loss"] == 2 * [[found["planned"], ROOT_ALONE]]


def test_ranks_do_alike_where_one_of_them_holds_on_to_values(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank cannot keep the block for its next use, and copies it ahead no sooner for that."""

    def work(rank: int) -> dict[str, Any]:
        return trained(scratch / str(rank), monkeypatch, lambda: Looped(holds=rank == 0))

    for found in on_ranks(work, 2, scratch):
        assert found["gather"][BLOCKS[1]] > 0  # it is gathered again, by all
        assert found["kept"][BLOCKS[0]] > 0
        assert found["at the loss"] == 2 * [[found["planned"], ROOT_ALONE]]


def test_blocks_around_experts_in_memory_are_not_kept_over_the_loss(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot come ahead on several ranks, but no drive is read for them."""

    def work(rank: int) -> dict[str, Any]:
        words = torch.arange(4 * (rank + 1)).view(-1, 4)
        return trained(scratch / str(rank), monkeypatch, Experts, words=words)

    for found in on_ranks(work, 2, scratch):
        assert found["at the loss"] == 2 * [[found["planned"], ROOT_ALONE]]
        assert found["planned"] == found["full"]["<root>"] > 0
        assert found["kept"] == {"<root>": 1}


def test_ranks_keep_over_the_loss_what_all_of_them_read(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has all parameters in memory, the other reads them from a drive: both keep alike."""

    def work(rank: int) -> dict[str, Any]:
        own = scratch / str(rank)
        own.mkdir()
        return trained(own, monkeypatch, both, "nvme", on_host=(10**9, 0)[rank])

    in_memory, on_drive = on_ranks(work, 2, scratch)
    assert on_drive["at the loss"] == in_memory["at the loss"]
    assert in_memory["at the loss"] == 2 * [[in_memory["planned"], ROOT_ALONE]]
    assert on_drive["planned"] == sum(
        on_drive["full"][name] for name in [*ROOT_ALONE, *BLOCKS[-3:]]
    )
    assert in_memory["bits"][0] == on_drive["bits"][0]


def test_all_small_blocks_of_a_drive_are_counted(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than three fit where larger ones rest in memory."""
    large = LAYERS * sum(each.numel() for each in Block().parameters())
    rest = 2 * WORDS * WIDTH + 1000  # of the root unit, and what is less than a small block
    found = trained(scratch, monkeypatch, Wide, "nvme", on_host=large + rest)
    small = [name for name in found["kept"] if name != "<root>"]
    assert len(small) > 3
    assert not {*small} & {*BLOCKS}
    there = found["full"]["<root>"] + sum(found["full"][name] for name in small)
    assert found["at the loss"] == 2 * [[there, sorted(found["kept"])]]
    assert found["planned"] == there
