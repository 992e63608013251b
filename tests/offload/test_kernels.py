"""The kernels: native, numpy and the reference have equal bits, and bad arrays raise."""

import functools
import os
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from offload import kernels as kernels_module
from offload.kernels import (
    AdamWScalars,
    Kernels,
    load_kernels,
    native_available,
    native_unavailable_reason,
)
from tests.support.reference import (
    ReferenceAdamW,
    clip_coefficient,
    global_norm,
    piece_sum_squares,
    quieted,
    residual_of,
    round_to_bf16,
    widen_bf16,
)

SIZES = [0, 1, 7, 63, 64, 65, 4095, 4096, 4097, 262143, 262144, 262145]
HYPERPARAMETERS = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
IMPLEMENTATIONS = [("numpy", 1), ("native", 1), ("native", 2), ("native", 3)]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda param: f"{param[0]}-{param[1]}")
def kernels(request) -> Kernels:
    return make_kernels(*request.param)


def require_native() -> None:
    if not native_available() and "TIERZERO_REQUIRE_NATIVE" not in os.environ:
        pytest.skip(f"the native kernels are not loaded: {native_unavailable_reason()}")
    assert native_available(), native_unavailable_reason()


def make_kernels(kind: str, thread_count: int) -> Kernels:
    if kind == "native":
        require_native()
    made = load_kernels(kind, thread_count)
    assert made.name == kind
    return made


def ordinary(numel: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel, dtype=np.float32)


def denormal(numel: int, seed: int) -> np.ndarray:
    """Values below and just above the least normal fp32, which flushing to zero would lose."""
    rng = np.random.default_rng(seed)
    magnitude = rng.integers(0, 0x0100_0000, numel, dtype=np.uint32)
    return (magnitude | rng.integers(0, 2, numel, dtype=np.uint32) << 31).view(np.float32)


def hostile(numel: int, seed: int) -> np.ndarray:
    """Any pattern at all: numbers, ties, zeros, huge, infinite, and quiet and signalling NaNs."""
    rng = np.random.default_rng(seed)
    any_bits = rng.integers(0, 1 << 32, numel, dtype=np.uint32)
    sign = any_bits & 0x8000_0000
    kinds = [
        ordinary(numel, seed).view(np.uint32),
        denormal(numel, seed).view(np.uint32),
        any_bits,
        any_bits & 0xFFFF_0000 | 0x8000,
        any_bits & 0xFFFF_0000 | rng.integers(0x7FFF, 0x8002, numel, dtype=np.uint32),
        sign,
        sign | 0x7F7F_FFFF,
        sign | 0x7F80_0000,
        sign | 0x7F80_0001,
        sign | 0x7FFF_FFFF,
    ]
    return np.choose(rng.integers(0, len(kinds), numel), kinds).astype(np.uint32).view(np.float32)


PATTERNS: list[Callable[[int, int], np.ndarray]] = [ordinary, denormal, hostile]


def bits_of(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    differs = np.flatnonzero(bits_of(actual) != bits_of(expected))
    if differs.size:
        at = int(differs[0])
        pair = f"{bits_of(actual)[at]:#x} instead of {bits_of(expected)[at]:#x}"
        pytest.fail(f"{what}: {differs.size} of {actual.size} differ; the first, {at}, is {pair}")


class StateUnderTest:
    """One parameter in one storage format, stepped by the kernels under test."""

    def __init__(self, kernels: Kernels, state_format: str, reference: ReferenceAdamW) -> None:
        self.kernels = kernels
        self.format = state_format
        self.exp_avg = reference.exp_avg["p"].copy()
        self.exp_avg_sq = reference.exp_avg_sq["p"].copy()
        self.master = reference.masters["p"].copy()
        self.param = np.zeros(self.master.size, np.uint16)
        self.residual = np.zeros(self.master.size, np.int16)
        kernels.split_master(self.master, self.param, self.residual)

    def step(self, grad: np.ndarray, scalars: AdamWScalars) -> None:
        moments = (self.exp_avg, self.exp_avg_sq)
        match self.format:
            case "fp32":
                self.kernels.adamw_fp32(self.master, grad, *moments, scalars)
            case "exact":
                self.master.fill(0)  # it lives in the parameter and the residual alone
                self.kernels.adamw_exact(self.param, self.residual, grad, *moments, scalars)
            case "master":
                self.kernels.adamw_master(self.param, self.master, grad, *moments, scalars)

    def assert_equals(self, reference: ReferenceAdamW, what: str) -> None:
        assert_same_bits(self.exp_avg, reference.exp_avg["p"], f"{what} exp_avg")
        assert_same_bits(self.exp_avg_sq, reference.exp_avg_sq["p"], f"{what} exp_avg_sq")
        if self.format != "fp32":
            assert_same_bits(self.param, reference.param("p"), f"{what} param")
        if self.format == "exact":
            assert_same_bits(self.residual, reference.residual("p"), f"{what} residual")
            self.kernels.join_master(self.param, self.residual, self.master)
        assert_same_bits(self.master, reference.masters["p"], f"{what} master")


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("state_format", ["fp32", "exact", "master"])
def test_update_has_the_bits_of_the_reference(kernels, state_format, numel) -> None:
    for seed, pattern in enumerate(PATTERNS):
        bf16 = state_format != "fp32"
        reference = ReferenceAdamW({"p": pattern(numel, seed)}, bf16={"p"} if bf16 else ())
        reference.exp_avg["p"] = pattern(numel, seed + 10)
        reference.exp_avg_sq["p"] = (
            pattern(numel, seed + 20) if pattern is hostile else abs(pattern(numel, seed + 20))
        )
        state = StateUnderTest(kernels, state_format, reference)
        for step in (1, 2):
            grad = pattern(numel, seed + 30 + step)
            grad = (grad.view(np.uint32) >> 16).astype(np.uint16) if bf16 else grad
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
    return values, slow_sum_squares(values.tolist(), first_index)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
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
    gradients = {"a": ordinary(5_000, 1).reshape(50, 100), "b": round_to_bf16(ordinary(300, 2))}
    pieces = {"a": [(0, 2_500), (2_500, 5_000)], "b": [(0, 200), (200, 300)]}
    wide = {"a": gradients["a"].reshape(-1), "b": widen_bf16(gradients["b"])}
    total = 0.0
    for name, start, stop in [("a", 0, 2_500), ("a", 2_500, 5_000), ("b", 0, 200), ("b", 200, 300)]:
        total += slow_sum_squares(wide[name][start:stop].tolist(), start)
    assert global_norm(gradients, pieces) == total**0.5
    assert global_norm(gradients, pieces) == pytest.approx(
        np.linalg.norm(np.concatenate(list(wide.values())).astype(np.float64)), rel=1e-12
    )
    assert [clip_coefficient(norm, 1.0) for norm in (0.5, 2.0)] == [1.0, 1.0 / (2.0 + 1e-6)]


def test_scalars_are_rounded_once() -> None:
    scalars = AdamWScalars.from_hyperparameters(
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.3, step=7, grad_scale=1 / 3
    )
    once = {
        "beta1": 0.9,
        "one_minus_beta1": 1.0 - 0.9,
        "beta2": 0.999,
        "one_minus_beta2": 1.0 - 0.999,
        "decay_factor": 1.0 - 1e-3 * 0.3,
        "step_size": 1e-3 / (1.0 - 0.9**7),
        "bias_correction2_sqrt": (1.0 - 0.999**7) ** 0.5,
        "eps": 1e-8,
        "grad_scale": 1 / 3,
    }
    for name, exact in once.items():
        assert getattr(scalars, name) == float(np.float32(exact)), name
    twice = float(np.float32(1.0) - np.float32(0.999))
    assert scalars.one_minus_beta2 != twice
    plain = AdamWScalars.from_hyperparameters(
        step=7, grad_scale=1.0, bias_correction=False, **HYPERPARAMETERS
    )
    assert (plain.step_size, plain.bias_correction2_sqrt) == (float(np.float32(3e-3)), 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
        ({"step": 0}, "step counts from 1"),
        ({"lr": 1e300}, "fp32 range"),
    ],
)
def test_wrong_hyperparameters_are_refused(change, message) -> None:
    right = {"step": 1, "grad_scale": 1.0, **HYPERPARAMETERS}
    with pytest.raises(ValueError, match=message):
        AdamWScalars.from_hyperparameters(**{**right, **change})


def test_scalars_that_are_not_fp32_are_refused() -> None:
    fields = dict.fromkeys(AdamWScalars.__dataclass_fields__, 0.5)
    with pytest.raises(ValueError, match="eps must hold an fp32 value"):
        AdamWScalars(**{**fields, "eps": 1e-8})


MOMENTS = {"exp_avg": "f4", "exp_avg_sq": "f4"}
CALLS = {
    "adamw_fp32": {"param": "f4", "grad": "f4", **MOMENTS},
    "adamw_exact": {"param": "u2", "residual": "i2", "grad": "u2", **MOMENTS},
    "adamw_master": {"param": "u2", "master": "f4", "grad": "u2", **MOMENTS},
    "split_master": {"master": "f4", "param": "u2", "residual": "i2"},
    "join_master": {"param": "u2", "residual": "i2", "master": "f4"},
    "sum_squares": {"values": "f4"},
}
WRITTEN = {"split_master": {"param", "residual"}, "join_master": {"master"}}


def read_only(good: np.ndarray) -> np.ndarray:
    good.flags.writeable = False
    return good


def misaligned(good: np.ndarray) -> np.ndarray:
    raw = np.zeros(good.nbytes + 1, np.uint8)
    return raw[1:].view(good.dtype)


BREAKAGES: dict[str, tuple[type[Exception], Callable[[np.ndarray], object]]] = {
    "wider": (TypeError, lambda good: good.astype(np.float64)),
    "other half": (TypeError, lambda good: good.astype(np.float16)),
    "byte-swapped": (TypeError, lambda good: good.astype(good.dtype.newbyteorder())),
    "tensor": (TypeError, lambda good: torch.zeros(good.size)),
    "list": (TypeError, lambda good: good.tolist()),
    "none": (TypeError, lambda good: None),
    "shorter": (ValueError, lambda good: good[:-1]),
    "longer": (ValueError, lambda good: np.concatenate([good, good])),
    "strided": (ValueError, lambda good: np.repeat(good, 2)[::2]),
    "reversed": (ValueError, lambda good: good[::-1]),
    "two dimensions": (ValueError, lambda good: good.reshape(10, -1)),
    "misaligned": (ValueError, misaligned),
    "read-only": (ValueError, read_only),
}


def is_no_fault(call: str, argument: str, breakage: str) -> bool:
    if breakage in ("shorter", "longer"):
        return call == "sum_squares"  # alone, an array of any length is right
    written = WRITTEN.get(call, set(CALLS[call]) - {"grad", "values"})
    return breakage == "read-only" and argument not in written


def trailing_arguments(call: str) -> tuple[object, ...]:
    scalars = AdamWScalars.from_hyperparameters(step=1, grad_scale=1.0, **HYPERPARAMETERS)
    return {"sum_squares": (0,), "split_master": (), "join_master": ()}.get(call, (scalars,))


@pytest.mark.parametrize("breakage", BREAKAGES)
@pytest.mark.parametrize("call", CALLS)
def test_wrong_arrays_raise_and_change_nothing(kernels, call, breakage) -> None:
    error, damage = BREAKAGES[breakage]
    for argument in CALLS[call]:
        arguments = {name: np.full(100, 1, dtype) for name, dtype in CALLS[call].items()}
        arguments[argument] = damage(arguments[argument])
        arrays = [array for array in arguments.values() if isinstance(array, np.ndarray)]
        before = [array.copy() for array in arrays]
        trailing = trailing_arguments(call)
        if is_no_fault(call, argument, breakage):
            getattr(kernels, call)(*arguments.values(), *trailing)
            continue
        with pytest.raises(error, match=argument):
            getattr(kernels, call)(*arguments.values(), *trailing)
        if kernels.name == "native" and breakage != "tensor":  # nanobind would take a tensor
            with pytest.raises((TypeError, ValueError)):  # the module itself, without our checks
                getattr(kernels_module._kernels, call)(*arguments.values(), *trailing, 1)
        for array, copy in zip(arrays, before, strict=True):
            assert np.array_equal(array, copy)


def test_overlapping_arrays_wrong_scalars_and_negative_indices_raise(kernels) -> None:
    whole = np.ones(150, np.float32)
    arrays = [np.ones(100, np.float32) for _ in range(3)]
    with pytest.raises(ValueError, match="param and exp_avg_sq share memory"):
        kernels.adamw_fp32(whole[:100], *arrays[:2], whole[50:], *trailing_arguments("adamw_fp32"))
    with pytest.raises(TypeError, match="AdamWScalars"):
        kernels.adamw_fp32(whole[:100], *arrays, {"lr": 1.0})
    with pytest.raises(ValueError, match="first_index"):
        kernels.sum_squares(whole, -1)


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


def test_numpy_temporaries_stay_small() -> None:
    kernels = make_kernels("numpy", 1)
    numel = 1 << 21  # one whole fp32 temporary would be 8 MiB
    moments = [np.ones(numel, np.float32) for _ in range(2)]
    halves = [np.ones(numel, np.uint16), np.ones(numel, np.int16), np.ones(numel, np.uint16)]
    tracemalloc.start()
    try:
        kernels.adamw_exact(*halves, *moments, *trailing_arguments("adamw_exact"))
        kernels.sum_squares(halves[2], 5)
        kernels.split_master(moments[0], halves[0], halves[1])
        kernels.join_master(halves[0], halves[1], moments[0])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < peak_bytes < 4 << 20


def test_auto_falls_back_with_a_warning_unless_native_is_required(monkeypatch) -> None:
    monkeypatch.setattr(kernels_module, "_native_import_error", "no compiler was there")
    monkeypatch.delenv("TIERZERO_REQUIRE_NATIVE", raising=False)
    assert not native_available()
    assert native_unavailable_reason() == "no compiler was there"
    with pytest.warns(RuntimeWarning, match="no compiler was there"):
        assert load_kernels().name == "numpy"
    with pytest.raises(RuntimeError, match="no compiler was there"):
        load_kernels("native")
    monkeypatch.setenv("TIERZERO_REQUIRE_NATIVE", "1")
    with pytest.raises(RuntimeError, match="no compiler was there"):
        load_kernels()
    assert load_kernels("numpy").name == "numpy"


def test_choices() -> None:
    require_native()
    assert load_kernels().name == "native"
    assert native_unavailable_reason() is None
    with pytest.raises(ValueError, match="kind must be"):
        load_kernels("cuda")
    with pytest.raises(ValueError, match="thread_count"):
        load_kernels("numpy", thread_count=0)
