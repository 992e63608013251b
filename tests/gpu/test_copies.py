"""Copies between registered host memory and a GPU."""

from __future__ import annotations

import pytest
import torch

from aio_ops import PinnedArena
from offload import open_cuda_device

pytestmark = pytest.mark.gpu

GIB = 1 << 30


def test_a_copy_may_touch_any_part_of_an_arena() -> None:
    device = open_cuda_device(0)
    arena = device.arena(GIB + (8 << 20))
    assert isinstance(arena, PinnedArena)
    assert arena.cuda_registered
    span = arena.whole().sub(GIB - (4 << 20) - 64, 8 << 20)
    values = torch.arange(8 << 20, device="cuda").to(torch.uint8)
    device.copy(device.memory_of(values), span).wait()
    back = torch.zeros_like(values)
    device.join(device.copy(span, device.memory_of(back)))
    assert torch.equal(back, values)
    assert device.copied_bytes == {"in": 8 << 20, "out": 8 << 20}


def test_copies_of_both_directions_run_at_once() -> None:
    device = open_cuda_device(0)
    size = 256 << 20
    arena = device.arena(2 * size)
    into = device.memory_of(device.zeros(size, torch.uint8))
    out = device.memory_of(device.zeros(size, torch.uint8))
    first, second = arena.whole().sub(0, size), arena.whole().sub(size, size)

    def seconds(*, both: bool) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        fences = [device.copy(first, into)]
        if both:
            fences.append(device.copy(out, second))
        for fence in fences:
            device.join(fence)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    seconds(both=True)
    alone = min(seconds(both=False) for _ in range(3))
    together = min(seconds(both=True) for _ in range(3))
    assert together < 1.5 * alone
