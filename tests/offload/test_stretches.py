"""Gradients and parameters of whole segments move as those of each sub-group do, wherever it rests.

Placements are drawn: any mixture of tiers that a plan may have, parts cut anywhere, several ranks,
persistent, frozen and empty segments. Copies are late, as `simulated_device.py` has them.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aio_ops import SimulatedDisk
from estimators import (
    Budget,
    ElementType,
    MemoryPlan,
    PlacementRequest,
    Section,
    SegmentSpec,
    SlotPlan,
    StateFormat,
    SubGroup,
    Tier,
    plan_placement,
)
from estimators.pinning import Part
from estimators.placement import _build_sub_groups
from estimators.records import section_bytes
from estimators.summary import is_full
from offload import (
    Field,
    HostDevice,
    Ledger,
    Store,
    StoreParts,
    has_field,
    load_kernels,
    read_range,
    update,
    write_parameters,
)
from offload import store as store_module
from offload.arrays import torch_dtype
from offload.device import Device, DeviceMemory, Memory
from offload.residents import runs
from tests.support.simulated_device import SimulatedDevice
from tests.support.stores import scalars

LINE = 64
"""Elements by which parts are cut here."""
ELEMENTS = (ElementType.BF16, ElementType.FP16, ElementType.FP32)


@st.composite
def segments(draw: st.DrawFn, index: int) -> SegmentSpec:
    numels = draw(st.lists(st.integers(0, 700), min_size=1, max_size=4))
    trainable = draw(st.booleans()) or draw(st.booleans())
    return SegmentSpec(
        unit=f"unit{index}",
        unit_index=index,
        names=tuple(f"unit{index}.{position}" for position in range(len(numels))),
        numels=tuple(numels),
        element=draw(st.sampled_from(ELEMENTS)),
        trainable=trainable,
        param_group=0,
        gradient_element=draw(st.sampled_from((None, ElementType.FP32))),
        persistent=draw(st.integers(0, 3)) == 0,
    )


@st.composite
def plans(draw: st.DrawFn) -> MemoryPlan:
    """Return a plan in which each section of each sub-group rests anywhere it may."""
    specs = tuple(draw(segments(index)) for index in range(draw(st.integers(1, 3))))
    request = PlacementRequest(
        specs,
        draw(st.integers(1, 3)),
        Tier.NVME,
        Tier.NVME,
        draw(st.sampled_from((StateFormat.EXACT, StateFormat.FP32))),
        1 << 20,
        4096,
        device_is_host=False,
        update_on_device=True,
        replicates=draw(st.integers(0, 3)) == 0,
    )
    rows = []
    for index, spec in enumerate(specs):
        shard_numel = spec.layout(request.world_size).shard_numel
        lines = st.sets(st.integers(1, max(shard_numel // LINE - 1, 1)), max_size=6)
        inner = sorted(LINE * each for each in draw(lines) if LINE * each < shard_numel)
        bounds = [0, *inner, shard_numel] if shard_numel else []
        row = [Part(index, low, high) for low, high in itertools.pairwise(bounds)]
        for section in section_bytes(request, spec, 0):
            stays = is_full(request, section, index) or draw(st.integers(0, 2)) == 0
            for part in row:
                below = st.sampled_from((Tier.HOST, Tier.NVME))
                part.tiers[section] = Tier.DEVICE if stays else draw(below)
        rows.append(row)
    groups, swap_bytes = _build_sub_groups(request, rows)
    largest = max((each.extent.size_bytes for each in groups if each.extent is not None), default=0)
    slots = SlotPlan(draw(st.integers(1, 3)) if largest else 0, largest)
    return MemoryPlan(request, groups, slots, swap_bytes, 1 << 30)


def make_store(plan: MemoryPlan, device: Device, position: int) -> Store:
    disk, kernels = SimulatedDisk(0), load_kernels("numpy")
    parts = StoreParts(disk, Path("/nowhere"), kernels, Ledger(), device=device, position=position)
    return Store(plan, parts)


def raw(memory: Memory) -> bytes:
    if isinstance(memory, DeviceMemory):
        return memory.bytes.numpy().tobytes()
    return bytes(memory.view())


def used_bytes(plan: MemoryPlan, section: Section, segment: int) -> int:
    """Return what one use of a section moves of what rests in memory, sub-group by sub-group."""
    spec = plan.request.segments[segment]
    return sum(
        section_bytes(plan.request, spec, group.numel)[section]
        for group in plan.by_segment[segment]
        if not group.on_nvme(section)
    )


def counted(store: Store, section: Section) -> int:
    """Return what was counted as used where it rests."""
    found = store.ledger.snapshot().resident_bytes
    name = section.name.lower()
    return sum(size for what, size in found.items() if what.endswith(name))


@pytest.mark.parametrize("is_host", [False, True], ids=["beside", "host"])
@settings(max_examples=150, derandomize=True, database=None)
@given(plan=plans(), seed=st.integers(0, 1 << 30), count=st.integers(1, 3), data=st.data())
def test_gradients_of_a_segment_add_up_wherever_its_parts_rest(
    *, is_host: bool, plan: MemoryPlan, seed: int, count: int, data: st.DataObject
) -> None:
    device = HostDevice() if is_host else SimulatedDevice(seed)
    position = data.draw(st.integers(0, plan.request.world_size - 1))
    store = make_store(plan, device, position)
    generator = torch.Generator().manual_seed(seed)
    expected: dict[int, torch.Tensor] = {}
    under_way = []
    for _ in range(count):
        for index, spec in enumerate(plan.request.segments):
            shape = spec.layout(plan.request.world_size).shard_numel
            if not (spec.trainable and shape):
                continue
            new = torch.randn(shape, generator=generator).to(torch_dtype(spec.gradient))
            expected[index] = new + expected[index] if index in expected else new.clone()
            shard = new.clone()
            under_way.append((store.add_gradient(index, device.memory_of(shard)), shard))
            assert torch.equal(shard, expected[index])
    used = count * sum(used_bytes(plan, Section.GRADIENT, index) for index in expected)
    assert counted(store, Section.GRADIENT) == used
    for index, values in expected.items():
        target = device.empty(len(values), values.dtype)
        device.join(store.read_gradient(index, device.memory_of(target)))
        assert torch.equal(target, values)
    for fence, _ in under_way:
        device.join(fence)
    for index, values in expected.items():
        assert torch.equal(read_range(store, index, Field.GRADIENT, 0, len(values)), values)
    store.drop_gradients()
    store.close()


@pytest.mark.parametrize("is_host", [False, True], ids=["beside", "host"])
@settings(max_examples=150, derandomize=True, database=None)
@given(plan=plans(), seed=st.integers(0, 1 << 30), data=st.data())
def test_parameters_of_a_segment_are_those_of_its_parts(
    *, is_host: bool, plan: MemoryPlan, seed: int, data: st.DataObject
) -> None:
    device = HostDevice() if is_host else SimulatedDevice(seed)
    position = data.draw(st.integers(0, plan.request.world_size - 1))
    store = make_store(plan, device, position)
    generator = np.random.default_rng(seed)
    for index, spec in enumerate(plan.request.segments):
        shape = spec.layout(plan.request.world_size).shard_numel
        values = generator.standard_normal(shape).astype(np.float32)
        write_parameters(store, index, values)
    if store.pager is not None:
        store.pager.drain()
    for index, spec in enumerate(plan.request.segments):
        shape = spec.layout(plan.request.world_size).shard_numel
        target = device.empty(shape, torch_dtype(spec.element))
        device.join(store.read_parameters(index, device.memory_of(target)))
        assert torch.equal(target, read_range(store, index, Field.PARAMETER, 0, shape))
        for run, _ in runs(plan.by_segment[index], Section.PARAMETER, joins=True):
            if not run[0].on_nvme(Section.PARAMETER):
                whole = raw(store.residents.stretch(Section.PARAMETER, run))
                parts = [raw(store.residents.part(Section.PARAMETER, each)) for each in run]
                assert whole == b"".join(parts)
    used = sum(used_bytes(plan, Section.PARAMETER, each) for each in range(len(plan.by_segment)))
    assert counted(store, Section.PARAMETER) == used
    store.close()


@settings(max_examples=60, derandomize=True, database=None)
@given(plan=plans(), seed=st.integers(0, 1 << 30), micro_batches=st.integers(1, 2))
def test_an_update_gives_the_same_bits_wherever_its_parts_rest(
    plan: MemoryPlan, seed: int, micro_batches: int
) -> None:
    found = []
    for device in (HostDevice(), SimulatedDevice(seed)):
        store = make_store(plan, device, 0)
        generator = torch.Generator().manual_seed(seed)
        shapes = [
            each.layout(plan.request.world_size).shard_numel for each in plan.request.segments
        ]
        for index, shape in enumerate(shapes):
            write_parameters(store, index, torch.randn(shape, generator=generator).numpy())
        for step in (1, 2):
            for index, spec in enumerate(plan.request.segments):
                for _ in range(micro_batches if spec.trainable and shapes[index] else 0):
                    shard = torch.randn(shapes[index], generator=generator)
                    shard = shard.to(torch_dtype(spec.gradient))
                    device.join(store.add_gradient(index, device.memory_of(shard)))
            update(store, scalars(step), lambda _: None)
        values = []
        for index, shape in enumerate(shapes):
            target = device.empty(shape, torch_dtype(plan.request.segments[index].element))
            device.join(store.read_parameters(index, device.memory_of(target)))
            values.append(target.view(torch.uint8).numpy().tobytes())
            for field in (Field.MASTER, Field.EXP_AVG, Field.EXP_AVG_SQ):
                if has_field(store, index, field):
                    values.append(read_range(store, index, field, 0, shape).numpy().tobytes())
        found.append(values)
        store.close()
    assert found[0] == found[1]


def weight(numel: int, gradient: ElementType) -> SegmentSpec:
    """Return a segment of one parameter."""
    return SegmentSpec(
        unit="unit",
        unit_index=0,
        names=("unit.weight",),
        numels=(numel,),
        element=ElementType.BF16,
        trainable=True,
        param_group=0,
        gradient_element=gradient,
    )


@pytest.mark.parametrize("gradient", [ElementType.BF16, ElementType.FP32])
def test_gradients_on_the_host_are_added_within_a_bounded_scratch(
    gradient: ElementType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sub-groups of which nothing passes between host and device may be large."""
    monkeypatch.setattr(store_module, "_SCRATCH_BYTES", 1024)
    spec = weight(5000, gradient)
    request = PlacementRequest(
        (spec,), 1, Tier.HOST, Tier.HOST, StateFormat.EXACT, 1 << 20, 4096, device_is_host=False
    )
    device = _Counting(3)
    store = make_store(plan_placement(request, Budget(1 << 30)), device, 0)
    assert len(store.plan.sub_groups) == 1
    numel, dtype = spec.layout(1).shard_numel, torch_dtype(gradient)
    generator = torch.Generator().manual_seed(3)
    expected = torch.zeros(numel, dtype=dtype)
    for _ in range(3):
        shard = torch.randn(numel, generator=generator).to(dtype)
        expected = shard + expected
        device.join(store.add_gradient(0, device.memory_of(shard)))
    assert torch.equal(read_range(store, 0, Field.GRADIENT, 0, numel), expected)
    assert max(device.made) == 1024
    store.close()


class _Counting(SimulatedDevice):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.made: list[int] = []
        """Bytes of each tensor that was made on it."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.made.append(numel * dtype.itemsize)
        return super().empty(numel, dtype)


class _Counted(tuple[SubGroup, ...]):
    """Sub-groups that count how many of them were handed out in slices."""

    taken = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice):
            type(self).taken += len(found)
        return found


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("joins", [True, False])
def test_runs_of_many_sub_groups_take_each_once(
    *, tier: Tier, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Counted, "taken", 0)
    tiers = ((Section.GRADIENT, tier),)
    groups = _Counted(SubGroup(at, 0, at, at + 1, tiers, None) for at in range(500))
    found = list(runs(groups, Section.GRADIENT, joins=joins))
    assert [each for run, _ in found for each in run] == list(groups)
    assert found[-1][1] == 500
    assert (len(found) == 1) == (joins and tier is not Tier.NVME)
    assert _Counted.taken == 500


def test_gradients_on_the_device_are_found_without_a_look_at_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = weight(64 * LINE, ElementType.BF16)
    request = PlacementRequest(
        (spec,), 1, Tier.DEVICE, Tier.DEVICE, StateFormat.EXACT, LINE, 4096, device_is_host=False
    )
    request = dataclasses.replace(request, update_on_device=True)
    device = SimulatedDevice()
    store = make_store(plan_placement(request, Budget(0)), device, 0)
    assert len(store.plan.sub_groups) == 64
    looks = []
    plain = MemoryPlan.resident_parts

    def looked(plan: MemoryPlan, *what: Any) -> list[tuple[SubGroup, int]]:
        looks.append(what)
        return plain(plan, *what)

    monkeypatch.setattr(MemoryPlan, "resident_parts", looked)
    for _ in range(3):
        shard = torch.ones(64 * LINE, dtype=torch.bfloat16)
        device.join(store.add_gradient(0, device.memory_of(shard)))
    assert torch.equal(shard, torch.full_like(shard, 3.0))
    assert len(looks) == 1
    store.close()


def test_copies_of_both_directions_are_refused_before_any_of_them() -> None:
    device = SimulatedDevice()
    here, there = device.arena(64).carve(64), device.memory_of(device.zeros(64, torch.uint8))
    with pytest.raises(ValueError, match="have fences of their own"):
        device.copy_all([(here, there), (there, here)])
    with pytest.raises(ValueError, match="cannot copy 64 bytes to 32"):
        device.copy_all([(here, there), (here, there.sub(0, 32))])
    assert device.copied_bytes == {"in": 0, "out": 0}
    assert not there.bytes.any()


def test_the_fence_of_several_copies_is_behind_the_last() -> None:
    device = SimulatedDevice()
    sources = [device.arena(64).carve(64) for _ in range(3)]
    targets = [device.memory_of(device.zeros(64, torch.uint8)) for _ in range(3)]
    for number, source in enumerate(sources):
        source.view()[:] = bytes([number + 1]) * 64
    fence = device.copy_all(list(zip(sources, targets, strict=True)))
    assert all((each.bytes == 255).all() for each in targets)
    device.join(fence)
    assert [int(each.bytes.unique()) for each in targets] == [1, 2, 3]
    assert device.copied_bytes == {"in": 192, "out": 0}
