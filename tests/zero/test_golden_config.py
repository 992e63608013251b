"""The field's own numbers: batch sizes, loss scales, schedules and the update."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from offload import (
    AdamWScalars,
    Kernels,
    load_kernels,
    native_available,
    native_unavailable_reason,
)
from zero import loss_scaler, lr_schedules
from zero.config import ConfigError, load_config, resolve_batch

FIRST_T = 0
"""The value of t in the formula of the first gradient."""

NEAR_ZERO = 2.0**-26
"""A quarter of the rounding of 1: where a value crosses zero, its relative error is unbounded."""

GOLDENS = Path(os.environ.get("TIERZERO_GOLDENS", Path(__file__).parents[1] / "goldens"))


def cases(name: str) -> list[dict]:
    return json.loads((GOLDENS / f"{name}.json").read_text())["cases"]


def numbered(name: str) -> list:
    return [pytest.param(case, id=str(index)) for index, case in enumerate(cases(name))]


@pytest.mark.parametrize("case", numbered("batch_triple"))
def test_golden_batch_triple(case: dict) -> None:
    config, world_size = case["in"]["config"], case["in"]["world_size"]
    given = [
        config.get(name)
        for name in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    ]
    if "error" in case["out"]:
        with pytest.raises(ConfigError, match="; "):
            resolve_batch(*given, world_size)
    else:
        assert list(resolve_batch(*given, world_size)) == case["out"]["value"]


def scale_run(case: dict) -> dict:
    arguments = {k: v for k, v in case.items() if k not in {"pattern", "pattern_name"}}
    scaler = loss_scaler.DynamicLossScaler(**arguments)
    result = {"log2_scale": [], "hysteresis": [], "raised": None}
    for step, mark in enumerate(case["pattern"]):
        try:
            scaler.update_scale(overflow=mark == "X")
        except loss_scaler.LossScaleError:
            result["raised"] = {"at": step, "error": "Exception"}
            break
        result["log2_scale"].append(math.log2(scaler.cur_scale))
        result["hysteresis"].append(scaler.cur_hysteresis)
    return result | {"cur_iter": scaler.cur_iter, "last_overflow_iter": scaler.last_overflow_iter}


@pytest.mark.parametrize("case", numbered("loss_scaler"))
def test_golden_loss_scaler(case: dict) -> None:
    if "pattern" in case["in"]:
        assert scale_run(case["in"]) == case["out"]
        return
    section = {"enabled": True} | case["in"]["fp16_config"]
    config = load_config({"fp16": section})
    scaler = config.loss_scaler()
    wanted = case["out"]["value"]
    assert scaler.dynamic == wanted["dynamic"]
    assert scaler.cur_scale == wanted["initial_dynamic_scale"]
    assert config.fp16.loss_scale == wanted["static_loss_scale"]
    for name, value in wanted["args"].items():
        assert getattr(scaler, "cur_scale" if name == "init_scale" else name) == value


def schedule_run(given: dict) -> dict:
    def fresh():
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(given["ngroups"])]
        optimizer = torch.optim.AdamW(groups, lr=given["opt_lr"], betas=given["opt_betas"])
        return optimizer, getattr(lr_schedules, given["kind"])(optimizer, **given["params"])

    optimizer, schedule = fresh()
    result = {"lr0": [g["lr"] for g in optimizer.param_groups], "lr": [], "beta1": []}
    for step in range(given["steps"]):
        if step == given.get("resume_at"):
            state = json.loads(json.dumps(schedule.state_dict()))
            optimizer, schedule = fresh()
            schedule.load_state_dict(state)
        schedule.step()
        result["lr"].append([g["lr"] for g in optimizer.param_groups])
        result["beta1"].append(optimizer.param_groups[0]["betas"][0])
        assert schedule.get_last_lr() == result["lr"][-1]
    return result


@pytest.mark.parametrize("case", numbered("lr_schedules"))
@pytest.mark.filterwarnings("ignore:total_num_steps")
def test_golden_lr_schedules(case: dict) -> None:
    if "error" in case["out"]:
        with pytest.raises(ValueError, match="; "):
            schedule_run(case["in"])
        return
    wanted, measured = case["out"]["value"], schedule_run(case["in"])
    for name in ("lr0", "lr"):
        np.testing.assert_allclose(measured[name], wanted[name], rtol=1e-12, atol=1e-15)
    if isinstance(wanted["beta1"], str):
        constant = float(wanted["beta1"].removeprefix("constant "))
        assert set(measured["beta1"]) == {constant}
    else:
        np.testing.assert_allclose(measured["beta1"], wanted["beta1"], rtol=1e-12)


def values(formula: str, count: int, step: int) -> np.ndarray:
    """Evaluate a formula of the file, over element i and step t, and round it to fp32 once."""
    names = {"i": np.arange(count, dtype=np.float64), "t": step}
    return np.asarray(eval(formula, {"__builtins__": {}}, names)).astype(np.float32)


def fp32(value: float) -> float:
    """Round as the field's kernel does, which takes its scalars in fp32: 1 - beta follows."""
    return float(np.float32(value))


@pytest.fixture(scope="module", params=["native", "numpy"])
def kernels(request):
    if request.param == "native" and not native_available():
        pytest.skip(f"native kernels: {native_unavailable_reason()}")
    return load_kernels(request.param)


@pytest.mark.parametrize("case", numbered("cpu_adam"))
def test_golden_cpu_adam(case: dict, kernels: Kernels) -> None:
    given, wanted = case["in"], case["out"]
    assert given["dtype"] == "float32"
    count, decoupled = given["n"], given["adamw_mode"]
    param = values(given["p0"], count, 0)
    exp_avg, exp_avg_sq = np.zeros_like(param), np.zeros_like(param)
    for step in range(given["steps"]):
        scalars = AdamWScalars.from_hyperparameters(
            lr=given["lrs"][step] if given["lrs"] else given["lr"],
            betas=(fp32(given["betas"][0]), fp32(given["betas"][1])),
            eps=given["eps"],
            weight_decay=given["weight_decay"] if decoupled else 0.0,
            step=step + 1,
            grad_scale=1.0,
            bias_correction=given["bias_correction"],
        )
        grad = values(given["grad"], count, FIRST_T + step)
        if not decoupled:  # Adam with L2 is AdamW on a gradient that holds the decay already
            grad = grad + np.float32(given["weight_decay"]) * param
        kernels.adamw_fp32(param, grad, exp_avg, exp_avg_sq, scalars)
        row = wanted["p_by_step"][step]
        np.testing.assert_allclose(param[: len(row)], row, rtol=2e-6, atol=NEAR_ZERO)
    for name, moment, atol in (("exp_avg", exp_avg, NEAR_ZERO), ("exp_avg_sq", exp_avg_sq, 0.0)):
        row = wanted[name]
        np.testing.assert_allclose(moment[: len(row)], row, rtol=2e-6, atol=atol)
    assert param.astype(np.float64).sum() == pytest.approx(wanted["p_sum64"], rel=2e-6, abs=1e-5)
