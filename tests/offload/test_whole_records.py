"""Records of whole tensors on a hostile disk: never stale, never torn, never changed unnoticed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from aio_ops import SimulatedDisk
from aio_ops.simulated import Fault, SimulatedFile
from estimators import MemoryPlan, WholeTensors
from estimators.summary import WholePlacement
from offload import CorruptionError, Ledger, PageError
from offload.copies import Copies
from offload.whole_records import WholeRecords, record_bytes
from tests.support.stores import make_plan, make_request

SIZE = 8192
NAMES = ("a", "b", "c", "d", "e")


def plan_of(resident: int, paged: int, copies: int = 1) -> MemoryPlan:
    needs = WholeTensors(0, SIZE, SIZE * (resident + paged))
    plan = make_plan(dataclasses.replace(make_request(), whole=needs), 3)
    placement = WholePlacement(SIZE * resident, 4096, copies * SIZE * paged)
    return dataclasses.replace(plan, whole=placement)


def made(
    disk: SimulatedDisk, *, resident: int = 1, verify: bool = False, copies: Copies | None = None
) -> tuple[WholeRecords, SimulatedFile, Ledger]:
    plan = plan_of(resident, len(NAMES) - resident, 1 if copies is None else 2)
    file = disk.create_file(Path("/nowhere"), 4096 + plan.whole.area_bytes)
    ledger = Ledger()
    records = WholeRecords(plan, (disk, file), ledger, verify=verify, copies=copies)
    for name in NAMES:
        records.admit(name, SIZE)
    return records, file, ledger


def some(random: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return tensors of other shapes and types each time, an empty one and a scalar among them."""
    rows = int(random.integers(0, 30))
    return {
        "step": torch.tensor(float(random.integers(100))),
        "rows": torch.from_numpy(random.normal(size=(rows, 7)).astype(np.float32)),
        "half": torch.from_numpy(random.normal(size=int(random.integers(1, 50)))).bfloat16(),
    }


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_durable", [False, True])
def test_what_is_taken_is_what_was_put(seed, is_durable) -> None:
    random = np.random.default_rng(seed)
    copies = Copies() if is_durable else None
    resident = 0 if is_durable else 1
    records, _, ledger = made(
        SimulatedDisk(seed), resident=resident, verify=bool(seed % 2), copies=copies
    )
    wanted: dict[str, dict[str, torch.Tensor]] = {}
    for _ in range(60):
        name, ahead = random.choice(NAMES, 2)
        records.start_reading(name)
        found = records.take(name)
        assert found.keys() == wanted.get(name, {}).keys()
        for key, values in found.items():
            assert values.dtype == wanted[name][key].dtype
            assert torch.equal(values, wanted[name][key])
        records.start_reading(ahead)
        if found and random.random() < 0.5:  # in place, as an optimizer does it
            found["half"].add_(1.0)
            changed = found
        else:
            changed = some(random)
        wanted[name] = {key: values.clone() for key, values in changed.items()}
        records.put(name, changed)
        if copies is not None and random.random() < 0.2:
            records.settle()
            copies.commit()
    records.settle()
    moved = ledger.snapshot()
    assert moved.bytes_by_class["nvme write state"] > 0
    assert moved.bytes_by_class["nvme write state"] % SIZE == 0
    assert records.paged_bytes == SIZE * (len(NAMES) - resident)
    if copies is not None:
        assert records.restore({each.place: each for each in copies.entries()})[1] == ""
    records.close()


def test_tensors_that_exchange_their_places_keep_their_values() -> None:
    records, _, ledger = made(SimulatedDisk(0), resident=0)
    first, second = torch.arange(49.0).view(7, 7), torch.ones(7, 7)
    records.put("a", {"new": first, "old": second})
    for _ in range(3):
        found = records.take("a")
        assert torch.equal(found["new"], first)
        assert torch.equal(found["old"], second)
        records.put("a", {"new": found["old"], "old": found["new"].T})
        first, second = second.clone(), first.T.clone()
    assert ledger.snapshot().nvme_write_bytes > 0


def test_a_write_goes_on_while_the_next_record_is_read() -> None:
    records, _, ledger = made(SimulatedDisk(0), resident=0)
    for name in NAMES:
        records.put(name, {"m": torch.full((9,), float(ord(name)))})
    records.settle()
    written = ledger.snapshot().nvme_write_bytes
    assert written == SIZE * len(NAMES)
    for position, name in enumerate(NAMES):
        found = records.take(name)
        assert (found["m"] == ord(name)).all()
        records.put(name, found)
        records.start_reading(NAMES[(position + 1) % len(NAMES)])
        # Only the writes before the last one are over.
        assert ledger.snapshot().nvme_write_bytes == written + SIZE * position
    records.settle()


def test_a_flipped_bit_is_found() -> None:
    records, file, _ = made(SimulatedDisk(0), resident=0, verify=True)
    records.put("b", some(np.random.default_rng(0)))
    records.settle()
    file.contents[4096 + SIZE + 70] ^= 4
    with pytest.raises(CorruptionError, match="the state of b, 8192 bytes at 12288"):
        records.take("b")


@pytest.mark.parametrize("kind", ["eio", "enospc", "short"])
def test_a_failed_transfer_names_its_record(kind: str) -> None:
    records, _, _ = made(SimulatedDisk(0, fault=Fault(1, kind)), resident=0)
    records.put("a", some(np.random.default_rng(0)))
    records.put("c", some(np.random.default_rng(1)))
    with pytest.raises(PageError, match="the write of the state of c, 8192 bytes, failed"):
        records.settle()


def test_what_was_not_planned_is_refused() -> None:
    records, _, _ = made(SimulatedDisk(0))
    large = {"m": torch.zeros(3000)}
    assert record_bytes(large) > SIZE
    for name in NAMES[:2]:  # in memory, and on NVMe
        with pytest.raises(RuntimeError, match=rf"keeps 12032 bytes of {name}, .* at most 8192"):
            records.put(name, large)
    with pytest.raises(RuntimeError, match=r"the record of f takes 8192 bytes, .* 0 left"):
        records.admit("f", SIZE)
