""" "auto" budgets: from what the machine and its cgroups leave, with the stated margin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from estimators import PlanError
from estimators.placement import MOST_SUB_GROUPS
from tests.support.configs import make_config
from tests.support.tiny import make_model
from zero import machine

MIB = 1 << 20


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory whose files stand for /proc/meminfo and the cgroup file systems."""
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CGROUP_LIST", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_CGROUP_ROOT", tmp_path / "fs")
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 204800 kB\n")
    (tmp_path / "cgroup").write_text("")
    return tmp_path


def cgroup(sandbox: Path, name: str, files: dict[str, str]) -> None:
    folder = sandbox / "fs" / name
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text)


def test_without_a_cgroup_it_is_what_is_available_not_the_total(sandbox: Path) -> None:
    assert machine.available_host_bytes() == 200 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_cgroup_counts_less_its_file_pages(sandbox: Path, version: int) -> None:
    limit, usage, prefix, inactive = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory/", "total_inactive_file"),
        2: ("memory.max", "memory.current", "", "inactive_file"),
    }[version]
    (sandbox / "cgroup").write_text("4:memory:/job/part\n" if version == 1 else "0::/job/part\n")
    unlimited = {1: str(1 << 63), 2: "max"}[version]
    cgroup(sandbox, f"{prefix}job/part", {limit: unlimited, usage: str(30 * MIB)})
    outer = {limit: str(100 * MIB), usage: str(60 * MIB), "memory.stat": f"{inactive} {20 * MIB}\n"}
    for file, text in outer.items():
        (sandbox / "fs" / f"{prefix}job" / file).write_text(text)
    assert machine.available_host_bytes() == (100 - 60 + 20) * MIB


@pytest.mark.parametrize(("world_size", "available_kib"), [(1, 20_000), (2, 40_000), (3, 64_000)])
def test_auto_leaves_the_margin_and_the_device_beside_it(
    sandbox: Path, world_size: int, available_kib: int
) -> None:
    (sandbox / "meminfo").write_text(f"MemAvailable: {available_kib} kB\n")
    config = make_config(parameters="nvme", optimizer="nvme", nvme_path="/tmp", host_memory="auto")
    plan = zero.plan_memory(make_model(extra=(1_000_000,)), config, world_size)
    memory = plan.memory
    share = int(available_kib * 1024 * 0.8) // world_size
    assert memory.host_bytes + memory.device_bytes <= share
    assert memory.swap_file_bytes > 0  # the model does not fit in what is left
    assert memory.host_budget_bytes + memory.device_bytes > 0.9 * share
    assert f"80% of {available_kib * 1024} bytes available" in plan.host_budget_source
    assert f"each of {world_size} ranks" in plan.host_budget_source


def test_an_auto_budget_of_a_large_model_is_found_at_once(sandbox: Path) -> None:
    """The least budget would cut its state into 30 million sub-groups: none is planned for it."""
    (sandbox / "meminfo").write_text(f"MemAvailable: {24_000_000} kB\n")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(10_000, 10_000) for _ in range(20)))
    for parameters in ("none", "nvme"):
        config = make_config(
            parameters=parameters, optimizer="nvme", nvme_path="/tmp", host_memory="auto"
        )
        memory = zero.plan_memory(model, config).memory
        share = 24_000_000 * 1024 * 0.8
        assert 0.95 * share < memory.host_budget_bytes + memory.device_bytes <= share
        assert len(memory.sub_groups) < 10_000


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"host_memory": "12KB"}, r"cut into \d+ sub-groups.*tiers.host_memory to at least (\d+)"),
        (
            {"host_memory": "20GB", "sub_group_size": 64},
            r"sub_group_size 64 cuts .* into \d+ sub-groups.* set it to at least (\d+)",
        ),
    ],
)
def test_more_sub_groups_than_can_be_planned_are_refused(keys: dict[str, Any], reason: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(20)))
    keys = {"parameters": "none", "optimizer": "nvme", "nvme_path": "/tmp", **keys}
    with pytest.raises(PlanError, match=reason) as caught:
        zero.plan_memory(model, make_config(**keys))
    found = re.search(reason, str(caught.value))
    assert found is not None
    keys["sub_group_size" if "sub_group_size" in keys else "host_memory"] = int(found[1])
    memory = zero.plan_memory(model, make_config(**keys)).memory
    assert 1000 < len(memory.sub_groups) <= MOST_SUB_GROUPS


def test_everything_stays_in_memory_if_it_fits(sandbox: Path) -> None:
    config = make_config(parameters="nvme", optimizer="nvme", nvme_path="/tmp", host_memory="auto")
    memory = zero.plan_memory(make_model(), config).memory
    assert memory.swap_file_bytes == 0
    assert memory.host_bytes + memory.device_bytes <= 0.8 * 200 * MIB


def test_an_auto_budget_that_is_too_small_is_refused_with_numbers(sandbox: Path) -> None:
    (sandbox / "meminfo").write_text("MemAvailable: 40 kB\n")
    config = make_config(parameters="nvme", optimizer="nvme", nvme_path="/tmp", host_memory="auto")
    with pytest.raises(PlanError, match=r'host_memory "auto" is 80% of .* at least \d+ are'):
        zero.plan_memory(make_model(), config)


def test_a_plan_beyond_the_machine_is_a_warning_with_the_most_that_works(sandbox: Path) -> None:
    (sandbox / "meminfo").write_text("MemAvailable: 2500 kB\n")
    config = make_config(parameters="nvme", optimizer="nvme", nvme_path="/tmp", host_memory="3MB")
    model = make_model(extra=(300_000,))
    with pytest.warns(RuntimeWarning, match="but 2560000 are available") as caught:
        zero.plan_memory(model, config)
    message = str(caught[0].message)
    if "at most" in message:
        config["tiers"]["host_memory"] = int(message.rsplit("at most ", 1)[1])
        zero.plan_memory(model, config)
    else:
        assert "fewer ranks" in message


@pytest.mark.parametrize("capacity", [None, "auto"])
def test_a_capacity_of_auto_is_all_that_is_free(capacity: Any) -> None:
    config = make_config(parameters="nvme", optimizer="nvme", host_memory="60KB", nvme_path=None)
    config["tiers"]["nvme"] = [{"path": "/tmp", "capacity": capacity}]
    assert zero.plan_memory(make_model(), config).memory.swap_file_bytes > 0
    config["tiers"]["nvme"][0]["capacity"] = "100KB"
    with pytest.raises(PlanError, match=r"set the capacity in tiers.nvme to at least \d+"):
        zero.plan_memory(make_model(), config)


def test_several_ranks_pay_for_what_their_collectives_copy() -> None:
    config = make_config(host_memory="1GB")
    alone, two = (zero.plan_memory(make_model(), config, size).memory for size in (1, 2))
    assert alone.collective_scratch_bytes == 0
    largest = max(
        segment.layout(2).padded_numel * segment.element.size_bytes
        for segment in two.request.segments
    )
    assert two.collective_scratch_bytes == 2 * largest
    rows = {row.what: row.size_bytes for row in two.rows() if row.tier.value == "device"}
    assert rows["collectives (peak)"] == 2 * largest
    assert sum(rows.values()) == two.device_bytes
