"""States are read ahead while the last backward before an update goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero
import zero.planning
from estimators import Section
from tests.support.configs import make_config
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiny import TinyTransformer, make_batch

STEPS = 3


def make_model() -> TinyTransformer:
    torch.manual_seed(0)
    return TinyTransformer(width=32, layers=4)


def paging_config(scratch: Path, accumulation: int) -> dict[str, Any]:
    """Return a configuration with gradients in memory and most of the state on NVMe."""
    for kilobytes in range(100, 2000, 20):
        config = make_config(
            optimizer="nvme",
            nvme_path=str(scratch),
            host_memory=1024 * kilobytes,
            accumulation=accumulation,
            sub_group_size=2048,
        )
        config["tiers"]["slot_count"] = 5
        try:
            groups = zero.plan_memory(make_model(), config, 1).memory.sub_groups
        except zero.ConfigError:
            continue
        if not any(group.on_nvme(Section.GRADIENT) for group in groups):
            assert sum(group.on_nvme(Section.STATE) for group in groups) > 8
            return config
    raise AssertionError("no budget keeps gradients in memory and state on NVMe")


@pytest.mark.nvme
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("device", ["host", "simulated"])
def test_the_last_backward_reads_what_the_update_begins_with(
    device: str, accumulation: int, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "simulated":
        monkeypatch.setattr(zero.planning, "open_device", lambda _wanted: SimulatedDevice())
    config = paging_config(scratch, accumulation)
    plain = make_config(accumulation=accumulation)
    engines = [zero.initialize(model=make_model(), config=each)[0] for each in (config, plain)]
    paged, resident = engines
    events = paged.ledger.events
    for step in range(STEPS):
        for micro in range(accumulation):
            events.clear()
            for engine in engines:
                engine.backward(engine(*make_batch(accumulation * step + micro)))
                if engine is paged:
                    ahead = [name for event, name in events if event == "submit read"]
            is_last = micro == accumulation - 1
            assert bool(ahead) == (is_last and step > 0)  # at first no state was written
            for engine in engines:
                engine.step()
        submitted = [name for event, name in events if event == "submit read"]
        assert submitted[: len(ahead)] == ahead
        assert len(submitted) == len(set(submitted))  # nothing is read twice
        if step:
            pager = paged._runtime.store.pager
            assert pager is not None
            assert len(ahead) == len(paged._runtime.store.slots) - 1  # one is kept for demand
    for ours, theirs in zip(paged.parameters(), resident.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for engine in engines:
        engine.destroy()


@pytest.mark.nvme
def test_gradients_on_nvme_keep_the_slots_for_themselves(scratch: Path) -> None:
    config = paging_config(scratch, 1)
    while True:
        config["tiers"]["host_memory"] -= 8192
        groups = zero.plan_memory(make_model(), config, 1).memory.sub_groups
        if any(group.on_nvme(Section.GRADIENT) for group in groups):
            break
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    for step in range(STEPS):
        engine.ledger.events.clear()
        engine.backward(engine(*make_batch(step)))
        assert not [event for event, _ in engine.ledger.events if event == "submit read"]
        engine.step()
    assert [event for event, _ in engine.ledger.events if event == "submit read"]
    engine.destroy()
