"""Checksums on a GPU: one kernel gives the sums of torch's operations."""

from __future__ import annotations

import pytest
import torch

from offload import DeviceChecksums, checksums_of_all, triton_unavailable_reason
from offload.device_checksums import sums_of_lines

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("numels", [(1,), (31, 32, 33, 4096), (100_000, 7, 3_000_001)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_kernel_gives_the_sums_of_plain_operations(
    numels: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert triton_unavailable_reason(torch.device("cuda")) is None
    ranges, end = [], 0
    for numel in numels:
        ranges.append((end, end + numel))
        end += -(-numel // 128) * 128
    flat = torch.randn(end, device="cuda").to(dtype)
    checksums = DeviceChecksums(flat, ranges)
    before = checksums.of(flat)
    assert torch.equal(before, sums_of_lines(flat.view(torch.int64), checksums.bounds))
    for position, (start, stop) in enumerate(ranges):
        flat[stop - 1] += 1
        changed = checksums.of(flat) != before
        assert changed.tolist() == [at <= position for at in range(len(ranges))], start


def test_several_buffers_have_the_sums_of_each() -> None:
    buffers = []
    for numels in ((128, 4096), (3_000_001, 7), (31,), (64_000,) * 5):
        ranges, end = [], 0
        for numel in numels:
            ranges.append((end, end + numel))
            end += -(-numel // 128) * 128
        flat = torch.randn(end, device="cuda").bfloat16()
        buffers.append((DeviceChecksums(flat, ranges), flat))
    assert buffers[0][0].kernel_of_all is not None
    found = checksums_of_all(buffers)
    assert torch.equal(found, torch.cat([checksums.of(flat) for checksums, flat in buffers]))
    buffers[1][1][5] += 1
    assert (checksums_of_all(buffers) != found).tolist() == [at == 2 for at in range(len(found))]
