"""A bit that flips on the disk is reported with record and extent before anything uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zero
from aio_ops import SimulatedDisk
from aio_ops.simulated import SimulatedFile
from estimators import ElementType, Section, StateFormat
from offload import (
    CorruptionError,
    PageError,
    PagerFailedError,
    PagerState,
    SlotState,
    Store,
    update,
)
from tests.support.configs import make_config
from tests.support.stores import (
    contents,
    make_plan,
    make_request,
    make_store,
    read_parameters,
    scalars,
    span_of,
    train,
)
from tests.support.tiny import make_batch, make_model

NOWHERE = Path("/nowhere")


def verified_store(seed: int = 0, burst: int = 0) -> tuple[Store, SimulatedFile]:
    plan = make_plan(make_request(), 3)
    store = make_store(plan, SimulatedDisk(seed), NOWHERE, burst=burst, verify=True)
    assert isinstance(store.swap_file, SimulatedFile)
    return store, store.swap_file


@pytest.mark.parametrize("burst", [0, 2])
def test_a_sound_disk_passes_and_is_hashed(burst: int) -> None:
    store, _ = verified_store(burst=burst)
    train(store, steps=3, micro_batches=2)
    plain = make_store(store.plan, SimulatedDisk(1), NOWHERE)
    train(plain, steps=3, micro_batches=2)
    assert contents(store) == contents(plain)
    assert store.ledger.snapshot().seconds["checksum"] > 0
    assert plain.ledger.snapshot().seconds["checksum"] == 0
    plain.close()
    store.close()


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("section", [Section.PARAMETER, Section.STATE])
def test_any_flipped_bit_is_found_at_page_in(section: Section, bit: int) -> None:
    store, file = verified_store()
    train(store, steps=1)
    rng = np.random.default_rng(bit)
    group = store.plan.sub_groups[int(rng.integers(len(store.plan.sub_groups)))]
    extent = group.extent
    assert extent is not None
    size = extent.bytes_of(frozenset({section}))[section]
    at = extent.offset + extent.offset_of(section) + int(rng.integers(size))
    file.contents[at] ^= 1 << bit
    pager = store.pager
    assert pager is not None
    with pytest.raises(CorruptionError) as caught:
        pager.page_in(extent, frozenset({Section.PARAMETER, Section.STATE}))
    message = str(caught.value)
    for text in (
        f"record {extent.name}: the {section.name.lower()} of Extent(offset={extent.offset}, ",
        f"{size} bytes at offset {extent.offset + extent.offset_of(section)} of /nowhere/",
    ):
        assert text in message
    assert all(slot.state is SlotState.FREE for slot in store.slots)  # nobody saw the bytes
    assert pager.state is PagerState.READY
    file.contents[at] ^= 1 << bit  # it was on the way, not on the drive: another try succeeds
    pager.release(pager.page_in(extent, frozenset({section})))
    store.close()


def test_a_flipped_bit_in_a_gradient_stops_the_update_before_it_is_used() -> None:
    store, file = verified_store()
    train(store, steps=1)
    before = contents(store)
    for index, segment in enumerate(store.plan.request.segments):
        store.add_gradient(index, span_of(np.ones(segment.layout(1).shard_numel, np.float32)))
    assert store.pager is not None
    store.pager.drain()
    first = store.plan.sub_groups[0].extent
    assert first is not None
    file.contents[first.offset + first.offset_of(Section.GRADIENT)] ^= 1
    with pytest.raises(CorruptionError, match=f"record {first.name.split('[')[0]}.*the gradient"):
        update(store, scalars(2), lambda _: None)
    with pytest.raises(PagerFailedError, match="sub-groups already moved: none"):
        read_parameters(store, 0)
    assert len(before) == 3
    store.close()


def test_without_verify_nothing_is_noticed() -> None:
    """The test of the test: the same flip goes through when nobody checks."""
    store = make_store(make_plan(make_request(), 3), SimulatedDisk(0), NOWHERE)
    train(store, steps=1)
    before = contents(store)
    first = store.plan.sub_groups[0].extent
    assert first is not None
    assert isinstance(store.swap_file, SimulatedFile)
    store.swap_file.contents[first.offset + first.offset_of(Section.PARAMETER)] ^= 1
    assert contents(store) != before
    store.close()


@pytest.mark.parametrize("element", [ElementType.BF16, ElementType.FP32])
def test_state_that_was_never_written_is_not_checked(element: ElementType) -> None:
    plan = make_plan(make_request(element, state_format=StateFormat.EXACT), 2)
    store = make_store(plan, SimulatedDisk(0), NOWHERE, verify=True)
    train(store, steps=1)
    assert store.ledger.snapshot().seconds["checksum"] > 0
    store.close()


def flip_on_disk(engine: zero.ZeroEngine, section: Section) -> str:
    """Flip one bit of the last sub-group on the real file and return the record's name."""
    store = engine._runtime.store
    file = store.swap_file
    assert file is not None
    group = next(
        each
        for each in reversed(store.plan.sub_groups)
        if each.extent is not None and each.extent.holds(section)
    )
    assert group.extent is not None
    at = group.extent.offset + group.extent.offset_of(section) + 1
    with Path(f"/proc/self/fd/{file.fileno()}").open("r+b", buffering=0) as swap:
        swap.seek(at)
        byte = swap.read(1)[0]
        swap.seek(at)
        swap.write(bytes([byte ^ 4]))
    return group.extent.name


@pytest.mark.nvme
@pytest.mark.parametrize("section", [Section.PARAMETER, Section.STATE])
def test_an_engine_reports_a_flip_on_a_real_disk(scratch: Path, section: Section) -> None:
    config: dict[str, Any] = make_config(
        parameters="nvme",
        optimizer="nvme",
        nvme_path=str(scratch),
        host_memory="40KB",
        sub_group_size=1024,
    )
    config["tiers"]["verify"] = True
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    record = flip_on_disk(engine, section)
    with pytest.raises(PageError, match="bits changed on the drive") as caught:
        engine.backward(engine(*make_batch(1)))
        engine.step()
    assert isinstance(caught.value, CorruptionError)
    assert f"record {record}:" in str(caught.value)
    engine.destroy()
