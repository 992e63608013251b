"""The ledger's report adds up, and its trace is one that Perfetto reads."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from aio_ops import Fault, SimulatedDisk
from estimators import Budget, DriveRates, Tier, plan_placement, step_traffic
from offload import PageError, Store, update
from tests.support.stores import make_plan, make_request, make_store, scalars, span_of, train

NOWHERE = Path("/nowhere")
RATES = DriveRates(2e9, 1e9, "given")


def paged_store(disk: SimulatedDisk | None = None) -> Store:
    plan = make_plan(dataclasses.replace(make_request(), rates=RATES), 3)
    return make_store(plan, disk or SimulatedDisk(0), NOWHERE)


def one_step(store: Store, number: int) -> None:
    for index, segment in enumerate(store.plan.request.segments):
        store.add_gradient(index, span_of(np.ones(segment.layout(1).shard_numel, np.float32)))
    update(store, scalars(number), lambda _: None)
    store.ledger.count_tokens(50)
    store.ledger.end_step()


def test_a_report_has_bytes_stalls_wear_and_hits_of_each_step() -> None:
    store = paged_store()
    train(store, steps=1)
    store.ledger.begin_step()
    one_step(store, 2)
    one_step(store, 3)
    first, second = store.ledger.report().to_dicts()
    numel = sum(segment.layout(1).shard_numel for segment in store.plan.request.segments)
    planned = step_traffic(store.plan, 1)
    written = planned.total_written_bytes
    for step in (first, second):
        assert step["nvme_bytes"]["nvme write state"] > 0
        assert sum(v for k, v in step["nvme_bytes"].items() if "write" in k) == written
        assert step["written_bytes_per_parameter"] == written / numel
        assert step["written_bytes_per_token"] == written / 50
        assert step["residency_hit_rate"] == 0
        read = sum(v for k, v in step["nvme_bytes"].items() if "read" in k)
        assert step["bytes_by_tier"] == {"device": 0, "host": 0, "nvme": read + written}
        assert set(step["stall_seconds"]) == {"read", "write", "slot", "compute"}
        assert sum(step["stall_seconds"].values()) == pytest.approx(step["seconds"])
        limit = read / 2e9 + written / 1e9
        assert step["share_of_drive_limit"] == pytest.approx(limit / step["seconds"])
        busy = limit / step["share_of_drive_limit_while_busy"]
        assert 0 < busy <= step["seconds"]
        assert step["activity_seconds"]["update"] > 0
    assert (first["step"], second["step"]) == (1, 2)
    store.close()


def test_what_rests_in_memory_is_a_hit() -> None:
    request = make_request(parameter_tier=Tier.HOST, optimizer_tier=Tier.HOST)
    store = make_store(plan_placement(request, Budget(1 << 22)), SimulatedDisk(0), NOWHERE)
    train(store, steps=1)
    store.ledger.end_step()
    (step,) = store.ledger.report().to_dicts()
    assert step["residency_hit_rate"] == 1.0
    assert step["bytes_by_tier"]["nvme"] == step["bytes_by_tier"]["device"] == 0
    numel = sum(segment.layout(1).shard_numel for segment in request.segments)
    # parameters are used for the read and the update, gradients arrive and are used, state once
    assert step["bytes_by_tier"]["host"] == numel * (4 * 2 + 4 * 2 + 8)
    assert step["share_of_drive_limit"] is None
    store.close()


def test_a_report_is_json_lines_and_a_table() -> None:
    store = paged_store()
    train(store, steps=1)
    store.ledger.begin_step()
    for number in (2, 3, 4):
        one_step(store, number)
    report = store.ledger.report()
    lines = report.json_lines().splitlines()
    assert [json.loads(line) for line in lines] == report.to_dicts()
    assert len(lines) == 3
    out = io.StringIO()
    Console(file=out, width=100).print(report.table())
    for text in ("median of 3", "residency hit rate", "1.00 GB/s"):
        assert text in out.getvalue()
    store.close()


def test_a_trace_has_every_transfer_and_every_wait() -> None:
    store = paged_store()
    train(store, steps=1)
    with pytest.raises(RuntimeError, match="start_trace"):
        store.ledger.trace()
    before = store.ledger.snapshot()
    store.ledger.start_trace()
    one_step(store, 2)
    trace = json.loads(json.dumps(store.ledger.trace("rank 0")))
    events = trace["traceEvents"]
    begun = [event for event in events if event["ph"] == "b"]
    ended = [event for event in events if event["ph"] == "e"]
    assert {event["id"] for event in begun} == {event["id"] for event in ended}
    groups = sum(group.extent is not None for group in store.plan.sub_groups)
    assert len([event for event in begun if event["cat"] == "nvme read"]) == groups
    assert len([event for event in begun if event["cat"] == "nvme write"]) == 2 * groups
    spans = [event for event in events if event["ph"] == "X"]
    updates = sum(event["dur"] for event in spans if event["name"] == "update") / 1e6
    moved = store.ledger.snapshot().minus(before)
    assert updates == pytest.approx(moved.seconds["update"])
    assert "step 1" in [event["name"] for event in spans]
    assert events[0]["args"]["name"] == "rank 0"
    store.close()


def test_a_trace_stops_at_its_limit_and_says_how_much_is_missing() -> None:
    store = paged_store()
    store.ledger.start_trace(limit=5)
    train(store, steps=1)
    trace = store.ledger.trace()
    assert len(trace["traceEvents"]) == 5 + 3
    assert trace["otherData"]["events left out"] > 0
    store.close()


def test_a_failed_transfer_is_not_in_flight_any_more() -> None:
    store = paged_store(SimulatedDisk(0, fault=Fault(2, "eio")))
    with pytest.raises(PageError):
        train(store, steps=1)
    store.close()
    assert store.ledger.snapshot().busy_seconds == store.ledger.snapshot().busy_seconds > 0
