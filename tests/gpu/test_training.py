"""Training on a GPU: the tier does not change the bits, memory does not grow."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from offload import process_bytes
from tests.support.configs import make_config
from tests.support.grid import cells, run_cell
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.gpu

CELLS = [cell for cell in cells() if cell["clip"]]
CELLS += [{**cell, "update_device": "cpu"} for cell in CELLS if cell["accumulation"] == 4]


@pytest.fixture(autouse=True)
def same_bits_each_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


_RESIDENT: dict[tuple[Any, ...], dict[str, Any]] = {}


def resident(cell: dict[str, Any], scratch: Path) -> dict[str, Any]:
    key = (cell["dtype"], cell["accumulation"], cell["clip"])
    if key not in _RESIDENT:
        plain = {**cell, "device": "none", "with_parameters": False, "update_device": "auto"}
        _RESIDENT[key] = run_cell(plain, str(scratch))
    return _RESIDENT[key]


def cell_name(cell: dict[str, Any]) -> str:
    what = "all" if cell["with_parameters"] else "optimizer"
    name = f"{cell['device']}-{what}-x{cell['accumulation']}-{cell['dtype']}"
    return f"{name}-{cell.get('update_device', 'auto')}"


@pytest.mark.nvme
@pytest.mark.parametrize("cell", CELLS, ids=cell_name)
def test_bits_equal_the_reference_and_every_other_tier(
    cell: dict[str, Any], module_scratch: Path
) -> None:
    expected = resident(cell, module_scratch)
    found = run_cell(cell, str(module_scratch))
    assert found["mismatches"] == []
    assert all(ours == reference > 0 for reference, ours in found["norms"])
    assert found["losses"] == expected["losses"]
    assert found["digest"] == expected["digest"]
    for step in found["ledger"]:
        assert step["read"] == step["planned_read"]
        assert step["written"] == step["planned_written"]
        assert (step["read"] > 0) == (cell["device"] == "nvme")


@pytest.mark.parametrize("tiers", list(itertools.product(("none", "cpu"), repeat=2)), ids="-".join)
def test_memory_does_not_grow(tiers: tuple[str, str]) -> None:
    parameters, optimizer = tiers
    config = make_config(
        parameters=parameters, optimizer=optimizer, host_memory="1GB", dtype="bf16"
    )
    engine, _, _, _ = zero.initialize(model=make_model(dtype=torch.bfloat16), config=config)
    seen = []
    for step in range(100):
        engine.backward(engine(*(each.cuda() for each in make_batch(step))))
        engine.step()
        if step in (9, 99):
            gc.collect()  # engines of earlier tests are in cycles
            torch.cuda.synchronize()
            seen.append((torch.cuda.memory_allocated(), process_bytes("VmRSS")["VmRSS"]))
    (device_before, host_before), (device_after, host_after) = seen
    assert device_after == device_before
    assert host_after - host_before < 16 << 20
    assert all(each.is_cuda for each in engine.module.parameters())
    engine.destroy()


def test_device_memory_is_given_back() -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    config = make_config(parameters="cpu", optimizer="cpu", host_memory="1GB", dtype="bf16")
    model = make_model(dtype=torch.bfloat16)
    engine, _, _, _ = zero.initialize(model=model, config=config)
    engine.backward(engine(*(each.cuda() for each in make_batch(0))))
    engine.step()
    engine.destroy()
    del engine, model
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


@pytest.mark.parametrize("tiers", [("none", "cpu"), ("cpu", "cpu"), ("none", "none")], ids="-".join)
def test_the_host_waits_once_a_step(tiers: tuple[str, str]) -> None:
    parameters, optimizer = tiers
    config = make_config(
        parameters=parameters, optimizer=optimizer, host_memory="1GB", dtype="bf16"
    )
    config["tiers"]["update_device"] = "device"
    engine, _, _, _ = zero.initialize(model=make_model(dtype=torch.bfloat16), config=config)
    batch = [each.cuda() for each in make_batch(0)]

    def step() -> None:
        engine.backward(engine(*batch))
        engine.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        step()
    waits = [each.name for each in found.events() or () if each.name in _WAITS]
    if waits and waits[-1] == "cudaDeviceSynchronize":
        waits.pop()  # ending a profile waits for the device
    # For the norm, if the device has not done it yet.
    assert waits in ([], ["cudaEventSynchronize"])
    engine.destroy()
