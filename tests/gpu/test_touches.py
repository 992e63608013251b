"""Touches of parameters that rest elsewhere, on a GPU: what plain parameters there do, or an error.

The tables are those of `tests/zero/test_guard_table.py`, their tensors made on the GPU; what plain
torch does not do there is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model
from tests.zero import test_touch_fuzz
from tests.zero.test_guard_table import (
    GRADIENTS,
    METADATA,
    OTHER_ERRORS,
    READS,
    WRITES,
    same,
    seeded,
)

pytestmark = [pytest.mark.gpu, pytest.mark.nvme]
TIERS = ("cpu", "nvme")
HOST_ONLY = ("numpy", "asarray", "apply_", "map_")
"""What torch does in host memory alone."""
DEVICE = "cuda"
RAW = [
    name
    for name in OTHER_ERRORS
    if "raw" in name or name in ("torch.tensor", "a scripted function")
]


@pytest.fixture(autouse=True)
def tensors_are_made_on_the_gpu() -> Iterator[None]:
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture(scope="module", params=TIERS)
def engine(request: pytest.FixtureRequest, module_scratch: Path) -> Iterator[zero.ZeroEngine]:
    pages = {"nvme_path": str(module_scratch), "host_memory": "40KB", "sub_group_size": 1024}
    more = pages if request.param == "nvme" else {"host_memory": "1GB"}
    config = make_config(parameters=request.param, optimizer=request.param, **more)
    model = model_of_the_host()
    with torch.device(DEVICE):
        made, _, _, _ = zero.initialize(model=model, config=config)
    assert made.device.type == DEVICE
    assert (made.plan.memory.swap_file_bytes > 0) is (request.param == "nvme")
    yield made
    made.destroy()


def model_of_the_host() -> nn.Module:
    """Return the model as a user builds it: on the processor."""
    with torch.device("cpu"):
        return make_model()


def batch(step: int) -> list[torch.Tensor]:
    with torch.device("cpu"):
        tensors = make_batch(step)
    return [each.to(DEVICE) for each in tensors]


@pytest.fixture(params=["at rest", "awaiting its backward"])
def pair(
    engine: zero.ZeroEngine, request: pytest.FixtureRequest
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Return a sharded parameter and a plain one with the same values; both restored after."""
    plain = model_of_the_host().to(DEVICE).blocks[0].project.weight
    sharded = engine.module.blocks[0].project.weight
    is_awaiting = request.param == "awaiting its backward"
    graph = engine(*batch(0)) if is_awaiting else None
    yield sharded, plain
    if is_awaiting:
        del graph
        engine(*batch(0)).backward()
    with torch.no_grad():
        sharded.copy_(model_of_the_host().blocks[0].project.weight)
    engine.zero_grad()


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_that_of_the_gpu(pair: Any, name: str) -> None:
    sharded, plain = pair
    expected = METADATA[name](plain)
    found = METADATA[name](sharded)
    assert same(found, expected)


@pytest.mark.parametrize("name", [name for name in READS if name not in HOST_ONLY])
def test_reads_see_the_values(pair: Any, name: str) -> None:
    sharded, plain = pair
    with torch.no_grad():
        expected = seeded(READS[name], plain)
        found = seeded(READS[name], sharded)
        assert same(found, expected)


@pytest.mark.parametrize("name", [name for name in WRITES if name not in HOST_ONLY])
def test_writes_are_kept(pair: Any, name: str) -> None:
    sharded, plain = pair
    with torch.no_grad():
        seeded(WRITES[name], plain)
        seeded(WRITES[name], sharded)
    with zero.GatheredParameters([sharded]):
        assert torch.equal(sharded, plain)


@pytest.mark.parametrize("name", GRADIENTS)
def test_uses_elsewhere_train(pair: Any, name: str) -> None:
    sharded, plain = pair
    for weight in (plain, sharded):
        GRADIENTS[name](weight).backward()
    assert sharded.grad is not None
    assert sharded.grad.device.type == DEVICE
    torch.testing.assert_close(sharded.grad.clone(), plain.grad)


def test_autograd_gets_the_parameter_itself(pair: Any) -> None:
    sharded, plain = pair
    (found,) = torch.autograd.grad((sharded * sharded).sum(), [sharded])
    assert torch.equal(found, torch.autograd.grad((plain * plain).sum(), plain)[0])


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("name", RAW)
def test_what_asks_for_the_memory_itself_raises(pair: Any, name: str) -> None:
    """And the GPU goes on: a kernel on memory that is not there would end the process."""
    touch, error, _ = OTHER_ERRORS[name]
    sharded, plain = pair
    with pytest.raises(error):
        touch(sharded)
    torch.cuda.synchronize()
    assert torch.equal(sharded, plain)


@pytest.mark.parametrize("seed", range(8))
def test_random_touches(
    engine: zero.ZeroEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_the_processor = {3, 11, 12}  # generators of the processor, and apply_
    writes = [
        each for at, each in enumerate(test_touch_fuzz.WRITES) if at not in needs_the_processor
    ]
    monkeypatch.setattr(test_touch_fuzz, "WRITES", writes)
    plain = model_of_the_host().to(DEVICE)
    test_touch_fuzz.touch_randomly(engine, plain, seed, batch(seed))
