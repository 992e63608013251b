"""Parts of a sub-group that are updated at once have the bits of parts updated one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zero
import zero.planning
from estimators import (
    CODE_BLOCK_NUMEL,
    ElementType,
    StateFormat,
    SubGroup,
    UpdateRule,
    record_fields,
)
from offload import StateArrays
from offload.arrays import numpy_dtype
from offload.codes import RoundingKey
from offload.kernels_device import add_block_sums, block_count, load_device_kernels
from offload.launches import alike, prepare_launches
from offload.rules import AdamWScalars, LionScalars
from offload.update_parts import GroupParts, UpdatePart
from offload.update_pass import pieces_in
from tests.support.configs import make_config
from tests.support.device_kernels import to_array, to_tensor
from tests.support.kernels import assert_same_bits, make_kernels, ordinary
from tests.support.reference import round_to_bf16
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiny import make_batch, make_model

COMMON = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, "grad_scale": 0.5}
SCALARS = {
    UpdateRule.ADAMW: AdamWScalars.from_hyperparameters(step=3, eps=1e-8, **COMMON),
    UpdateRule.LION: LionScalars.from_hyperparameters(step=3, **COMMON),
}
WHERE = [
    ("torch", "cpu"),
    pytest.param(("torch", "cuda"), marks=pytest.mark.gpu),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]
NUMELS = (70_016, 3, 1, 512, 1024, 40, 2048, 33, 96, 100_000)
"""Of large and small parts: with and without something left of a tile, and of a block."""


def parts_of(numels: Sequence[int], *, apart: bool, lossy: bool) -> list[UpdatePart]:
    """Return parts at multiples of 64, each with a gradient of its own or all with one."""
    parts, start = [], 0
    for at, numel in enumerate(numels):
        key = RoundingKey.derive(5, 3, f"parameter {at}", 96) if lossy else None
        parts.append(UpdatePart(start, numel, at if apart else 0, 64 if apart else start, key))
        start += -(-numel // 64) * 64 + 64 * (at % 2)
    return parts


def end_of(parts: Sequence[UpdatePart]) -> int:
    return parts[-1].start + parts[-1].numel


def make_state(state_format: StateFormat, element: ElementType, rule: UpdateRule, numel: int):
    """Return a parameter and its state, as after some steps."""
    blocks = -(-numel // CODE_BLOCK_NUMEL)
    random = np.random.default_rng(1)
    views = {}
    for field, kind in record_fields(state_format, element, rule):
        dtype = numpy_dtype(kind)
        size = blocks if "base" in field.value else numel
        if dtype == np.float32:
            views[field] = np.abs(ordinary(size, 3)) * 1e-2
        elif "base" in field.value:
            views[field] = random.integers(700, 1000, size).astype(dtype)
        elif dtype.itemsize == 1 or "residual" in field.value:
            views[field] = random.integers(-100, 100, size).astype(dtype)
        else:
            views[field] = round_to_bf16(np.abs(ordinary(size, 4)) * 1e-2)
    master = ordinary(numel, 2)
    param = round_to_bf16(master) if element is ElementType.BF16 else master
    return param, StateArrays.of(views)


def moved_state(state: StateArrays, device: torch.device) -> StateArrays:
    found = {}
    for field in dataclasses.fields(state):
        array = getattr(state, field.name)
        if array is not None:
            is_base = "base" in field.name
            found[field.name] = (
                torch.from_numpy(array.copy()).to(device)
                if is_base
                else to_tensor(array.copy(), device)
            )
    return StateArrays(**found)


@pytest.mark.parametrize("apart", [False, True], ids=["one gradient", "gradients apart"])
@pytest.mark.parametrize("rule", SCALARS, ids=lambda rule: rule.value)
@pytest.mark.parametrize("state_format", StateFormat, ids=lambda each: each.value)
@pytest.mark.parametrize("where", WHERE, ids=lambda each: f"{each[0]}-{each[1]}")
def test_parts_at_once_have_the_bits_of_one_by_one(where, state_format, rule, apart) -> None:
    kind, device = where[0], torch.device(where[1])
    element = ElementType.FP32 if state_format is StateFormat.FP32 else ElementType.BF16
    lossy = state_format in (StateFormat.BF16, StateFormat.COMPACT)
    parts = parts_of(NUMELS, apart=apart, lossy=lossy)
    param, state = make_state(state_format, element, rule, end_of(parts))
    sizes = [64 + numel for numel in NUMELS] if apart else [end_of(parts)]
    grads = [ordinary(size, 20 + at) for at, size in enumerate(sizes)]
    if element is ElementType.BF16:
        grads = [round_to_bf16(each) for each in grads]
    there, moved = to_tensor(param.copy(), device), moved_state(state, device)
    on_device = [to_tensor(each, device) for each in grads]

    kernels = load_device_kernels(device, kind)
    assert kernels.name == kind
    known = on_device if apart else None
    (prepared,) = kernels.prepare([(parts, known)], device)
    assert bool(prepared.launches) == (kind == "triton")
    kernels.update_parts(there, on_device, moved, SCALARS[rule], prepared)

    untouched = param.copy()
    numpy_kernels = make_kernels("numpy", 1)
    for part in parts:
        numpy_kernels.update(
            param[part.inside],
            part.gradient(grads),
            state.part(part.inside),
            SCALARS[rule],
            part.key,
        )
    assert not np.array_equal(param, untouched)
    assert_same_bits(to_array(there), param, "param")
    for field in dataclasses.fields(state):
        ours = getattr(moved, field.name)
        if ours is not None:
            # Padding between parts is as it was.
            assert_same_bits(to_array(ours), getattr(state, field.name), field.name)


@given(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=60))
def test_every_part_is_in_one_launch_and_few_programs_are_idle(numels) -> None:
    launches = [list(each) for each in alike(numels)]
    assert sorted(at for each in launches for at in each) == list(range(len(numels)))
    assert len(launches) <= 9
    for each in launches:
        given_, needed = len(each) * numels[each[0]], sum(numels[at] for at in each)
        assert given_ <= 8 * needed + (1 << 22)


def test_a_launch_has_no_more_rows_than_a_device_takes() -> None:
    assert [len(each) for each in alike([64] * 150_000)] == [65_535, 65_535, 18_930]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_tells_where_parts_and_their_gradients_begin(dtype) -> None:
    parts = parts_of((128, 64, 200), apart=True, lossy=True)
    pool = torch.zeros(4096, dtype=dtype)
    grads = [pool[2048:2304], pool[:128], pool[512:896]]  # in any order
    (prepared,) = prepare_launches([(parts, grads)], torch.device("cpu"))
    (launch,) = prepared.launches
    by_start = {part.start: part for part in parts}
    assert len(launch.rows) == len(launch.numels) == 3
    for row, numel in zip(launch.rows.tolist(), launch.numels, strict=True):
        part = by_start[row[0]]
        address = grads[0].data_ptr() + row[1] * pool.element_size()
        assert address == part.gradient(grads).data_ptr()
        assert row[2] == numel == part.numel
        assert row[3:5] == [part.key.group_word, part.key.high]


def test_one_part_and_places_that_a_launch_cannot_have_go_one_by_one() -> None:
    device, pool = torch.device("cpu"), torch.zeros(4096)
    grads = [pool[:128], pool[128:256]]
    parts = parts_of((128, 64), apart=True, lossy=False)
    assert not prepare_launches([(parts[:1], grads)], device)[0].launches
    assert prepare_launches([(parts, grads)], device)[0].launches
    odd = [dataclasses.replace(parts[0], start=16), parts[1]]
    assert not prepare_launches([(odd, grads)], device)[0].launches
    odd = [dataclasses.replace(parts[0], offset=4), parts[1]]
    assert not prepare_launches([(odd, grads)], device)[0].launches
    shifted = [pool[1:129], pool[128:256]]
    assert not prepare_launches([(parts, shifted)], device)[0].launches
    mixed = [pool[:128], pool[128:256].half()]
    assert not prepare_launches([(parts, mixed)], device)[0].launches


def test_tables_of_several_sub_groups_are_parts_of_one() -> None:
    parts = parts_of((128, 64, 32), apart=False, lossy=False)
    prepared = prepare_launches(
        [(parts, None), (parts[:1], None), (parts[1:], None)], torch.device("cpu")
    )
    rows = [launch.rows for each in prepared for launch in each.launches]
    assert [len(each) for each in rows] == [3, 2]
    assert rows[0].untyped_storage().data_ptr() == rows[1].untyped_storage().data_ptr()
    assert rows[1][:, 2].tolist() == [64, 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", WHERE, ids=lambda each: f"{each[0]}-{each[1]}")
def test_squares_of_several_tensors_are_those_of_each(where, dtype) -> None:
    device = torch.device(where[1])
    kernels, host = load_device_kernels(device, where[0]), make_kernels("native", 1)
    sizes = [(1, 0), (70_001, 5), (4096, 4096), (100, 4000), (0, 7), (300_000, 0), (64, 1)]
    values = [
        torch.from_numpy(ordinary(numel, at)).to(dtype) for at, (numel, _) in enumerate(sizes)
    ]
    firsts = [first for _, first in sizes]
    sums = kernels.block_sums_of(
        [(each.to(device), first) for each, first in zip(values, firsts, strict=True)]
    )
    counts = [block_count(numel, first) for numel, first in sizes]
    assert sums.numel() == sum(counts)
    for each, first, blocks in zip(values, firsts, sums.split(counts), strict=True):
        expected = host.sum_squares(to_array(each), first)
        assert add_block_sums(blocks.cpu()) == expected
        assert expected > 0 or not each.numel()


@pytest.mark.gpu
def test_wrong_operands_of_parts_are_refused_before_anything_is_written() -> None:
    device = torch.device("cuda")
    kernels = load_device_kernels(device, "triton")
    parts = parts_of((128, 64), apart=False, lossy=False)
    param, moments = torch.zeros(192, device=device), torch.zeros(2, 192, device=device)
    state, scalars = StateArrays(moments[0], moments[1]), SCALARS[UpdateRule.ADAMW]
    (prepared,) = kernels.prepare([(parts, None)], device)
    assert isinstance(prepared, GroupParts)
    for grads, message in (
        ([torch.ones(128, device=device)], "lies beyond"),
        ([torch.ones(192, device=device).half()], "must hold torch.float32"),
        ([torch.ones(192)], "one device"),
        ([param], "share memory"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            kernels.update_parts(param, grads, state, scalars, prepared)
    assert not param.any()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=12),
    st.integers(0, 90),
    st.integers(1, 40),
)
def test_a_sub_group_is_given_the_gradients_that_it_has_elements_of(sizes, start, numel) -> None:
    pieces, end = [], 0
    for gap, size in sizes:
        pieces.append((end + gap, torch.zeros(size)))
        end += gap + size
    group = SubGroup(0, 0, start, start + numel, (), None)
    expected = [at for at, each in pieces if at < group.stop and at + len(each) > group.start]
    assert [at for at, _ in pieces_in(group, pieces)] == expected


def test_an_update_goes_through_each_gradient_about_once(monkeypatch) -> None:
    """However many sub-groups a unit has."""
    monkeypatch.setattr(zero.planning, "open_device", lambda _: SimulatedDevice(1))
    config = make_config(host_memory="1GB", dtype="bf16", sub_group_size=256)
    config["tiers"]["update_device"] = "device"
    model = make_model(dtype=torch.bfloat16, extra=(40,) * 200)
    engine, _, _, _ = zero.initialize(model=model, config=config)
    store, given_ = engine._runtime.store, []
    prepare = store.device_kernels.prepare

    def record(groups, device):
        given_.extend(len(grads) for _, grads in groups if grads is not None)
        return prepare(groups, device)

    monkeypatch.setattr(store.device_kernels, "prepare", record, raising=True)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    count = sum(1 for _ in model.parameters())
    assert len(given_) > 50
    assert sum(given_) <= count + len(given_)
    engine.destroy()
