"""An update that host and device share has the bits of either, whoever takes which sub-group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zero
import zero.planning
from estimators import Section, Tier
from tests.support.configs import make_config
from tests.support.observe import as_bits
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiny import make_batch, make_model

STEPS = 4
FORMATS = ("exact", "fp32", "bf16", "compact")


def open_simulated(seed: int) -> Any:
    return lambda _wanted: SimulatedDevice(seed)


def config_of(case: dict[str, Any], update_device: str) -> dict[str, Any]:
    config = make_config(
        parameters=case["parameters"],
        optimizer="cpu",
        dtype=case["dtype"],
        accumulation=case["accumulation"],
        clip=0.5,
        host_memory="1GB",
        sub_group_size=1024,
        state_format=case["state_format"],
    )
    if case["optimizer"] != "AdamW":
        config["optimizer"] = {
            "type": case["optimizer"],
            "params": {"lr": 1e-3, "weight_decay": 0.1},
        }
    config["tiers"]["update_device"] = update_device
    config["tiers"]["device_memory"] = case["device_memory"]
    return config


def train(
    case: dict[str, Any], update_device: str, host_counts: list[int | None], seed: int = 0
) -> dict[str, Any]:
    """Train beside a device whose copies are late; the host takes so many sub-groups a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.planning, "open_device", open_simulated(seed))
        torch.manual_seed(3)
        dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float32
        model = make_model(dtype=dtype)
        engine, _, _, _ = zero.initialize(model=model, config=config_of(case, update_device))
    store = engine._runtime.store
    assert (store.sharing is not None) is (update_device == "auto")
    for step in range(STEPS):
        if store.sharing is not None:
            store.sharing.host_count = host_counts[step % len(host_counts)]
        for micro in range(case["accumulation"]):
            engine.backward(engine(*make_batch(step * case["accumulation"] + micro)))
        engine.step()
    found: dict[str, Any] = {
        "groups": [row["updated_groups"] for row in engine.ledger.report().to_dicts()],
        "tiers": {
            section: {group.tier(section) for group in store.plan.sub_groups} for section in Section
        },
        "values": {name: as_bits(each.detach()).copy() for name, each in model.named_parameters()},
        "states": [
            as_bits(value).copy()
            for each in model.parameters()
            for key in ("exp_avg", "exp_avg_sq")
            if (value := zero.safe_get_full_optimizer_state(each, key)) is not None
        ],
    }
    engine.destroy()
    return found


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["states"]
    for name, values in expected["values"].items():
        assert (found["values"][name] == values).all(), name
    for ours, theirs in zip(found["states"], expected["states"], strict=True):
        assert (ours.view("u1") == theirs.view("u1")).all()


CASES = [
    {
        "dtype": "bf16",
        "state_format": state_format,
        "optimizer": optimizer,
        "parameters": parameters,
        "device_memory": device_memory,
        "accumulation": accumulation,
    }
    for state_format, optimizer, parameters, device_memory, accumulation in (
        ("exact", "AdamW", "none", "auto", 1),
        ("exact", "AdamW", "none", "100KB", 1),
        ("exact", "Lion", "cpu", "auto", 2),
        ("compact", "AdamW", "none", "auto", 1),
        ("compact", "Lion", "none", "100KB", 1),
        ("fp32", "AdamW", "none", "auto", 2),
        ("bf16", "AdamW", "cpu", "auto", 1),
    )
]
CASES += [{**CASES[0], "dtype": "fp32"}, {**CASES[2], "dtype": "fp32"}]
_ALONE: dict[int, dict[str, Any]] = {}


def alone(index: int) -> dict[str, Any]:
    """Return what the device alone makes of a case, which is what the host alone makes of it."""
    if index not in _ALONE:
        by_device = train(CASES[index], "device", [])
        by_host = train(CASES[index], "cpu", [])
        assert all(each["host"] == 0 < each["device"] for each in by_device["groups"])
        assert all(each["device"] == 0 < each["host"] for each in by_host["groups"])
        assert_same_bits(by_host, by_device)
        _ALONE[index] = by_device
    return _ALONE[index]


def case_name(index: int) -> str:
    return "-".join(str(each) for each in CASES[index].values())


@pytest.mark.parametrize("index", range(len(CASES)), ids=case_name)
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_split_has_the_bits_of_either_side(index: int, data: st.DataObject) -> None:
    expected = alone(index)
    total = sum(expected["groups"][0].values())
    assert total >= 8
    counts = data.draw(st.lists(st.integers(1, total - 1), min_size=1, max_size=STEPS))
    found = train(CASES[index], "auto", list(counts), data.draw(st.integers(0, 1000)))
    for step, groups in enumerate(found["groups"]):
        eligible = counts[step % len(counts)]
        assert groups["host"] <= eligible
        assert groups["host"] + groups["device"] == total
        assert groups["host"] > 0
        assert groups["device"] > 0
    assert_same_bits(found, expected)
    spare = CASES[index]["device_memory"] != "auto"
    assert (Tier.DEVICE in found["tiers"][Section.GRADIENT]) is spare


@pytest.mark.parametrize("index", [0, 3], ids=case_name)
def test_both_sides_take_what_they_have_room_for(index: int) -> None:
    expected = alone(index)
    found = train(CASES[index], "auto", [None])
    shared = [groups for groups in found["groups"] if groups["host"]]
    assert len(shared) >= 2  # the first, and those of the trial
    assert all(groups["device"] > 0 for groups in shared)
    assert_same_bits(found, expected)
