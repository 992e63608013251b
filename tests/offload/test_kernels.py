"""The kernels: native, numpy and the reference have equal bits."""

import functools
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from offload.kernels import Kernels
from offload.rules import AdamWScalars
from tests.support.kernels import (
    HYPERPARAMETERS,
    PATTERNS,
    assert_same_bits,
    hostile,
    make_kernels,
    ordinary,
)
from tests.support.reference import (
    ReferenceAdamW,
    clip_coefficient,
    global_norm,
    piece_sum_squares,
    quieted,
    residual_of,
    round_to_bf16,
    round_to_fp16,
    widen_bf16,
    with_one_nan,
)


@pytest.fixture
def kernels(any_kernels) -> Kernels:
    """Return each implementation, also those that work on tensors of a device."""
    return any_kernels


SIZES = [0, 1, 7, 63, 64, 65, 4095, 4096, 4097, 262143, 262144, 262145]
FEW_SIZES = [1, 65, 262145]


# (state format, type of the parameter, type of its gradients)
VARIANTS = {
    ("own", "fp32", "fp32"): SIZES,
    ("exact", "bf16", "bf16"): SIZES,
    ("exact", "bf16", "fp32"): FEW_SIZES,
    ("master", "bf16", "bf16"): SIZES,
    ("master", "bf16", "fp32"): FEW_SIZES,
    ("master", "fp16", "fp16"): SIZES,
    ("master", "fp16", "fp32"): FEW_SIZES,
}


def upper_halves(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def as_gradient(values: np.ndarray, element: str) -> np.ndarray:
    """Give a pattern the type of a gradient; what has any bits keeps having any."""
    match element:
        case "fp32":
            return values
        case "bf16":
            return upper_halves(values)
        case "fp16":
            any_bits = upper_halves(values).view(np.float16)
            return np.where(np.arange(values.size) % 2, round_to_fp16(values), any_bits)
    raise ValueError(element)


class StateUnderTest:
    """One parameter in one storage format, stepped by the kernels under test."""

    def __init__(
        self, kernels: Kernels, state_format: str, element: str, reference: ReferenceAdamW
    ) -> None:
        self.kernels = kernels
        self.format = state_format
        self.exp_avg = reference.exp_avg["p"].copy()
        self.exp_avg_sq = reference.exp_avg_sq["p"].copy()
        self.master = reference.masters["p"].copy()
        numel = self.master.size
        self.param = np.zeros(numel, np.float16 if element == "fp16" else np.uint16)
        self.residual = np.zeros(numel, np.int16)
        if element == "fp16":
            kernels.round_to_fp16(self.master, self.param)
        else:
            kernels.split_master(self.master, self.param, self.residual)

    def step(self, grad: np.ndarray, scalars: AdamWScalars) -> None:
        moments = (self.exp_avg, self.exp_avg_sq)
        match self.format:
            case "own":
                self.kernels.adamw_fp32(self.master, grad, *moments, scalars)
            case "exact":
                self.master.fill(0)  # it lives in the parameter and the residual alone
                self.kernels.adamw_exact(self.param, self.residual, grad, *moments, scalars)
            case "master":
                self.kernels.adamw_master(self.param, self.master, grad, *moments, scalars)

    def assert_equals(self, reference: ReferenceAdamW, what: str) -> None:
        assert_same_bits(self.exp_avg, reference.exp_avg["p"], f"{what} exp_avg")
        assert_same_bits(self.exp_avg_sq, reference.exp_avg_sq["p"], f"{what} exp_avg_sq")
        if self.format != "own":
            assert_same_bits(self.param, reference.param("p"), f"{what} param")
        if self.format == "exact":
            assert_same_bits(self.residual, reference.residual("p"), f"{what} residual")
            self.kernels.join_master(self.param, self.residual, self.master)
        assert_same_bits(self.master, reference.masters["p"], f"{what} master")


@pytest.mark.parametrize(
    ("variant", "numel"),
    [(variant, numel) for variant, sizes in VARIANTS.items() for numel in sizes],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(value),
)
def test_update_has_the_bits_of_the_reference(kernels, variant, numel) -> None:
    state_format, element, grad_element = variant
    for seed, pattern in enumerate(PATTERNS):
        named = {} if element == "fp32" else {element: {"p"}}
        reference = ReferenceAdamW({"p": pattern(numel, seed)}, **named)
        reference.exp_avg["p"] = pattern(numel, seed + 10)
        reference.exp_avg_sq["p"] = (
            pattern(numel, seed + 20) if pattern is hostile else abs(pattern(numel, seed + 20))
        )
        state = StateUnderTest(kernels, state_format, element, reference)
        state.assert_equals(reference, f"{pattern.__name__}, before the first step")
        for step in (1, 2):
            grad = as_gradient(pattern(numel, seed + 30 + step), grad_element)
            clip = 0.5 if pattern is ordinary else 0.0
            norm = reference.step({"p": grad}, clip=clip, **HYPERPARAMETERS)
            scalars = AdamWScalars.from_hyperparameters(
                step=step, grad_scale=clip_coefficient(norm, clip), **HYPERPARAMETERS
            )
            state.step(grad, scalars)
            state.assert_equals(reference, f"{pattern.__name__}, step {step}")


def test_denormals_are_kept(kernels) -> None:
    scalars = AdamWScalars.from_hyperparameters(
        lr=0.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0, step=1, grad_scale=1.0
    )
    least = np.full(100, 1e-45, np.float32)
    param, exp_avg, exp_avg_sq = least.copy(), np.zeros_like(least), np.zeros_like(least)
    kernels.adamw_fp32(param, least, exp_avg, exp_avg_sq, scalars)
    assert_same_bits(param, least, "param")
    assert_same_bits(exp_avg, least, "exp_avg")


def stratified_bits() -> Iterator[np.ndarray]:
    """2^24 patterns: under each upper half 250 random lower halves, and 6 around the tie."""
    rng = np.random.default_rng(7)
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    for first in range(0, 1 << 16, 1 << 12):
        high = np.arange(first, first + (1 << 12), dtype=np.uint32)[:, None] << 16
        low = rng.integers(0, 1 << 16, (1 << 12, 250), dtype=np.uint32)
        yield np.concatenate([high | low, high | edges], axis=1).reshape(-1)


def assert_split_is_exact(kernels: Kernels, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Check join(split(x)) == x, with NaNs quieted, and return x quieted and its bf16 bits."""
    master = bits.view(np.float32)
    param, residual = np.empty(bits.size, np.uint16), np.empty(bits.size, np.int16)
    kernels.split_master(master, param, residual)
    joined = np.empty_like(master)
    kernels.join_master(param, residual, joined)
    expected = quieted(master) if np.isnan(master).any() else master
    assert_same_bits(joined, expected, "joined")
    return expected, param


def test_split_is_a_bijection_and_rounds_to_nearest_ties_away(kernels) -> None:
    count = 0
    for bits in stratified_bits():
        master, param = assert_split_is_exact(kernels, bits)
        assert np.array_equal(param >> 15, bits >> 31)
        assert np.all(param[np.isnan(master)] & 0x7FFF == 0x7FC0)
        assert np.all(param[np.isinf(master)] & 0x7FFF == 0x7F80)
        finite = np.isfinite(master)
        magnitude = np.abs(master[finite].astype(np.float64))
        truncated = (bits[finite] >> 16 & 0x7FFF).astype(np.uint16)
        below = widen_bf16(truncated).astype(np.float64)
        above = widen_bf16(truncated + np.uint16(1)).astype(np.float64)
        above[np.isinf(above)] = 2.0**128  # where the next value would be, were there one
        nearest = truncated + (above - magnitude <= magnitude - below)
        assert np.array_equal(param[finite] & 0x7FFF, nearest)
        count += bits.size
    assert count == 1 << 24


@pytest.mark.full
def test_split_is_a_bijection_on_all_patterns() -> None:
    kernels = make_kernels("native", len(os.sched_getaffinity(0)))
    step = 1 << 24
    for first in range(0, 1 << 32, step):
        assert_split_is_exact(kernels, np.arange(first, first + step, dtype=np.uint32))


def test_split_and_join_of_known_patterns(kernels) -> None:
    cases = {
        0x0000_0000: (0x0000, 0),
        0x8000_0000: (0x8000, 0),
        0x3F80_7FFF: (0x3F80, 0x7FFF),
        0x3F80_8000: (0x3F81, -0x8000),  # a tie goes away from zero
        0xBF80_8000: (0xBF81, -0x8000),
        0x7F7F_FFFF: (0x7F80, -1),  # rounds to infinity, and comes back
        0x7FFF_FFFF: (0x7FC0, 0),
        0xFF80_0001: (0xFFC0, 0),
    }
    master = np.array(list(cases), np.uint32).view(np.float32)
    param, residual = np.empty(len(cases), np.uint16), np.empty(len(cases), np.int16)
    kernels.split_master(master, param, residual)
    assert list(zip(param.tolist(), residual.tolist(), strict=True)) == list(cases.values())


@pytest.mark.parametrize("numel", SIZES)
def test_split_has_the_bits_of_the_reference(kernels, numel) -> None:
    master = hostile(numel, numel)
    param, residual = np.empty(numel, np.uint16), np.empty(numel, np.int16)
    kernels.split_master(master, param, residual)
    assert_same_bits(param, round_to_bf16(master), "param")
    assert_same_bits(residual, residual_of(master), "residual")


def fp16_stratified_bits() -> np.ndarray:
    """2^22 patterns: under each upper half 31 random lower halves, and 33 around possible ties."""
    edges = np.arange(0, 1 << 16, 1 << 13)[:, None] + [0, 0xFFF, 0x1000, 0x1001]
    low = np.random.default_rng(8).integers(0, 1 << 16, (1 << 16, 64), dtype=np.uint32)
    low[:, :33] = [*edges.reshape(-1), 0xFFFF]
    return (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | low).reshape(-1)


def still_scalars() -> AdamWScalars:
    """Return scalars with which exp_avg becomes the gradient, and a master stays as it is."""
    return AdamWScalars.from_hyperparameters(
        lr=0.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0, step=1, grad_scale=1.0
    )


def test_fp16_is_rounded_as_numpy_does(kernels) -> None:
    master = fp16_stratified_bits().view(np.float32)
    assert master.size == 1 << 22
    given, param = master.copy(), np.empty(master.size, np.float16)
    kernels.round_to_fp16(master, param)
    assert_same_bits(param, round_to_fp16(master), "param")
    assert_same_bits(master, given, "master")
    moments = (np.zeros_like(master), np.zeros_like(master))
    kernels.adamw_master(param, master, np.zeros_like(param), *moments, still_scalars())
    assert_same_bits(master, with_one_nan(given), "updated master")
    assert_same_bits(param, round_to_fp16(master), "updated param")


@pytest.mark.full
@pytest.mark.parametrize("part", range(16))  # numpy takes its time for numbers below the least
def test_fp16_is_rounded_as_numpy_does_on_all_patterns(part) -> None:
    kernels = make_kernels("native", len(os.sched_getaffinity(0)))
    numel = 1 << 24
    param = np.empty(numel, np.float16)
    for first in range(part << 28, (part + 1) << 28, numel):
        master = np.arange(first, first + numel, dtype=np.uint32).view(np.float32)
        kernels.round_to_fp16(master, param)
        assert_same_bits(param, round_to_fp16(master), f"param from {first:#x}")


def test_fp16_of_known_patterns(kernels) -> None:
    cases = {
        0x0000_0000: 0x0000,
        0x8000_0001: 0x8000,
        0x3300_0000: 0x0000,  # half the least subnormal: a tie
        0x3300_0001: 0x0001,
        0xB3C0_0000: 0x8002,  # 1.5 times the least subnormal: a tie
        0x387F_DFFF: 0x03FF,
        0x387F_E000: 0x0400,  # a tie between the greatest subnormal and the least normal number
        0x3F80_1000: 0x3C00,  # ties of normal numbers
        0x3F80_3000: 0x3C02,
        0x477F_EFFF: 0x7BFF,
        0x477F_F000: 0x7C00,  # 65520, a tie between the greatest number and what would follow
        0xC77F_F000: 0xFC00,
        0x7F7F_FFFF: 0x7C00,
        0xFF80_0000: 0xFC00,
        0x7F80_0001: 0x7E00,  # signalling
        0xFFFF_FFFF: 0xFE00,
    }
    master = np.array(list(cases), np.uint32).view(np.float32)
    param = np.empty(len(cases), np.float16)
    kernels.round_to_fp16(master, param)
    assert dict(zip(cases, param.view(np.uint16).tolist(), strict=True)) == cases


@pytest.mark.parametrize("numel", SIZES)
def test_fp16_has_the_bits_of_the_reference(kernels, numel) -> None:
    master, param = hostile(numel, numel), np.empty(numel, np.float16)
    kernels.round_to_fp16(master, param)
    assert_same_bits(param, round_to_fp16(master), "param")


def test_every_fp16_gradient_is_widened_as_numpy_does(kernels) -> None:
    grad = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    master, exp_avg_sq = np.zeros((2, grad.size), np.float32)
    exp_avg = np.full(grad.size, -0.0, np.float32)  # to which -0 can be added
    param = np.empty_like(grad)
    kernels.adamw_master(param, master, grad, exp_avg, exp_avg_sq, still_scalars())
    with np.errstate(invalid="ignore"):
        assert_same_bits(exp_avg, with_one_nan(grad.astype(np.float32)), "exp_avg")


def test_every_fp16_is_squared_exactly(kernels) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 1 << 10)
    finite = values[np.isfinite(values[:, 0])]
    assert len(finite) == 62
    for one_exponent in finite:
        squares = one_exponent.astype(np.float64) ** 2  # few enough bits that their sum is exact
        assert kernels.sum_squares(one_exponent, 5) == squares.sum()
    for one_sign in values[~np.isfinite(values[:, 0])]:
        assert kernels.sum_squares(one_sign[:1], 5) == np.inf
        assert all(np.isnan(kernels.sum_squares(one_sign[i : i + 1], 5)) for i in (1, 512, 1023))


def slow_sum_squares(values: list[float], first_index: int) -> float:
    """The rule of the norm, one element at a time in Python floats."""
    blocks: dict[int, list[float]] = {}
    for index, value in enumerate(values, first_index):
        blocks.setdefault(index // 4096, [0.0] * 64)[index % 64] += value * value
    total = 0.0
    for block in sorted(blocks):
        lanes = blocks[block]
        for half in (32, 16, 8, 4, 2, 1):
            for lane in range(half):
                lanes[lane] += lanes[lane + half]
        total += lanes[0]
    return total


@functools.cache
def norm_case(numel: int, first_index: int, dtype: str) -> tuple[np.ndarray, float]:
    wide = ordinary(numel, numel) * np.float32(10.0) ** (np.arange(numel) % 60 - 30)
    values = wide.astype(np.float32)
    if dtype == "bf16":
        values = round_to_bf16(values)
        return values, slow_sum_squares(widen_bf16(values).tolist(), first_index)
    if dtype == "fp16":
        wide = ordinary(numel, numel) * np.float32(10.0) ** (np.arange(numel) % 12 - 8)
        values = round_to_fp16(wide.astype(np.float32))
    return values, slow_sum_squares(values.tolist(), first_index)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("numel", SIZES)
def test_sum_squares_is_the_slow_sum(kernels, numel, dtype) -> None:
    first_indices = [0, 1, 63, 64, 4095, 4096, 10**12 + 37]
    for first_index in first_indices if numel <= 4097 else first_indices[-1:]:
        values, expected = norm_case(numel, first_index, dtype)
        assert kernels.sum_squares(values, first_index) == expected
        assert piece_sum_squares(values, first_index) == expected


def test_the_order_of_the_norm_shows_in_its_bits() -> None:
    values, expected = norm_case(262145, 10**12 + 37, "fp32")
    assert expected != float(np.cumsum(values.astype(np.float64) ** 2)[-1])
    assert expected != norm_case(262145, 10**12 + 38, "fp32")[1]


def test_sum_squares_passes_on_what_is_not_finite(kernels) -> None:
    values = ordinary(10_000, 3)
    values[5_000] = np.inf
    assert kernels.sum_squares(values, 0) == np.inf
    values[5_001] = np.nan
    assert np.isnan(kernels.sum_squares(values, 0))
    assert kernels.sum_squares(np.full(7, 3e38, np.float32), 0) == 7 * float(np.float32(3e38)) ** 2


def test_global_norm_adds_pieces_in_parameter_then_rank_order() -> None:
    gradients = {
        "a": ordinary(5_000, 1).reshape(50, 100),
        "b": round_to_bf16(ordinary(300, 2)),
        "c": round_to_fp16(ordinary(100, 3)),
    }
    pieces = {"a": [(0, 2_500), (2_500, 5_000)], "b": [(0, 200), (200, 300)], "c": [(0, 100)]}
    wide = {
        "a": gradients["a"].reshape(-1),
        "b": widen_bf16(gradients["b"]),
        "c": gradients["c"].astype(np.float32),
    }
    total = 0.0
    for name, of_ranks in pieces.items():
        for start, stop in of_ranks:
            total += slow_sum_squares(wide[name][start:stop].tolist(), start)
    assert global_norm(gradients, pieces) == total**0.5
    assert global_norm(gradients, pieces) == pytest.approx(
        np.linalg.norm(np.concatenate(list(wide.values())).astype(np.float64)), rel=1e-12
    )
    assert [clip_coefficient(norm, 1.0) for norm in (0.5, 2.0)] == [1.0, 1.0 / (2.0 + 1e-6)]


def test_kernels_and_reference_are_close_to_torch(kernels) -> None:
    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.1}
    start = ordinary(1_000, 1)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.AdamW([theirs], **settings)
    reference = ReferenceAdamW({"p": start})
    ours, exp_avg, exp_avg_sq = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for step in range(1, 21):
        grad = ordinary(1_000, 100 + step)
        theirs.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        reference.step({"p": grad}, **settings)
        scalars = AdamWScalars.from_hyperparameters(step=step, grad_scale=1.0, **settings)
        kernels.adamw_fp32(ours, grad, exp_avg, exp_avg_sq, scalars)
    assert np.abs(start - ours).max() > 0.1
    assert np.abs(theirs.detach().numpy() - ours).max() < 1e-6
    assert np.abs(theirs.detach().numpy() - reference.param("p")).max() < 1e-6
