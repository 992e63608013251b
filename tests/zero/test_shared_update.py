"""An update that host and device share has the bits of either, whoever takes which sub-group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zero
import zero.planning
from estimators import Section, ShareTrial, SubGroup, Tier, UpdateRates, minimum_host_bytes
from estimators.records import host_staging_bytes
from offload import PagerFailedError, _kernels
from offload.step_shared import host_may_take
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


@pytest.mark.parametrize("index", [0, 1, 2], ids=case_name)
def test_the_ledger_counts_what_a_split_copies(index: int) -> None:
    """The host needs gradient and parameter of its sub-groups, the device the state of its own."""
    copied = []
    for host_count in (3, 5):
        with shared_engine(CASES[index]) as engine:
            store = engine._runtime.store
            store.sharing.host_count = host_count
            for micro in range(CASES[index]["accumulation"]):
                engine.backward(engine(*make_batch(micro)))
            before = dict(store.device.copied_bytes)
            engine.step()
            found = {way: store.device.copied_bytes[way] - before[way] for way in before}
            groups = store.plan.sub_groups
            eligible = [group for group in groups if host_may_take(group)]
            mine = {group.index for group in eligible[-host_count:]}
            expected = {"in": 0, "out": 0}
            for group in groups:
                for section, whole in store.section_bytes(group).items():
                    size = whole
                    if section is Section.GRADIENT and CASES[index]["device_memory"] != "auto":
                        size = 2 * own_numel(engine, group)  # kept by parameters: no padding
                    on_device = group.tier(section) is Tier.DEVICE
                    is_changed = section is not Section.GRADIENT
                    if group.index in mine:
                        expected["out"] += size * on_device
                        expected["in"] += size * (on_device and is_changed)
                    else:
                        expected["in"] += size * (not on_device)
                        expected["out"] += size * (not on_device and is_changed)
            assert found == expected
            assert engine.ledger.report().to_dicts()[-1]["updated_groups"] == {
                "device": len(groups) - host_count,
                "host": host_count,
            }
            copied.append(found)
    assert copied[0] != copied[1]


@pytest.mark.parametrize("side", ["wait", "done"])
def test_a_failure_on_either_side_ends_the_engine_and_leaves_no_thread(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingQueue(_kernels.KernelQueue):
        def wait(self, ticket: int, most_seconds: float) -> bool:
            if ticket >= 3:
                raise RuntimeError("no memory for this kernel")
            return super().wait(ticket, most_seconds)

    def refuse(*_args: Any) -> None:
        raise RuntimeError("no memory for this kernel")

    before = threads()
    with shared_engine(CASES[1]) as engine:
        engine.backward(engine(*make_batch(0)))
        engine._runtime.store.sharing.host_count = 6
        if side == "wait":
            monkeypatch.setattr(_kernels, "KernelQueue", FailingQueue)
        else:
            monkeypatch.setattr(engine._runtime.store.device_kernels, "update", refuse)
        running = threads()
        with pytest.raises(RuntimeError, match="no memory for this kernel"):
            engine.step()
        assert only_those_of(running)
        with pytest.raises(PagerFailedError, match="an optimizer step failed midway"):
            engine(*make_batch(1))
            engine.step()
    assert only_those_of(before)


def test_no_thread_outlives_a_step_and_the_time_line_shows_the_kernels() -> None:
    before = threads()
    with shared_engine(CASES[0]) as engine:
        engine._runtime.store.sharing.host_count = 4
        engine.ledger.start_trace()
        engine.backward(engine(*make_batch(0)))
        running = threads()
        engine.step()
        assert only_those_of(running)
        trace: Any = engine.ledger.trace()
    assert only_those_of(before)
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    beside = [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and names[event["tid"]] == "kernels on the host"
    ]
    assert len(beside) == 4
    assert all(event["name"].startswith("update sub-group") for event in beside)
    assert all(event["dur"] > 0 for event in beside)


def test_sharing_gives_way_to_a_budget_without_room_for_its_buffers() -> None:
    with shared_engine(CASES[0]) as engine:
        plan = engine.plan.memory
        assert plan.staging_bytes == engine._runtime.store.staging.size_bytes > 0
        assert plan.staging_bytes <= host_staging_bytes(plan.request)
        needed = minimum_host_bytes(plan.request)
    for spare, shares in ((0, True), (-1, False)):
        config = config_of(CASES[0], "auto")
        config["tiers"]["host_memory"] = needed + spare
        with shared_engine(CASES[0], config) as engine:
            assert engine.plan.memory.request.shares_update is shares
            assert (engine._runtime.store.sharing is not None) is shares
            assert (engine.plan.memory.staging_bytes > 0) is shares
            engine.backward(engine(*make_batch(0)))
            engine.step()
            assert engine.ledger.report().to_dicts()[-1]["updated_groups"]["device"] > 0


@pytest.mark.parametrize("shares", [True, False])
def test_what_took_less_in_the_trial_is_kept(shares: bool) -> None:  # noqa: FBT001
    """Seconds as of a machine whose link is slow, or whose host is."""
    with shared_engine(CASES[0]) as engine:
        store = engine._runtime.store
        trial = store.sharing.trial
        while trial.is_open:
            trial.note(100.0 if trial.shares is shares else 200.0, shared=trial.shares)
            if len(trial._alone) == 2 and not trial.shares:
                break  # the last one of the device alone is an update of the engine
        sharing = store.sharing
        sharing.trial = WrittenTrial(trial, alone_seconds=200.0 if shares else 100.0)
        for step in range(12):
            engine.backward(engine(*make_batch(step)))
            engine.step()
        groups = [row["updated_groups"] for row in engine.ledger.report().to_dicts()]
        assert groups[0]["host"] == 0
        assert all((each["host"] > 0) is shares for each in groups[1:])
        assert (store.staging is not None) is shares  # nothing is shared any more


class WrittenTrial(ShareTrial):
    """A trial whose next update, of the device alone, takes as long as is said."""

    def __init__(self, trial: ShareTrial, alone_seconds: float) -> None:
        super().__init__()
        self.__dict__.update(trial.__dict__)
        self._alone_seconds = alone_seconds

    def note(self, seconds: float, *, shared: bool) -> None:
        super().note(seconds if shared else self._alone_seconds, shared=shared)


def test_hosts_and_devices_of_one_memory_need_no_buffers() -> None:
    with shared_engine(CASES[2]) as engine:
        assert engine.plan.memory.request.shares_update
        assert engine.plan.memory.staging_bytes == 0
        assert engine._runtime.store.staging is None


@pytest.mark.parametrize(
    ("changes", "optimizer", "ranks", "shares"),
    [
        ({}, "cpu", 1, True),
        ({"update_device": "device"}, "cpu", 1, False),
        ({"update_device": "cpu"}, "cpu", 1, False),
        ({"durable": {"name": "run", "every_steps": 5}}, "cpu", 1, False),
        ({}, "cpu", 2, False),
        ({}, "none", 1, False),
        ({}, "nvme", 1, False),
    ],
)
def test_only_auto_at_one_rank_with_state_on_the_host_is_shared(
    changes: dict[str, Any], optimizer: str, ranks: int, shares: bool, scratch: Path,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(zero.planning, "open_device", open_simulated(0))
    config = make_config(optimizer=optimizer, nvme_path=str(scratch), host_memory="1GB")
    config["tiers"].update(changes)
    if "durable" in changes:
        config["tiers"]["nvme"] = [{"path": str(scratch)}]
    plan = zero.plan_memory(make_model(), config, ranks).memory
    assert plan.request.shares_update is shares


@pytest.mark.parametrize("link", [12e9, 1e9, 1e8])
def test_a_slow_link_is_shared_not_left_to_the_host(
    link: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = UpdateRates(host_numel_per_s=4e9, in_bytes_per_s=link, out_bytes_per_s=link)
    monkeypatch.setattr(zero.planning, "measure_update", lambda *_: rates)
    with shared_engine(CASES[0]) as engine:
        assert engine._runtime.store.sharing is not None
        engine.backward(engine(*make_batch(0)))
        engine.step()
        assert min(engine.ledger.report().to_dicts()[-1]["updated_groups"].values()) > 0


def own_numel(engine: zero.ZeroEngine, group: SubGroup) -> int:
    """Return how many elements of a sub-group are of parameters, not padding."""
    layout = engine._runtime.segments[group.segment].layout
    bounds = zip(layout.offsets, layout.numels, strict=True)
    ends = [(max(start, group.start), min(start + numel, group.stop)) for start, numel in bounds]
    return sum(stop - start for start, stop in ends if start < stop)


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))  # noqa: PTH208


def only_those_of(before: set[str]) -> bool:
    """Tell whether no other thread is left; one that was joined is listed a moment longer."""
    for _ in range(100_000):
        if threads() <= before:
            return True
        os.sched_yield()
    return False


@contextlib.contextmanager
def shared_engine(
    case: dict[str, Any], config: dict[str, Any] | None = None
) -> Iterator[zero.ZeroEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.planning, "open_device", open_simulated(0))
        dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float32
        engine, _, _, _ = zero.initialize(
            model=make_model(dtype=dtype), config=config or config_of(case, "auto")
        )
    try:
        yield engine
    finally:
        engine.destroy()
