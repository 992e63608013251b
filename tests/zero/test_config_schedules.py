"""Schedules and loss scales beyond the field's numbers."""

import json

import pytest
import torch
from torch.optim import SGD, AdamW

import zero
from tests.support.configs import make_config
from zero import lr_schedules
from zero.config import load_config
from zero.config.param_models import SCHEDULE_PARAMS
from zero.loss_scaler import DynamicLossScaler, LossScaleError, StaticLossScaler

CALLS = {
    "WarmupLR": {"warmup_max_lr": 0.1, "warmup_num_steps": 10},
    "WarmupDecayLR": {"total_num_steps": 30, "warmup_max_lr": 0.1, "warmup_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 30, "warmup_num_steps": 10},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4},
}


def adamw(groups: int = 1, lr: float | torch.Tensor = 0.1) -> AdamW:
    return AdamW([{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(groups)], lr=lr)


@pytest.mark.parametrize("name", CALLS)
def test_the_rate_is_right_before_the_first_step(name: str) -> None:
    optimizer = adamw()
    schedule = lr_schedules.make_schedule(optimizer, name, CALLS[name])
    first = {"WarmupLR": 0.0, "WarmupDecayLR": 0.0, "WarmupCosineLR": 0.0}.get(name, 0.01)
    assert optimizer.param_groups[0]["lr"] == first
    assert schedule.get_last_lr() == [first]


@pytest.mark.parametrize("name", CALLS)
def test_resuming_sets_the_rate_at_once(name: str) -> None:
    optimizer = adamw()
    schedule = lr_schedules.make_schedule(optimizer, name, CALLS[name])
    for _ in range(17):
        schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))
    other = adamw()
    resumed = lr_schedules.make_schedule(other, name, CALLS[name])
    resumed.load_state_dict(state)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert other.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    at_once = lr_schedules.make_schedule(adamw(), name, CALLS[name] | {"last_batch_iteration": 16})
    assert at_once.get_last_lr() == schedule.get_last_lr()
    for one in (schedule, resumed, at_once):
        one.step()
    assert schedule.get_last_lr() == resumed.get_last_lr() == at_once.get_last_lr()


@pytest.mark.parametrize("name", CALLS)
def test_a_rate_that_is_a_tensor_is_written_in_place(name: str) -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    schedule = lr_schedules.make_schedule(adamw(lr=rate), name, CALLS[name])
    for _ in range(5):
        schedule.step()
    assert schedule.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == schedule.get_last_lr()[0]


def test_values_per_param_group() -> None:
    optimizer = adamw(groups=2)
    schedule = lr_schedules.WarmupLR(
        optimizer, [0.0, 1.0], (1.0, 3.0), warmup_num_steps=4, warmup_type="linear"
    )
    schedule.step(2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]
    with pytest.raises(ValueError, match="warmup_max_lr has 3 values for 2 param groups; give one"):
        lr_schedules.WarmupLR(optimizer, 0.0, [1, 2, 3])


def test_wrappers_and_other_objects() -> None:
    class Wrapper:
        optimizer = adamw()

    assert lr_schedules.LRRangeTest(Wrapper()).optimizer is Wrapper.optimizer
    with pytest.raises(TypeError, match=r"needs a torch.optim.Optimizer, got int; pass the one"):
        lr_schedules.LRRangeTest(3)
    with pytest.raises(ValueError, match="'Warmup' is not a schedule; use one of WarmupLR"):
        lr_schedules.make_schedule(adamw(), "Warmup", {})


def test_what_is_doubtful_warns() -> None:
    with pytest.warns(UserWarning, match="warmup_type 'cubic' is neither"):
        lr_schedules.WarmupLR(adamw(), warmup_type="cubic")
    with pytest.warns(UserWarning, match="total_num_steps 5 is less than the 10 steps"):
        lr_schedules.WarmupDecayLR(adamw(), 5, warmup_num_steps=10)
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match="cycle_momentum has no effect: Adagrad has no momentum"):
        lr_schedules.OneCycle(torch.optim.Adagrad([parameter]), 0.1, 0.2)


def test_one_cycle_moves_momentum_by_either_name() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5)
    schedule = lr_schedules.OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=2)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    schedule.step()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.85)
    betas = adamw()
    lr_schedules.OneCycle(betas, 0.1, 0.2)
    assert betas.param_groups[0]["betas"] == (0.9, 0.99)


@pytest.mark.parametrize("name", CALLS)
def test_a_named_schedule_of_the_configuration_can_be_made(name: str) -> None:
    assert SCHEDULE_PARAMS.keys() == CALLS.keys() == lr_schedules.SCHEDULES.keys()
    config = load_config(
        {"zero_optimization": {"stage": 3}, "scheduler": {"type": name, "params": CALLS[name]}}
    )
    named = config.settings(1).scheduler
    made = lr_schedules.make_schedule(adamw(), named.type_name, named.parameters)
    assert type(made) is getattr(lr_schedules, name)


def test_a_torch_schedule_by_name_can_be_made() -> None:
    config = load_config(
        {
            "zero_optimization": {"stage": 3},
            "scheduler": {"type": "LinearLR", "params": {"start_factor": 0.25, "total_iters": 4}},
        }
    )
    named = config.settings(1).scheduler
    optimizer = adamw()
    lr_schedules.make_schedule(optimizer, named.type_name, named.parameters)
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("name", CALLS)
def test_defaults_of_the_models_are_those_of_the_classes(name: str) -> None:
    import inspect

    signature = inspect.signature(getattr(lr_schedules, name).__init__).parameters
    fields = SCHEDULE_PARAMS[name].model_fields
    assert fields.keys() == signature.keys() - {"self", "optimizer"}
    for field, info in fields.items():
        default = signature[field].default
        assert info.is_required() == (default is inspect.Parameter.empty)
        assert info.is_required() or info.default == default


def test_a_static_scale_never_changes() -> None:
    scaler = StaticLossScaler(128.0)
    scaler.update_scale(overflow=True)
    assert (scaler.cur_scale, scaler.loss_scale, scaler.dynamic) == (128.0, 128.0, False)
    other = StaticLossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.cur_scale == 128.0
    with pytest.raises(ValueError, match="loss_scale must be positive and finite, got 0; write 1"):
        StaticLossScaler(0)


def test_the_minimum_scale_names_the_tensors() -> None:
    scaler = DynamicLossScaler(init_scale=1.0)
    with pytest.raises(
        LossScaleError, match=r"at its minimum 1, in block.0.weight, head.bias; par"
    ):
        scaler.update_scale(overflow=True, overflowed=["block.0.weight", "head.bias"])
    assert scaler.cur_scale == 1.0
    silent = DynamicLossScaler(init_scale=1.0, raise_error_at_min_scale=False)
    silent.update_scale(overflow=True)
    assert silent.cur_scale == 1.0


def test_a_dynamic_scale_continues() -> None:
    scaler = DynamicLossScaler(init_scale=2.0**16, scale_window=3, delayed_shift=2)
    marks = [True, False, False, True, True, False, False, False, False, True, False]
    for mark in marks[:6]:
        scaler.update_scale(mark)
    other = DynamicLossScaler(init_scale=2.0**16, scale_window=3, delayed_shift=2)
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    for mark in marks[6:]:
        scaler.update_scale(mark)
        other.update_scale(mark)
    assert other.state_dict() == scaler.state_dict()
    with pytest.raises(ValueError, match="needs scale_window >= 1"):
        DynamicLossScaler(scale_window=0)


@pytest.mark.parametrize(
    ("section", "scale", "dynamic"),
    [
        (None, 1.0, False),
        ({"enabled": False, "loss_scale": 4}, 1.0, False),
        ({"enabled": True, "loss_scale": 4}, 4.0, False),
        ({"enabled": True, "initial_scale_power": 8}, 256.0, True),
    ],
)
def test_the_fp16_section_makes_the_scaler(
    section: dict | None,
    scale: float,
    dynamic: bool,  # noqa: FBT001
) -> None:
    scaler = load_config({} if section is None else {"fp16": section}).loss_scaler()
    assert (scaler.cur_scale, scaler.dynamic) == (scale, dynamic)


def test_a_schedule_of_another_optimizer_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    config = make_config()
    for nothing in (3, "StepLR"):
        with pytest.raises(zero.ConfigError, match="lr_scheduler must be a scheduler with step"):
            zero.initialize(model=model, config=config, lr_scheduler=nothing)
    foreign = torch.optim.lr_scheduler.StepLR(AdamW(model.parameters()), 1)
    with pytest.raises(zero.ConfigError, match=r"\(StepLR\) sets the rates of another optimizer"):
        zero.initialize(model=model, config=config, lr_scheduler=foreign)
    config.pop("optimizer")
    own = AdamW(model.parameters(), lr=0.5)
    engine, _, _, schedule = zero.initialize(
        model=model,
        optimizer=own,
        config=config,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5),
    )
    with torch.enable_grad():
        engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    assert schedule.get_last_lr() == engine.get_lr() == [0.25]
    engine.destroy()
