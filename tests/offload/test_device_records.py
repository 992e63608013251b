"""A record's bytes on a device are updated as on the host, field by field and bit by bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from estimators import ElementType, StateField, StateFormat, record_layout
from offload import (
    StateArrays,
    add_block_sums,
    load_device_kernels,
    state_tensors,
    update_sub_group,
)
from offload.kernels_device import check_apart, triton_unavailable_reason
from offload.rules import AdamWScalars
from tests.support.device_kernels import to_tensor
from tests.support.kernels import HYPERPARAMETERS, make_kernels, ordinary
from tests.support.reference import round_to_bf16

NUMEL = 1000
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def numpy_fields(state: StateArrays) -> StateArrays:
    """Return the fields of a record on the host as arrays of the same memory."""
    views = {}
    for field in StateField:
        tensor = state.get(field)
        if tensor is not None:
            is_bf16 = tensor.dtype is torch.bfloat16
            views[field] = (
                tensor.view(torch.int16).numpy().view(np.uint16) if is_bf16 else tensor.numpy()
            )
    return StateArrays.of(views)


@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("state_format", [StateFormat.FP32, StateFormat.EXACT])
def test_a_record_on_a_device_gets_the_bytes_of_the_host(state_format, device_type) -> None:
    layout = record_layout(state_format, ElementType.BF16, NUMEL)
    host = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    there = host.clone().to(device_type)
    param = round_to_bf16(ordinary(NUMEL, 1))
    moved = to_tensor(param.copy(), torch.device(device_type))
    kernels = load_device_kernels(torch.device(device_type))
    assert kernels.name == ("triton" if device_type == "cuda" else "torch")
    native = make_kernels("native", 1)
    for step in (1, 2, 3):
        grad = round_to_bf16(ordinary(NUMEL, 10 + step))
        scalars = AdamWScalars.from_hyperparameters(step=step, grad_scale=0.5, **HYPERPARAMETERS)
        fields = state_tensors(layout, host)
        arrays = numpy_fields(fields)
        update_sub_group(native, param, grad, arrays, scalars)
        on_device = to_tensor(grad, torch.device(device_type))
        update_sub_group(kernels, moved, on_device, state_tensors(layout, there), scalars)
        assert host.any()
        assert torch.equal(there.cpu(), host)
        bits = moved.cpu().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits, param)


def test_a_record_of_another_size_or_type_is_refused() -> None:
    layout = record_layout(StateFormat.EXACT, ElementType.BF16, NUMEL)
    with pytest.raises(ValueError, match=f"{layout.size_bytes} bytes"):
        state_tensors(layout, torch.zeros(layout.size_bytes - 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"float32"):
        state_tensors(layout, torch.zeros(layout.size_bytes))


def test_why_triton_is_not_used_is_said() -> None:
    assert "need a CUDA device" in str(triton_unavailable_reason(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="need a CUDA device"):
        load_device_kernels(torch.device("cpu"), "triton")
    with pytest.raises(ValueError, match="kind must be"):
        load_device_kernels(torch.device("cpu"), "cuda")


def test_tensors_that_do_not_go_together_are_refused() -> None:
    kernels = load_device_kernels(torch.device("cpu"))
    scalars = AdamWScalars.from_hyperparameters(step=1, grad_scale=1.0, **HYPERPARAMETERS)
    whole = torch.ones(150)
    rest = [torch.ones(100) for _ in range(3)]
    with pytest.raises(ValueError, match="param and exp_avg_sq share memory"):
        kernels.adamw_fp32(whole[:100], *rest[:2], whole[50:], scalars)
    with pytest.raises(ValueError, match="one length, got param 150"):
        kernels.adamw_fp32(whole, *rest, scalars)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.adamw_fp32(torch.ones(200)[::2], *rest, scalars)
    with pytest.raises(TypeError, match=r"residual must hold torch\.int16, got torch\.float32"):
        kernels.adamw_exact(torch.ones(100).bfloat16(), *rest, torch.ones(100), scalars)
    with pytest.raises(TypeError, match="AdamWScalars"):
        kernels.adamw_fp32(torch.ones(100), *rest, {"lr": 1.0})
    with pytest.raises(TypeError, match="param must be a tensor, got ndarray"):
        kernels.adamw_fp32(np.ones(100, np.float32), *rest, scalars)
    with pytest.raises(ValueError, match="first_index"):
        kernels.block_sums(whole, -1)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_overlaps_what_is_written_is_found(seed: int) -> None:
    chance = random.Random(seed)
    whole = torch.zeros(64)
    bounds = [sorted(chance.choices(range(65), k=2)) for _ in range(chance.randint(2, 4))]
    tensors = {f"t{at}": whole[low:high] for at, (low, high) in enumerate(bounds)}
    written = chance.randint(1, len(bounds))
    overlaps = any(
        max(low, other[0]) < min(high, other[1])
        for at, (low, high) in enumerate(bounds[:written])
        for other in bounds[:at] + bounds[at + 1 :]
        if low < high and other[0] < other[1]
    )
    refused = False
    try:
        check_apart(tensors, written)
    except ValueError:
        refused = True
    assert refused == overlaps


def test_sums_of_blocks_are_added_one_after_another() -> None:
    sums = np.random.default_rng(0).random(10_001) ** 20
    total = 0.0
    for each in sums.tolist():
        total += each
    assert add_block_sums(sums) == total != float(np.sum(sums))
    assert add_block_sums([]) == 0.0
