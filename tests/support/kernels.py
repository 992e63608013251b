"""What the tests of the kernels share: implementations, patterns of values, equality of bits."""

import os
from collections.abc import Callable

import numpy as np
import pytest

from offload.kernels import (
    KernelKind,
    Kernels,
    load_kernels,
    native_available,
    native_unavailable_reason,
)

HYPERPARAMETERS = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
IMPLEMENTATIONS = [("numpy", 1), ("native", 1), ("native", 2), ("native", 3)]


def require_native() -> None:
    if not native_available() and "TIERZERO_REQUIRE_NATIVE" not in os.environ:
        pytest.skip(f"the native kernels are not loaded: {native_unavailable_reason()}")
    assert native_available(), native_unavailable_reason()


def make_kernels(kind: KernelKind, thread_count: int) -> Kernels:
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
