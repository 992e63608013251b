"""Small parameters stay unsharded: fewer bytes move, and no bit of the result changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
import zero.planning
from estimators import PlanError, Section, Tier, step_traffic
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.observe import digest, full_parameters, state_digest
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiny import make_batch, make_model

pytestmark = pytest.mark.nvme
STEPS = 2


def settings(path: Path, threshold: int, total: int = sys.maxsize) -> dict[str, Any]:
    """Return a configuration in which everything pages that may."""
    config = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(path),
        host_memory="400KB",
        sub_group_size=1024,
        accumulation=2,
        clip=0.5,
    )
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 0
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    config["zero_optimization"]["stage3_model_persistence_threshold"] = total
    return config


def trained(
    path: Path,
    rank: int,
    threshold: int,
    total: int = sys.maxsize,
    *,
    tier: str = "nvme",
    update_device: str = "auto",
) -> dict[str, Any]:
    """Train a little, and return the bits of everything and what a step has moved."""
    config = settings(path, threshold, total)
    config["zero_optimization"]["offload_param"]["device"] = tier
    config["zero_optimization"]["offload_optimizer"]["device"] = tier
    config["tiers"]["host_memory"] = "400KB" if tier == "nvme" else "100MB"
    config["tiers"]["update_device"] = update_device
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    plan = engine.plan.memory
    for step in range(STEPS):
        for micro in range(2):
            batch = [each.to(engine.device) for each in make_batch(2 * step + micro, rank)]
            engine.backward(engine(*batch))
        engine.step()
    last = engine.ledger.report().steps[-1]
    world_size = plan.request.world_size
    moving, staying = 0, 0
    for segment in plan.request.segments:
        size = segment.layout(world_size).padded_numel * segment.element.size_bytes
        own = size // world_size
        moving += 0 if segment.persistent else size - own
        staying += size - own if segment.persistent else 0
    traffic = step_traffic(plan, 2)
    resident = plan.resident_section_bytes(Tier.DEVICE, Section.PARAMETER)
    found = {
        "bits": digest(full_parameters(engine)),
        "state": state_digest(engine),
        "norm": engine.get_global_grad_norm(),
        "gathered": last.rank_bytes["gathered"],
        "expected": 2 * 2 * moving + staying,
        "copied": [last.copied_bytes.get(way, 0) for way in ("in", "out")],
        "read": last.nvme_bytes["nvme read parameter"],
        "planned": traffic.read_bytes[Section.PARAMETER],
        "persistent": plan.persistent_bytes,
        "values": sum(
            segment.layout(world_size).padded_numel * segment.element.size_bytes
            for segment in plan.request.segments
            if segment.persistent
        ),
        "resident": resident,
        "exceeds": [
            line["what"]
            for line in engine.memory_report()["first_step"]
            if (line["actual_bytes"] or 0) > line["planned_bytes"] + 2**20
        ],
        "names": sorted(
            name for each in plan.request.segments if each.persistent for name in each.names
        ),
    }
    engine.destroy()
    return found


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_what_stays_is_not_gathered_nor_read_and_changes_no_bit(
    scratch: Path, world_size: int
) -> None:
    model = make_model()
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    small = sorted(name for name, numel in sizes.items() if 0 < numel <= 800)

    def work(rank: int) -> list[dict[str, Any]]:
        return [trained(scratch, rank, *limits) for limits in ((0,), (800,), (800, 700), (10**5,))]

    for found in on_ranks(work, world_size, scratch):
        none, some, few, everything = found
        for each in found:
            assert (each["bits"], each["state"]) == (none["bits"], none["state"])
            assert each["norm"] == pytest.approx(none["norm"], rel=1e-12)
            assert each["gathered"] == each["expected"]
            assert each["read"] == each["planned"]
            assert each["resident"] == each["persistent"]
            assert not each["exceeds"]
        assert none["names"] == [] and none["persistent"] == 0
        assert some["names"] == small
        assert sum(sizes[name] for name in few["names"]) <= 700 < sum(sizes[n] for n in small)
        assert 0 < few["persistent"] <= some["persistent"] < everything["persistent"]
        assert none["read"] > some["read"] > everything["read"] == 0
        assert (none["gathered"] > some["gathered"] > everything["gathered"]) or world_size == 1


def test_a_write_to_what_stays_is_not_lost_and_a_window_gathers_nothing(scratch: Path) -> None:
    def work(rank: int) -> list[object]:
        engine, _, _, _ = zero.initialize(model=make_model(), config=settings(scratch, 48))
        norm = engine.module.blocks[0].norm1.weight
        said: list[object] = [type(norm) is torch.nn.Parameter, norm.tolist() == [1.0] * 16]
        before = engine.ledger.snapshot()
        with torch.no_grad():
            norm.mul_(2.0)
        norm.data[3] = 5.0
        with zero.GatheredParameters([norm], modifier_rank=0):
            if rank == 0:
                norm.data[4] = 7.0
        moved = engine.ledger.snapshot().minus(before)
        said += [moved.rank_bytes["gathered"], moved.nvme_read_bytes]
        lost = pytest.raises(RuntimeError, match=r"blocks\.0\.norm1\.weight")
        with lost, zero.GatheredParameters([norm]):
            norm.data[0] = 1.0
        engine.optimizer.param_groups[0]["lr"] = 0.0
        for micro in range(2):
            engine.backward(engine(*make_batch(micro, rank)))
        engine.step()
        engine.save_checkpoint(str(scratch), tag="kept")
        said.append(norm.tolist())
        with torch.no_grad():
            norm.zero_()
        engine.load_checkpoint(str(scratch), tag="kept")
        said.append(norm.tolist())
        engine.destroy()
        return said

    expected = [2.0] * 16
    expected[3:5] = [5.0, 7.0]
    for found in on_ranks(work, 2, scratch):
        assert found == [True, True, 0, 0, expected, expected]


def test_what_stays_is_not_copied_to_a_device(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the forwards and backwards of two micro-batches, nor for the update and back."""
    monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(5))
    none, some = (
        trained(scratch, 0, each, tier="cpu", update_device="device") for each in (0, 800)
    )
    assert (some["bits"], some["state"]) == (none["bits"], none["state"])
    assert none["copied"][0] - some["copied"][0] == (2 * 2 + 1) * some["values"]
    assert none["copied"][1] - some["copied"][1] == some["values"] > 0


def test_what_stays_counts_in_the_budget_of_the_device(scratch: Path) -> None:
    config = settings(scratch, 10**5)
    plan = zero.plan_memory(make_model(), config, world_size=2).memory
    assert plan.persistent_bytes > 0
    config["tiers"]["device_memory"] = 2 * plan.device_bytes
    assert zero.plan_memory(make_model(), config, world_size=2).memory == plan
    config["tiers"]["device_memory"] = 2 * plan.device_bytes - 2
    with pytest.raises(PlanError, match=f"{plan.persistent_bytes} .*persistence_threshold"):
        zero.plan_memory(make_model(), config, world_size=2)


def unequal_layers() -> torch.nn.Module:
    """Return layers of one class of which the middle ones stay, the second with all it has."""
    torch.manual_seed(0)
    widths = [(48, 40), (40, 12), (12, 40), (40, 40), (40, 4)]
    layers = [each for pair in widths for each in (torch.nn.Linear(*pair), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers)


class Shared(torch.nn.Module):
    """Blocks that share all they have, which the root unit holds, before blocks of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = torch.nn.Linear(48, 48)
        self.first = torch.nn.ModuleList(torch.nn.Sequential(shared) for _ in range(3))
        self.rest = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.first, *self.rest):
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("build", [unequal_layers, Shared])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_blocks_of_which_everything_stays_do_not_shift_the_others(
    scratch: Path, build: Any, world_size: int, tier: str
) -> None:
    def work(rank: int) -> list[str]:
        said = []
        for threshold in (0, 530):
            config = settings(scratch, threshold)
            config["gradient_accumulation_steps"] = 1
            for key in ("offload_param", "offload_optimizer"):
                config["zero_optimization"][key]["device"] = tier
            engine, _, _, _ = zero.initialize(model=build(), config=config)
            units = engine._runtime.units
            assert all(
                segment.spec.unit_index == unit.index and segment.spec.unit == unit.name
                for unit in units
                for segment in unit.segments
            )
            for step in range(2):
                engine.backward(engine(torch.full((2, 48), 0.1 * (1 + step + rank))).sum())
                engine.step()
            moved = engine.ledger.snapshot()
            assert moved.nvme_read_bytes or tier != "nvme"
            said.append(digest(full_parameters(engine)))
            engine.destroy()
        return said

    for found in on_ranks(work, world_size, scratch):
        assert found[0] == found[1]
