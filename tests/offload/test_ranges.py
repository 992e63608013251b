"""Ranges of single fields on a hostile disk: what is written is read, on every tier and format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aio_ops import Fault, SimulatedDisk
from aio_ops.simulated import SimulatedFile
from estimators import Budget, ElementType, StateFormat, Tier, plan_placement
from offload import (
    CorruptionError,
    Field,
    PageError,
    PagerFailedError,
    PagerState,
    ShardReader,
    Spool,
    Store,
    field_dtype,
    read_range,
    write_range,
)
from tests.support.stores import contents, make_plan, make_request, make_store, scalars, train

NOWHERE = Path("/nowhere")
FORMATS = [
    (ElementType.FP32, StateFormat.EXACT),
    (ElementType.BF16, StateFormat.EXACT),
    (ElementType.BF16, StateFormat.FP32),
    (ElementType.FP16, StateFormat.EXACT),
]
LENGTH = 5120  # of the first segment's shard: 5000 and 1 elements, padded


def resident(element: ElementType, state_format: StateFormat) -> Store:
    request = make_request(
        element, parameter_tier=Tier.DEVICE, optimizer_tier=Tier.DEVICE, state_format=state_format
    )
    return make_store(plan_placement(request, Budget(0)), SimulatedDisk(0), NOWHERE)


def everything(store: Store) -> dict[Field, torch.Tensor]:
    return {field: read_range(store, 0, field, 0, 5001) for field in Field}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("element", "state_format"), FORMATS)
def test_paged_ranges_equal_resident_ones(
    slots: int, element: ElementType, state_format: StateFormat
) -> None:
    disk = SimulatedDisk(slots)
    paged = make_store(
        make_plan(make_request(element, state_format=state_format), slots), disk, NOWHERE
    )
    stores = [resident(element, state_format), paged]
    for store in stores:
        if element is not ElementType.FP16:
            train(store, steps=1)
        generator = torch.Generator().manual_seed(3)
        for field, start, count in (
            (Field.PARAMETER, 0, 5001),
            (Field.MASTER, 17, 3000),
            (Field.EXP_AVG, 1000, 1100),
            (Field.GRADIENT, 4000, 1001),
            (Field.PARAMETER, 1023, 2),
            (Field.EXP_AVG_SQ, 0, 1),
            (Field.GRADIENT, 5, 5),
        ):
            values = torch.rand(count, generator=generator).to(field_dtype(store, 0, field))
            write_range(store, 0, field, start, values)
            assert torch.equal(read_range(store, 0, field, start, start + count), values)
    for field, values in everything(paged).items():
        assert torch.equal(values, everything(stores[0])[field]), field
    assert paged.ledger.snapshot().nvme_write_bytes > 0
    assert contents(paged) == contents(stores[0])
    for store in stores:
        store.close()


@pytest.mark.parametrize(("element", "state_format"), FORMATS[:3])
def test_a_reader_pages_each_sub_group_once(
    element: ElementType, state_format: StateFormat
) -> None:
    store = make_store(
        make_plan(make_request(element, state_format=state_format), 2), SimulatedDisk(1), NOWHERE
    )
    train(store, steps=1)
    whole = {field: read_range(store, 0, field, 0, LENGTH) for field in Field}
    before = store.ledger.snapshot()
    reader = ShardReader(store, 0, tuple(Field))
    for start in range(0, LENGTH, 100):
        stop = min(start + 100, LENGTH)
        for field, values in reader.read(start, stop).items():
            assert torch.equal(values, whole[field][start:stop])
    moved = store.ledger.snapshot().minus(before)
    stored = sum(
        size
        for group in store.plan.by_segment[0]
        if group.extent is not None
        for section, _, size in group.extent.sections
        if section.name != "GRADIENT"
    )
    assert moved.nvme_read_bytes == stored > 0
    store.close()


@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "torn"])
def test_every_failed_transfer_of_a_write_is_reported(kind: str) -> None:
    """A failed read leaves all as it was; after a failed write the pager refuses to work."""
    outcomes = set()
    for late in range(8):
        disk = SimulatedDisk(late)
        store = make_store(make_plan(make_request(), 2), disk, NOWHERE)
        train(store, steps=1)
        before = read_range(store, 0, Field.PARAMETER, 500, 2500)
        disk._fault = Fault(disk.submitted + late, kind)  # type: ignore[arg-type]
        values = torch.ones(2000)
        try:
            write_range(store, 0, Field.PARAMETER, 500, values)
        except PageError as error:
            assert "Extent" in str(error)
            if store.pager is not None and store.pager.state is PagerState.FAILED:
                outcomes.add("write")
                with pytest.raises(PagerFailedError):
                    read_range(store, 0, Field.PARAMETER, 0, 1)
            else:
                outcomes.add("read")
                write_range(store, 0, Field.PARAMETER, 500, before)
                assert torch.equal(read_range(store, 0, Field.PARAMETER, 500, 2500), before)
        else:
            outcomes.add("none")
            disk._fault = None  # it would hit a later transfer
            assert torch.equal(read_range(store, 0, Field.PARAMETER, 500, 2500), values)
        store.close()
    assert outcomes == {"read", "write", "none"}


def test_kept_gradients_are_updated_piece_by_piece() -> None:
    """Pieces give the bits that one array gives, wherever sub-groups cut them."""
    from offload import update

    whole, pieces = (
        make_store(
            plan_placement(
                make_request(parameter_tier=Tier.DEVICE, optimizer_tier=Tier.NVME), Budget(1 << 17)
            ),
            SimulatedDisk(2),
            NOWHERE,
        )
        for _ in range(2)
    )
    generator = np.random.default_rng(1)
    lengths = [segment.layout(1).shard_numel for segment in whole.plan.request.segments]
    for store in (whole, pieces):
        train(store, steps=1)
    gradients = [generator.standard_normal(length).astype(np.float32) for length in lengths]
    for index, gradient in enumerate(gradients):
        layout = whole.plan.request.segments[index].layout(1)
        inside = np.zeros(gradient.size, bool)
        for offset, numel in zip(layout.offsets, layout.numels, strict=True):
            inside[offset : offset + numel] = True
        gradient[~inside] = 0
        write_range(whole, index, Field.GRADIENT, 0, torch.from_numpy(gradient))
        pieces.note_gradient(index)
    update(whole, scalars(2), lambda _: None)
    cut = [
        [
            (offset, gradients[index][offset : offset + numel])
            for offset, numel in zip(
                whole.plan.request.segments[index].layout(1).offsets,
                whole.plan.request.segments[index].layout(1).numels,
                strict=True,
            )
        ]
        for index in range(len(gradients))
    ]
    update(pieces, scalars(2), lambda _: None, lambda index: cut[index])
    for index, parts in enumerate(cut):
        for offset, gradient in parts:
            for field in (Field.PARAMETER, Field.EXP_AVG, Field.EXP_AVG_SQ):
                ours, theirs = (
                    read_range(store, index, field, offset, offset + gradient.size)
                    for store in (pieces, whole)
                )
                assert torch.equal(ours, theirs), (index, field)
    assert pieces.ledger.snapshot().nvme_write_bytes > 0
    for store in (whole, pieces):
        store.close()


def test_a_spool_keeps_arrays_and_gives_space_back() -> None:
    disk = SimulatedDisk(4)
    spool = Spool(lambda: disk, NOWHERE)
    generator = torch.Generator().manual_seed(2)
    expected = [torch.rand(size, generator=generator) for size in (1, 5000, 0, 777)]
    arrays = [spool.put(values) for values in expected]
    assert disk.submitted > 0
    assert spool.resting_bytes == 4 * 5778
    for array, values in zip(arrays, expected, strict=True):
        assert torch.equal(array.read(), values)
    arrays[1].write(10, torch.ones(5))
    expected[1][10:15] = 1
    assert torch.equal(arrays[1].read(8, 20), expected[1][8:20])
    del array, arrays[0]
    arrays.clear()
    assert spool.resting_bytes == 0
    assert torch.equal(spool.put(expected[1]).read(), expected[1])


def test_a_spool_reports_failed_transfers() -> None:
    disk = SimulatedDisk(0, fault=Fault(1, "eio"))
    spool = Spool(lambda: disk, NOWHERE)
    array = spool.put(torch.ones(5000))
    with pytest.raises(OSError, match="simulated"):
        array.read()
    assert torch.equal(array.read(), torch.ones(5000))


def test_a_spool_reports_a_flipped_bit_and_hashes_what_is_overwritten() -> None:
    disk = SimulatedDisk(0)
    files: list[SimulatedFile] = []
    create = disk.create_file

    def remember(*arguments: Any, **options: Any) -> SimulatedFile:
        files.append(create(*arguments, **options))
        return files[-1]

    disk.create_file = remember  # type: ignore[method-assign]
    spool = Spool(lambda: disk, NOWHERE)
    expected = torch.arange(600_000, dtype=torch.float32)  # three blocks
    array = spool.put(expected, "norm.weight")
    array.write(262_000, torch.ones(1000))
    expected[262_000:263_000] = 1
    assert torch.equal(array.read(), expected)
    files[0].contents[4 * 599_000] ^= 4
    assert torch.equal(array.read(10, 500_000), expected[10:500_000])
    for act in (array.read, lambda: array.write(599_999, torch.ones(1))):
        with pytest.raises(
            CorruptionError, match=r"norm.weight: elements 524288 to 600000"
        ) as told:
            act()
        assert str(files[0].path) in str(told.value)
    array.write(0, expected)
    assert torch.equal(array.read(), expected)


def test_a_spool_reserves_little_more_than_it_holds() -> None:
    disk = SimulatedDisk(0)
    reserved: list[int] = []
    create = disk.create_file

    def remember(directory: Path, size_bytes: int, **options: Any) -> SimulatedFile:
        reserved.append(size_bytes)
        return create(directory, size_bytes, **options)

    disk.create_file = remember  # type: ignore[method-assign, assignment]
    spool = Spool(lambda: disk, NOWHERE)
    arrays = [spool.put(torch.ones(1000))]
    assert reserved == [1 << 20]
    arrays += [spool.put(torch.ones(200_000)) for _ in range(20)]
    assert sum(reserved) <= 3 * spool.resting_bytes
    assert len(reserved) <= 7
    assert all(torch.equal(array.read(), torch.ones(200_000)) for array in arrays[1:])
