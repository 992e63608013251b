"""What was planned is what is there, by category and tier, and a plan that is wrong is named."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import zero
from estimators import DriveRates, Section, Tier
from offload import process_bytes
from tests.support.configs import make_config
from tests.support.observe import digest, full_parameters
from tests.support.tiny import make_batch, make_model
from zero.memory import MemoryLine, memory_table

MIB = 1 << 20


def paged(scratch: Path, **changes: Any) -> dict[str, Any]:
    return make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        **{"host_memory": "8MB", "sub_group_size": 65536, **changes},
    )


def train(engine: zero.ZeroEngine, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(*make_batch(step)))
        engine.step()


@pytest.mark.nvme
def test_actual_memory_is_reported_by_category_and_is_what_was_planned(scratch: Path) -> None:
    config = paged(scratch, host_memory="3MB")
    engine, _, _, _ = zero.initialize(model=make_model(extra=(900_000,)), config=config)
    train(engine, 1)
    report = engine.memory_report()
    lines = {(line["tier"], line["what"]): line for line in report["lines"]}
    for tier, what in (
        ("device", "parameters unsharded (peak)"),
        ("device", "gradients unsharded (peak)"),
        ("host", "parameters resident"),
        ("host", "slots"),
        ("nvme", "swap file"),
    ):
        line = lines[tier, what]
        assert line["planned_bytes"] > 0, (tier, what)
        assert line["actual_bytes"] > 0.8 * line["planned_bytes"], line
    for line in report["lines"]:
        slack = MIB if line["tier"] == "nvme" else 0
        if line["actual_bytes"] is not None:
            assert line["actual_bytes"] <= line["planned_bytes"] + slack, line
    assert json.loads(json.dumps(report)) == report
    assert [each["what"] for each in report["first_step"]] == [
        each["what"] for each in report["lines"]
    ]
    assert report["process"]["peak_rss_bytes"] >= report["process"]["rss_bytes"] > 0
    out = io.StringIO()
    Console(file=out, width=100).print(memory_table(report))
    assert "swap file" in out.getvalue()
    assert json.loads(engine.plan.to_json())["host_bytes"] == engine.plan.memory.host_bytes
    engine.destroy()


class Nested(torch.nn.Linear):
    """A block that runs the next one inside its own forward."""

    inner: list[torch.nn.Module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = block(x)
        return super().forward(x)


@pytest.mark.nvme
def test_more_than_planned_is_a_warning_that_names_the_category(scratch: Path) -> None:
    blocks = [Nested(64, 64) for _ in range(5)]
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        block.inner = [following] if following is not None else []
    model = torch.nn.Sequential(*blocks)
    model.forward = blocks[0]  # type: ignore[assignment]
    config = paged(scratch)
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 0
    engine, _, _, _ = zero.initialize(model=model, config=config)
    with pytest.warns(RuntimeWarning, match=r"device memory for parameters unsharded \(peak\)"):
        engine.backward(engine(torch.ones(2, 64)).sum())
        engine.step()
    engine.destroy()


def test_a_line_exceeds_only_beyond_what_was_planned() -> None:
    line = MemoryLine(Tier.HOST, "slots", 100, 100)
    assert not line.exceeds
    assert dataclasses.replace(line, actual_bytes=101).exceeds
    assert not dataclasses.replace(line, actual_bytes=None).exceeds
    nvme = MemoryLine(Tier.NVME, "swap file", 100, 100 + MIB)
    assert not nvme.exceeds
    assert dataclasses.replace(nvme, actual_bytes=101 + MIB).exceeds


@pytest.mark.nvme
def test_inference_reserves_nothing_of_training(scratch: Path) -> None:
    """Without an optimizer there are parameters and slots, and nothing else, anywhere."""
    config = paged(scratch, host_memory="60KB", sub_group_size=1024)
    del config["optimizer"]
    engine, _, _, _ = zero.initialize(model=make_model(extra=(20_000,)), config=config)
    with torch.no_grad():
        for step in range(2):
            engine(*make_batch(step))
    plan = engine.plan.memory
    for section in (Section.GRADIENT, Section.STATE):
        assert plan.nvme_section_bytes(section) == 0
        assert plan.resident_section_bytes(Tier.HOST, section) == 0
        assert plan.resident_section_bytes(Tier.DEVICE, section) == 0
    assert plan.swap_file_bytes == plan.nvme_section_bytes(Section.PARAMETER) > 0
    assert plan.gradient_scratch_bytes == plan.collective_scratch_bytes == 0
    lines = {line["what"] for line in engine.memory_report()["lines"]}
    assert lines <= {
        "parameters resident",
        "slots",
        "swap file",
        "parameters unsharded (peak)",
        "setting parameters at the start (peak beyond a step's)",
    }
    assert engine.ledger.snapshot().nvme_read_bytes > 0
    engine.destroy()


@pytest.mark.nvme
def test_a_pool_takes_its_size_and_not_the_next_power_of_two(scratch: Path) -> None:
    """2.25 MB asked for is 2.25 MB held: nothing is rounded up, nothing is allocated twice."""
    config = paged(scratch, host_memory=2_250_000)
    before = process_bytes("VmRSS")["VmRSS"]
    engine, _, _, _ = zero.initialize(model=make_model(extra=(300_000,)), config=config)
    train(engine, 2)
    plan = engine.plan.memory
    held = sum(
        line["actual_bytes"] for line in engine.memory_report()["lines"] if line["tier"] == "host"
    )
    assert 0.8 * 2_250_000 < held <= plan.host_bytes <= 2_250_000
    after = process_bytes("VmRSS")["VmRSS"]
    assert after - before <= plan.host_bytes + plan.device_bytes + 16 * MIB
    engine.destroy()


@pytest.mark.nvme
def test_the_ledger_reports_each_step_of_an_engine(scratch: Path) -> None:
    engine, _, _, _ = zero.initialize(model=make_model(), config=paged(scratch, host_memory="60KB"))
    train(engine, 3)
    report = engine.ledger.report()
    assert [step.step for step in report.steps] == [1, 2, 3]
    snapshot = engine.ledger.snapshot()
    assert report.steps[-1].read_bytes > 0
    assert sum(step.read_bytes for step in report.steps) <= snapshot.nvme_read_bytes
    assert report.parameter_numel >= sum(p.numel() for p in engine.module.parameters())
    engine.destroy()


@pytest.mark.nvme
@pytest.mark.parametrize("tiers", [{"slot_count": 9}, {"slot_count": 6, "write_burst": 3}])
def test_slots_and_bursts_are_settings_that_change_no_bits(
    scratch: Path, tiers: dict[str, int]
) -> None:
    expected = trained(make_config(host_memory="1GB"))
    config = paged(scratch, host_memory="120KB", sub_group_size=128)
    config["tiers"].update(tiers)
    assert zero.plan_memory(make_model(), config).memory.slots.count == tiers["slot_count"]
    assert trained(config) == expected


def trained(config: dict[str, Any]) -> str:
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    train(engine, 3)
    result = digest(full_parameters(engine))
    engine.destroy()
    return result


@pytest.mark.nvme
def test_the_drive_is_measured_or_given(scratch: Path) -> None:
    config = paged(scratch, host_memory="60KB")
    config["tiers"]["measure_bandwidth"] = True
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    train(engine, 1)
    (step,) = engine.ledger.report().to_dicts()
    assert 0 < step["share_of_drive_limit"] < 1
    assert "(measured)" in engine.plan.to_dict()["drive"]
    engine.destroy()
    config["tiers"]["nvme"] = [{"path": str(scratch), "read_bandwidth": "2GB"}]
    rates = zero.plan_memory(make_model(), config, world_size=2).memory.request.rates
    assert rates == DriveRates(1e9, 1e9, "given")
    del config["tiers"]["nvme"], config["tiers"]["measure_bandwidth"]
    assert zero.plan_memory(make_model(), config).memory.request.rates is None


@pytest.mark.nvme
def test_a_refused_budget_names_the_node_number_that_works(scratch: Path) -> None:
    config = paged(scratch, host_memory="8KB")
    with pytest.raises(zero.PlanError, match=r"set tiers.host_memory to at least \d+") as caught:
        zero.plan_memory(make_model(), config, world_size=3)
    needed = int(str(caught.value).split("at least ")[1])
    assert needed % 3 == 0
    config["tiers"]["host_memory"] = needed
    assert zero.plan_memory(make_model(), config, world_size=3).memory.slots.count == 1
    config["tiers"]["host_memory"] = needed - 1
    with pytest.raises(zero.PlanError):
        zero.plan_memory(make_model(), config, world_size=3)


@pytest.mark.nvme
def test_a_segment_that_is_partly_resident_has_the_same_bits(scratch: Path) -> None:
    def outcome(config: dict[str, Any]) -> tuple[str, int]:
        engine, _, _, _ = zero.initialize(model=make_model(extra=(5000,)), config=config)
        tiers = {
            (segment, section): {
                group.tier(section) for group in engine.plan.memory.by_segment[segment]
            }
            for segment in range(len(engine.plan.memory.by_segment))
            for section in Section
        }
        split = sum(len(found) > 1 for found in tiers.values())
        train(engine, 3)
        result = digest(full_parameters(engine))
        engine.destroy()
        return result, split

    expected, _ = outcome(make_config(host_memory="1GB"))
    splits = 0
    for host in ("50KB", "80KB", "110KB", "150KB", "210KB"):
        got, split = outcome(paged(scratch, host_memory=host, sub_group_size=1024))
        assert got == expected
        splits += split
    assert splits >= 4
