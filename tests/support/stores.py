"""Stores on a given engine, an oracle for them, and a few steps of traffic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from aio_ops import Engine, Span
from estimators import (
    Budget,
    ElementType,
    MemoryPlan,
    PlacementRequest,
    SegmentSpec,
    SlotPlan,
    StateFormat,
    Tier,
    plan_placement,
)
from offload import AdamWScalars, Ledger, Store, StoreParts, load_kernels, update, write_parameters
from offload.kernels import Kernels

SIZES = {"first": (5000, 1), "second": (0, 777, 3), "third": (9001,)}


def make_request(
    element: ElementType = ElementType.FP32,
    *,
    parameter_tier: Tier = Tier.NVME,
    optimizer_tier: Tier = Tier.NVME,
    state_format: StateFormat = StateFormat.EXACT,
    sub_group_numel: int = 1024,
) -> PlacementRequest:
    """Return three segments of awkward sizes on one rank."""
    segments = tuple(
        SegmentSpec(
            unit=unit,
            unit_index=index,
            names=tuple(f"{unit}.{position}" for position in range(len(numels))),
            numels=numels,
            element=element,
            trainable=True,
            param_group=0,
        )
        for index, (unit, numels) in enumerate(SIZES.items())
    )
    return PlacementRequest(
        segments, 1, parameter_tier, optimizer_tier, state_format, sub_group_numel, 4096
    )


def make_plan(request: PlacementRequest, slots: int) -> MemoryPlan:
    """Return a plan with `slots` slots and nothing else on the host."""
    from estimators.records import staged_bytes

    largest = max(
        staged_bytes(request, each, min(request.sub_group_numel, each.layout(1).shard_numel))
        for each in request.segments
    )
    plan = plan_placement(request, Budget(2 * largest))
    return dataclasses.replace(plan, slots=SlotPlan(slots, largest))


def make_store(
    plan: MemoryPlan,
    engine: Engine,
    directory: Path,
    kernels: Kernels | None = None,
    *,
    burst: int = 0,
    verify: bool = False,
) -> Store:
    """Return an empty store."""
    return Store(
        plan,
        StoreParts(engine, directory, kernels or load_kernels("numpy"), Ledger(), burst, verify),
    )


def span_of(array: np.ndarray) -> Span:
    """Return the memory of an array."""
    return Span(array.ctypes.data, array.nbytes, array)


def scalars(step: int) -> list[AdamWScalars]:
    """Return the scalars of one step of the only parameter group."""
    return [
        AdamWScalars.from_hyperparameters(
            lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, step=step, grad_scale=0.5
        )
    ]


def train(store: Store, steps: int, micro_batches: int = 1) -> None:
    """Set parameters, then run steps on pseudo-random gradients; the same for every store."""
    generator = np.random.default_rng(5)
    segments = store.plan.request.segments
    lengths = [segment.layout(1).shard_numel for segment in segments]
    for index, length in enumerate(lengths):
        write_parameters(store, index, generator.standard_normal(length).astype(np.float32))
    for step in range(1, steps + 1):
        for _ in range(micro_batches):
            for index in reversed(range(len(lengths))):
                read_parameters(store, index)
                gradient = generator.standard_normal(lengths[index]).astype(np.float32)
                if segments[index].element is ElementType.BF16:
                    gradient = (gradient.view(np.uint32) >> 16).astype(np.uint16)
                store.add_gradient(index, span_of(gradient))
        update(store, scalars(step), lambda _: None)


def read_parameters(store: Store, index: int) -> np.ndarray:
    """Return the raw bytes of a parameter shard."""
    segment = store.plan.request.segments[index]
    raw = np.zeros(segment.layout(1).shard_numel * segment.element.size_bytes, np.uint8)
    store.read_parameters(index, span_of(raw))
    return raw


def contents(store: Store) -> list[bytes]:
    """Return the bits of every parameter shard."""
    return [
        read_parameters(store, index).tobytes() for index in range(len(store.plan.request.segments))
    ]
