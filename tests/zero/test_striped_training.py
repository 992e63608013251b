"""Training with the swap file on several drives: the same bits, and bytes on every one of them."""

from __future__ import annotations

import contextlib
import errno
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zero
from aio_ops import Fault, SimulatedDisk, SwapFile
from aio_ops.schedule_measurement import Traffic
from estimators import MemoryPlan
from offload import Ledger, PageError, Store, StoreParts, SwapDirectory, load_kernels
from tests.support.configs import make_config, slot_budget
from tests.support.observe import full_parameters
from tests.support.stores import contents, make_plan, make_request, train
from tests.support.tiny import make_batch, make_model
from zero.settings import NvmeSettings
from zero.swap_paths import check_paths, nvme_budget

EXTRA = (1, 7, 262144)
SUB_GROUP_SIZE = 65536
SAME_DEVICE = "ignore:.*lie on the same device:RuntimeWarning"  # tests have one drive for all


def drives(parent: Path, count: int = 2) -> list[Path]:
    directories = [parent / f"drive{index}" for index in range(count)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    return directories


def paging_config(nvme: list[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """Return a configuration with two slots and all the rest on NVMe."""
    common = {"dtype": dtype, "sub_group_size": SUB_GROUP_SIZE, "clip": 0.5}
    probe = make_config(**common, optimizer="cpu", host_memory="1GB")
    segments = zero.plan_memory(make_model(extra=EXTRA), probe).memory.request.segments
    budget = slot_budget(
        segments,
        slots=2,
        world_size=1,
        parameters="nvme",
        optimizer="nvme",
        sub_group_size=SUB_GROUP_SIZE,
    )
    config = make_config(**common, parameters="nvme", optimizer="nvme", host_memory=budget)
    config["tiers"]["nvme"] = nvme
    return config


def run(config: dict[str, Any], steps: int = 3) -> tuple[zero.ZeroEngine, dict[str, np.ndarray]]:
    """Train, and return the engine with what it holds."""
    engine, _, _, _ = zero.initialize(model=make_model(extra=EXTRA), config=config)
    for step in range(steps):
        engine.backward(engine(*make_batch(step, 0)))
        engine.step()
    return engine, full_parameters(engine)


def stored(file: SwapFile) -> np.ndarray:
    """Read a member past the engine."""
    with Path(f"/proc/self/fd/{file.fileno()}").open("rb") as raw:
        return np.frombuffer(raw.read(file.size_bytes), np.uint8)


@pytest.mark.nvme
@pytest.mark.filterwarnings(SAME_DEVICE)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_drives_give_the_bits_of_one_and_of_none(tmp_path: Path, dtype: str) -> None:
    first, second = drives(tmp_path)
    resident = make_config(dtype=dtype, clip=0.5, host_memory="1GB")
    engine, expected = run(resident)
    engine.destroy()
    one, on_one = run(paging_config([{"path": str(first)}], dtype))
    moved = one.ledger.snapshot()
    size_bytes = one.plan.memory.swap_file_bytes
    one.destroy()
    small = size_bytes // 5 // 4096 * 4096 + 7
    places = [{"path": str(first)}, {"path": str(second), "capacity": small}]
    two, on_two = run(paging_config(places, dtype))
    assert two.plan.memory.slots.count == 2
    assert two.plan.memory.swap_file_bytes == size_bytes
    assert two.plan.to_dict()["nvme_paths"] == [str(first), str(second)]
    assert two.ledger.snapshot().nvme_write_bytes == moved.nvme_write_bytes > size_bytes
    assert two.ledger.snapshot().nvme_read_bytes == moved.nvme_read_bytes > size_bytes
    file = two._runtime.store.swap_file
    assert [member.path.parent for member in file.members] == [first, second]
    assert sum(member.size_bytes for member in file.members) == size_bytes
    assert 0 < file.members[1].size_bytes <= small - 7  # whatever was measured
    for member in file.members:  # reserved space is zero until it is written
        assert np.count_nonzero(stored(member)) > member.size_bytes // 2
    two.destroy()
    for name, value in expected.items():
        assert np.array_equal(value, on_one[name])
        assert np.array_equal(value.view(np.uint8), on_two[name].view(np.uint8)), name
    assert [*first.iterdir(), *second.iterdir()] == []


def striped_store(plan: MemoryPlan, disk: SimulatedDisk) -> Store:
    """Return a store on two simulated drives, in small stripes and without measuring them."""
    create = functools.partial(disk.create_striped_file, unit_bytes=4096)
    disk.create_striped_file = create  # type: ignore[method-assign]
    places = (SwapDirectory(Path("/a"), weight=2), SwapDirectory(Path("/b"), weight=1))
    return Store(plan, StoreParts(disk, None, load_kernels("numpy"), Ledger(), stripes=places))


@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
def test_a_fault_on_any_drive_is_an_error_or_changes_nothing(kind: str) -> None:
    plan = make_plan(make_request(), slots=3)
    raised = set()

    def outcome(disk: SimulatedDisk) -> list[bytes]:
        store = striped_store(plan, disk)
        try:
            train(store, steps=2)
            return contents(store)
        finally:
            with contextlib.suppress(PageError):
                store.close()

    quiet = SimulatedDisk(1)
    expected = outcome(quiet)
    assert quiet.submitted > 60
    for at in range(0, quiet.submitted, 11):
        disk = SimulatedDisk(at, fault=Fault(at, kind))  # type: ignore[arg-type]
        with pytest.raises(
            PageError, match=r"from offset \d+ on of <swap file striped over /a, /b>"
        ):
            outcome(disk)
        raised.add(at)
    assert len(raised) > 5
    assert outcome(SimulatedDisk(9, fault=Fault(quiet.submitted, kind))) == expected  # type: ignore[arg-type]


@pytest.mark.nvme
@pytest.mark.filterwarnings(SAME_DEVICE)
def test_weights_of_the_configuration_are_taken_unmeasured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Traffic, "go", lambda *_: pytest.fail("it measures"))
    places = [
        {"path": str(each), "weight": weight}
        for each, weight in zip(drives(tmp_path), (3, 1), strict=True)
    ]
    engine, _ = run(paging_config(places, "fp32"), steps=1)
    shares = engine._runtime.store.swap_file.layout.member_bytes
    assert shares[0] == pytest.approx(0.75 * sum(shares), abs=4096)
    engine.destroy()
    del places[1]["weight"]
    with pytest.raises(zero.ConfigError, match=r"tiers\.nvme\[1\]\.weight: left out although"):
        zero.plan_memory(make_model(extra=EXTRA), paging_config(places, "fp32"))


def test_several_capacities_are_one_budget() -> None:
    entries = [NvmeSettings(Path("/a"), 10 * 4096 + 5), NvmeSettings(Path("/b"), 7 * 4096)]
    assert nvme_budget(entries, 1, 4096) == 17 * 4096
    assert nvme_budget(entries, 2, 4096) == 8 * 4096
    assert nvme_budget(entries[:1], 1, 4096) == 10 * 4096 + 5
    assert nvme_budget([*entries, NvmeSettings(Path("/c"))], 1, 4096) is None
    assert nvme_budget([], 1, 4096) is None


def test_every_directory_is_looked_at_before_anything_is_made(tmp_path: Path) -> None:
    first, second = drives(tmp_path)
    entries = [NvmeSettings(first, 1 << 20), NvmeSettings(second, 2 << 20)]
    assert check_paths(entries, 1 << 20, 2) == (
        SwapDirectory(first, 1 << 19),
        SwapDirectory(second, 1 << 20),
    )
    with pytest.raises(OSError, match=f"needs 4194304 bytes.*{second}: 2097152") as caught:
        check_paths(entries, 2 << 20, 2)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError, match="missing does not exist"):
        check_paths([entries[0], NvmeSettings(tmp_path / "missing")], 1, 1)
    [free] = {each.capacity_bytes // 2**30 for each in check_paths([NvmeSettings(first)] * 2, 1, 1)}
    assert free > 0  # no more than what is free


@pytest.mark.filterwarnings(SAME_DEVICE)
def test_capacities_that_cannot_hold_the_plan_are_refused(tmp_path: Path) -> None:
    places = [{"path": str(each), "capacity": 65536} for each in drives(tmp_path)]
    with pytest.raises(zero.PlanError, match=r"set the capacity in tiers\.nvme to at least"):
        zero.plan_memory(make_model(extra=EXTRA), paging_config(places, "fp32"))
