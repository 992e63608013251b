"""Measure what decides where updates run: the host's kernel, and the link to the device."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from estimators import ElementType, StateFormat, UpdateRates, record_layout
from offload.arrays import array_at, tensor_span
from offload.codes import RoundingKey
from offload.device import CudaDevice, Device
from offload.kernels import load_kernels
from offload.operands import StateArrays
from offload.rules import AdamWScalars

_NUMEL = 16 << 20
"""Enough that caches do not hold them: 224 MiB in `exact`."""
_COPIED_BYTES = 64 << 20
_ROUNDS = 3


def measure_update(
    device: Device, state_format: StateFormat, thread_count: int
) -> UpdateRates | None:
    """Return the rates, measured once a process in some tenths of a second; None without a GPU."""
    if not isinstance(device, CudaDevice):
        return None
    return _measure(device.torch_device.index, state_format, thread_count)


@functools.cache
def _measure(index: int, state_format: StateFormat, thread_count: int) -> UpdateRates:
    device = CudaDevice(index)
    into, out = link_rates(device)
    return UpdateRates(host_rate(state_format, thread_count), into, out)


def host_rate(state_format: StateFormat, thread_count: int, numel: int = _NUMEL) -> float:
    """Return how many bf16 parameters a second AdamW updates on the host."""
    kernels = load_kernels(thread_count=thread_count)
    layout = record_layout(state_format, ElementType.BF16, numel)
    memory = torch.zeros(layout.size_bytes + 4 * numel, dtype=torch.uint8, device="cpu")
    scalars = AdamWScalars.from_hyperparameters(
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=1, grad_scale=1.0
    )
    span = tensor_span(memory)
    ends = layout.size_bytes, layout.size_bytes + 2 * numel
    parameter, gradient = (
        array_at(span.sub(start, 2 * numel), ElementType.BF16, numel) for start in ends
    )
    state = StateArrays.of(
        {
            each.field: array_at(
                span.sub(each.offset_bytes, each.size_bytes), each.element, each.numel
            )
            for each in layout.fields
        }
    )
    key = RoundingKey.derive(0, 1, "", 0) if state_format.is_lossy else None
    return numel / _seconds(lambda: kernels.update(parameter, gradient, state, scalars, key))


def link_rates(device: CudaDevice) -> tuple[float, float]:
    """Return the bytes a second that are copied to a device and from it, both at once."""
    arena = device.arena(2 * _COPIED_BYTES)
    near = [arena.carve(_COPIED_BYTES) for _ in range(2)]
    far = [device.memory_of(device.zeros(_COPIED_BYTES, torch.uint8)) for _ in range(2)]
    torch.cuda.synchronize(device.torch_device)

    def copy() -> None:
        fences = [device.copy(near[0], far[0]), device.copy(far[1], near[1])]
        for fence in fences:
            fence.wait()

    rate = _COPIED_BYTES / _seconds(copy)
    arena.close()
    return rate, rate


def _seconds(work: Callable[[], None]) -> float:
    """Return the median time of some rounds, after one that nobody counts."""
    found = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])
