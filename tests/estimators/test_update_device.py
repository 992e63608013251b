"""Where an update is sooner over, from rates and from what must be copied."""

from __future__ import annotations

import pytest

from estimators import (
    ElementType,
    PlacementRequest,
    SegmentSpec,
    StateFormat,
    Tier,
    UpdateRates,
    device_is_sooner,
    update_seconds,
)

NUMEL = 1_000_000_000
H200 = UpdateRates(host_numel_per_s=4.4e9, in_bytes_per_s=50e9, out_bytes_per_s=50e9)


def request(
    state_format: StateFormat = StateFormat.EXACT,
    parameters: Tier = Tier.DEVICE,
    optimizer: Tier = Tier.HOST,
) -> PlacementRequest:
    spec = SegmentSpec("unit", 0, ("w",), (NUMEL,), ElementType.BF16, True, 0)  # noqa: FBT003
    return PlacementRequest(
        (spec,), 1, parameters, optimizer, state_format, NUMEL, 4096,
        device_is_host=False, update_on_device=True,
    )  # fmt: skip


def test_seconds_are_those_of_the_bytes_that_must_be_copied() -> None:
    on_host, on_device = update_seconds(request(), H200)
    assert on_host == pytest.approx(NUMEL / 4.4e9 + 2 * NUMEL / 50e9)
    assert on_device == pytest.approx(12 * NUMEL / 50e9)  # gradients and state in
    on_host, on_device = update_seconds(request(parameters=Tier.HOST), H200)
    assert on_host == pytest.approx(NUMEL / 4.4e9)
    assert on_device == pytest.approx(14 * NUMEL / 50e9)


PAGING = request(optimizer=Tier.NVME)


@pytest.mark.parametrize(
    ("asked", "rates", "device"),
    [
        (PAGING, H200, True),
        (request(StateFormat.COMPACT, optimizer=Tier.NVME), UpdateRates(2.7e9, 50e9, 50e9), True),
        (PAGING, UpdateRates(4.4e9, 12e9, 12e9), False),  # half the lanes, an older bus
        (PAGING, UpdateRates(4.4e9, 40e9, 40e9), True),  # the host alone would not be sooner
        (
            request(StateFormat.COMPACT, optimizer=Tier.NVME),
            UpdateRates(0.3e9, 12e9, 12e9),
            True,
        ),
        (PAGING, UpdateRates(4.4e9, 50e9, 12e9), False),  # slow on the way back
        (request(), H200, True),  # and shared, if that is worth it
        (request(), UpdateRates(4.4e9, 12e9, 12e9), True),  # the host takes most of it
        (request(), UpdateRates(20e9, 1e9, 4e9), True),
        (request(), UpdateRates(4.4e9, 50e9, 2e9), False),  # the device would be no help
        (request(), UpdateRates(4.4e9, 1e9, 50e9), True),  # copies that both need are as slow
        (request(optimizer=Tier.DEVICE), UpdateRates(1e12, 1e9, 1e9), True),  # nothing is copied
        (request(), None, True),
        (PAGING, None, True),
    ],
)
def test_the_sooner_one_updates(
    asked: PlacementRequest, rates: UpdateRates | None, *, device: bool
) -> None:
    assert device_is_sooner(asked, rates) is device
