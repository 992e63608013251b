"""What planning anew leaves behind: no memory of old tiers, and no engine that is half moved."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zero
from aio_ops.memory import Mapping
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme


@pytest.fixture(params=["nvme", "none"])
def config(scratch: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return make_config(
        parameters=request.param,
        optimizer=request.param,
        nvme_path=str(scratch),
        host_memory="60KB" if request.param == "nvme" else "1GB",
        sub_group_size=1024,
    )


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def train(engine: zero.ZeroEngine, step: int) -> None:
    engine.backward(engine(*make_batch(step)))
    engine.step()


def locked_bytes() -> int:
    """Return the bytes that this process has locked in RAM."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmLck:")[1].split()[0]) << 10


def mapped_bytes() -> int:
    """Return the bytes of the arenas that are mapped."""
    return sum(_MAPPINGS.values())


_MAPPINGS: dict[int, int] = {}


@pytest.fixture
def watched_mappings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    start, end = Mapping.__init__, Mapping.__del__

    def begin(self: Mapping, size_bytes: int, alignment_bytes: int) -> None:
        start(self, size_bytes, alignment_bytes)
        _MAPPINGS[self.address] = size_bytes

    def finish(self: Mapping) -> None:
        _MAPPINGS.pop(self.address, None)
        end(self)

    monkeypatch.setattr(Mapping, "__init__", begin)
    monkeypatch.setattr(Mapping, "__del__", finish)
    _MAPPINGS.clear()
    yield
    _MAPPINGS.clear()


@pytest.mark.usefixtures("no_collector", "watched_mappings")
def test_old_tiers_are_given_back_without_the_collector(config: dict[str, Any]) -> None:
    for section in config["zero_optimization"].values():
        if isinstance(section, dict):
            section["pin_memory"] = True
    before = locked_bytes()
    model = make_model()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    train(engine, 0)
    mapped, locked = mapped_bytes(), locked_bytes()
    assert mapped > 0
    for step in range(1, 7):
        for parameter in model.blocks[0].parameters():
            parameter.requires_grad_(step % 2 == 0)
        train(engine, step)
        assert mapped_bytes() <= mapped, step
        assert locked_bytes() <= locked, step
    engine.destroy()
    in_place = sum(each.nbytes for each in model.parameters() if type(each) is nn.Parameter)
    assert mapped_bytes() <= in_place + 4096 * len(list(model.parameters()))
    assert locked_bytes() == before
