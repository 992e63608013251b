"""The norm of gradients on any device, with the bits of [Note: block norm].

A square of an fp32, bf16 or fp16 value is exact in fp64, so only the order of additions matters:
rows of 64 lanes from the first to the last, lanes by halves, and at last blocks, on the host.
"""

from __future__ import annotations

import numpy as np
import torch

from offload.kernels import BLOCK_NUMEL, LANE_COUNT

_ROW_COUNT = BLOCK_NUMEL // LANE_COUNT


def block_squares(values: torch.Tensor, first_index: int) -> torch.Tensor:
    """Return the sums of squares of the blocks that logical elements `first_index` on touch.

    Args:
        values: flat, of one parameter.
        first_index: where they begin in the parameter.

    Returns:
        fp64 on the device of `values`, shape `[blocks]`, in order.
    """
    lead = first_index % BLOCK_NUMEL
    block_count = -(-(lead + values.numel()) // BLOCK_NUMEL)
    if lead or values.numel() % BLOCK_NUMEL:
        padded = torch.zeros(block_count * BLOCK_NUMEL, dtype=values.dtype, device=values.device)
        padded[lead : lead + values.numel()] = values
        values = padded
    rows = values.view(block_count, _ROW_COUNT, LANE_COUNT)
    lanes = torch.zeros(block_count, LANE_COUNT, dtype=torch.float64, device=values.device)
    for row in range(_ROW_COUNT):
        wide = rows[:, row].double()
        lanes += wide * wide
    width = LANE_COUNT
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width : 2 * width]
    return lanes.view(-1)


def add_in_order(block_sums: np.ndarray) -> float:
    """Return the sum of fp64 values, added from the first to the last."""
    total = 0.0
    with np.errstate(all="ignore"):
        if block_sums.size:
            total = float(np.add.accumulate(block_sums)[-1])
    return total
