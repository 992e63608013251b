"""The calls of the kernels: scalars, wrong arrays, memory, and the choice of an implementation."""

import dataclasses
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from offload import kernels as kernels_module
from offload.kernels import (
    load_kernels,
    native_available,
    native_unavailable_reason,
)
from offload.rules import AdamWScalars
from tests.support.kernels import HYPERPARAMETERS, make_kernels, require_native


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
    fields = {field.name: 0.5 for field in dataclasses.fields(AdamWScalars)}
    with pytest.raises(ValueError, match="eps must hold an fp32 value"):
        AdamWScalars(**{**fields, "eps": 1e-8})


MOMENTS = {"exp_avg": "f4", "exp_avg_sq": "f4"}
EXACT = {"param": "u2", "residual": "i2", "grad": "u2", **MOMENTS}
MASTER = {"param": "u2", "master": "f4", "grad": "u2", **MOMENTS}
# The method's name, and after a comma what its types are; the types of its arrays.
CALLS = {
    "adamw_fp32": {"param": "f4", "grad": "f4", **MOMENTS},
    "adamw_exact": EXACT,
    "adamw_exact, fp32 gradients": {**EXACT, "grad": "f4"},
    "adamw_master": MASTER,
    "adamw_master, fp32 gradients": {**MASTER, "grad": "f4"},
    "adamw_master, fp16": {**MASTER, "param": "f2", "grad": "f2"},
    "adamw_master, fp16, fp32 gradients": {**MASTER, "param": "f2", "grad": "f4"},
    "split_master": {"master": "f4", "param": "u2", "residual": "i2"},
    "join_master": {"param": "u2", "residual": "i2", "master": "f4"},
    "round_to_fp16": {"master": "f4", "out": "f2"},
    "sum_squares": {"values": "f4"},
    "sum_squares, bf16": {"values": "u2"},
    "sum_squares, fp16": {"values": "f2"},
}
WRITTEN = {
    "split_master": {"param", "residual"},
    "join_master": {"master"},
    "round_to_fp16": {"out"},
}


def method_of(call: str) -> str:
    return call.partition(",")[0]


def read_only(good: np.ndarray) -> np.ndarray:
    good.flags.writeable = False
    return good


def other_integers(good: np.ndarray) -> np.ndarray:
    return good.astype(np.uint16 if good.dtype == np.int16 else np.int16)


def misaligned(good: np.ndarray) -> np.ndarray:
    raw = np.zeros(good.nbytes + 1, np.uint8)
    return raw[1:].view(good.dtype)


BREAKAGES: dict[str, tuple[type[Exception], Callable[[np.ndarray], object]]] = {
    "wider": (TypeError, lambda good: good.astype(np.float64)),
    "other integers": (TypeError, other_integers),
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
        return method_of(call) == "sum_squares"  # alone, an array of any length is right
    written = WRITTEN.get(method_of(call), set(CALLS[call]) - {"grad", "values"})
    return breakage == "read-only" and argument not in written


def trailing_arguments(call: str) -> tuple[object, ...]:
    match method_of(call):
        case "sum_squares":
            return (0,)
        case "split_master" | "join_master" | "round_to_fp16":
            return ()
    return (AdamWScalars.from_hyperparameters(step=1, grad_scale=1.0, **HYPERPARAMETERS),)


def assert_refused(kernels, call: str, arguments: dict, error: type[Exception], name: str) -> None:
    """Check that a call names its wrong argument, and that the module also refuses by itself."""
    arrays = [array for array in arguments.values() if isinstance(array, np.ndarray)]
    before = [array.copy() for array in arrays]
    trailing = trailing_arguments(call)
    with pytest.raises(error, match=f"^(all arrays|{name}) "):
        getattr(kernels, method_of(call))(*arguments.values(), *trailing)
    # nanobind would take a tensor.
    if kernels.name == "native" and len(arrays) == len(arguments):
        name = {"adamw_fp32": "update_own"}.get(method_of(call), method_of(call))
        native = getattr(kernels_module._kernels, name.replace("adamw", "update"))
        with pytest.raises((TypeError, ValueError)):
            native(*arguments.values(), *trailing, 1)
    for array, copy in zip(arrays, before, strict=True):
        assert np.array_equal(array, copy)


@pytest.mark.parametrize("breakage", BREAKAGES)
@pytest.mark.parametrize("call", CALLS)
def test_wrong_arrays_raise_and_change_nothing(kernels, call, breakage) -> None:
    error, damage = BREAKAGES[breakage]
    for argument in CALLS[call]:
        arguments = {name: np.full(100, 1, dtype) for name, dtype in CALLS[call].items()}
        arguments[argument] = damage(arguments[argument])
        if is_no_fault(call, argument, breakage):
            getattr(kernels, method_of(call))(*arguments.values(), *trailing_arguments(call))
        else:
            assert_refused(kernels, call, arguments, error, argument)


@pytest.mark.parametrize(
    ("call", "wrong", "message"),
    [
        ("adamw_fp32", {"grad": "f2"}, "grad must hold float32, got float16"),
        ("adamw_fp32", {"grad": "u2"}, "grad must hold float32, got uint16"),
        ("adamw_exact", {"param": "f2"}, "param must hold uint16, got float16"),
        ("adamw_exact", {"param": "f2", "grad": "f2"}, "param must hold uint16, got float16"),
        ("adamw_exact", {"grad": "f2"}, "grad must hold uint16 or float32, got float16"),
        ("adamw_master", {"param": "f4"}, "param must hold uint16 or float16, got float32"),
        ("adamw_master", {"param": "f2"}, "grad must hold float16 or float32, got uint16"),
        ("adamw_master", {"grad": "f2"}, "grad must hold uint16 or float32, got float16"),
        ("adamw_master", {"master": "f2"}, "master must hold float32, got float16"),
        ("split_master", {"param": "f2"}, "param must hold uint16, got float16"),
        ("join_master", {"param": "f2"}, "param must hold uint16, got float16"),
        ("round_to_fp16", {"out": "u2"}, "out must hold float16, got uint16"),
        ("round_to_fp16", {"master": "f2"}, "master must hold float32, got float16"),
        ("sum_squares", {"values": "f8"}, "values must hold float32 or uint16 or float16"),
    ],
)
def test_types_that_do_not_go_together_are_refused(kernels, call, wrong, message) -> None:
    types = {**CALLS[call], **wrong}
    arguments = {name: np.full(100, 1, dtype) for name, dtype in types.items()}
    with pytest.raises(TypeError, match=message):
        getattr(kernels, call)(*arguments.values(), *trailing_arguments(call))
    assert_refused(kernels, call, arguments, TypeError, message.partition(" ")[0])


def test_overlapping_arrays_wrong_scalars_and_negative_indices_raise(kernels) -> None:
    whole = np.ones(150, np.float32)
    arrays = [np.ones(100, np.float32) for _ in range(3)]
    with pytest.raises(ValueError, match="param and exp_avg_sq share memory"):
        kernels.adamw_fp32(whole[:100], *arrays[:2], whole[50:], *trailing_arguments("adamw_fp32"))
    with pytest.raises(TypeError, match="AdamWScalars"):
        kernels.adamw_fp32(whole[:100], *arrays, {"lr": 1.0})
    with pytest.raises(ValueError, match="first_index"):
        kernels.sum_squares(whole, -1)


def test_numpy_temporaries_stay_small() -> None:
    kernels = make_kernels("numpy", 1)
    numel = 1 << 21  # one whole fp32 temporary would be 8 MiB
    moments = [np.ones(numel, np.float32) for _ in range(2)]
    halves = [np.ones(numel, np.uint16), np.ones(numel, np.int16), np.ones(numel, np.uint16)]
    fp16, master = np.ones((2, numel), np.float16), np.ones(numel, np.float32)
    tracemalloc.start()
    try:
        kernels.adamw_exact(*halves, *moments, *trailing_arguments("adamw_exact"))
        kernels.sum_squares(halves[2], 5)
        kernels.split_master(moments[0], halves[0], halves[1])
        kernels.join_master(halves[0], halves[1], moments[0])
        kernels.round_to_fp16(moments[0], fp16[0])
        kernels.sum_squares(fp16[0], 5)
        kernels.adamw_master(
            fp16[0], master, fp16[1], *moments, *trailing_arguments("adamw_master")
        )
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
