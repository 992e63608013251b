"""Precisions beside the grid's: fp16 with its loss scale, fp32 gradients, autocast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zero
from tests.support.configs import BETAS, EPS, LR, WEIGHT_DECAY, make_config
from tests.support.observe import as_bits, digest, full_gradients, full_parameters, rank_pieces
from tests.support.reference import ReferenceAdamW
from tests.support.tiny import make_batch, make_model
from zero.loss_scaler import LossScaleError

pytestmark = pytest.mark.nvme

CASES = {
    "fp16-static": {"dtype": "fp16", "loss_scale": 128.0},
    "fp16-dynamic": {"dtype": "fp16"},
    "fp16-fp32-gradients": {"dtype": "fp16", "grad_accum_dtype": "fp32", "loss_scale": 64.0},
    "bf16-fp32-gradients": {"dtype": "bf16", "grad_accum_dtype": "fp32"},
    "bf16-fp32-gradients-fp32-format": {
        "dtype": "bf16",
        "grad_accum_dtype": "fp32",
        "state_format": "fp32",
    },
}


def engine_of(scratch: Path, tier: str, **changes: Any) -> zero.ZeroEngine:
    paged = {"parameters": "nvme", "optimizer": "nvme", "nvme_path": str(scratch)}
    budget = {"host_memory": "50KB", "sub_group_size": 1024}
    config = make_config(
        **{
            **(paged | budget if tier == "nvme" else {"host_memory": "1GB"}),
            "accumulation": 2,
            "clip": 0.5,
            **changes,
        }
    )
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    assert bool(engine.plan.memory.swap_file_bytes) == (tier == "nvme")
    return engine


@pytest.mark.parametrize("case", CASES)
def test_bits_equal_the_reference_on_every_tier(scratch: Path, case: str) -> None:
    digests = []
    for tier in ("none", "nvme"):
        engine = engine_of(scratch, tier, **CASES[case])
        model = make_model()
        masters = {name: as_bits(each.float()) for name, each in model.named_parameters()}
        half = list(masters)
        reference = ReferenceAdamW(
            masters,
            bf16=half if CASES[case]["dtype"] == "bf16" else (),
            fp16=half if CASES[case]["dtype"] == "fp16" else (),
        )
        for step in range(4):
            scale = engine.loss_scaler.cur_scale
            for micro in range(2):
                engine.backward(engine(*make_batch(2 * step + micro)))
            gradients = full_gradients(engine)
            wanted = np.float32 if "grad_accum_dtype" in CASES[case] else np.float16
            assert {each.dtype.type for each in gradients.values()} == {wanted}
            engine.step()
            norm = unscaled_step(reference, gradients, scale, rank_pieces(engine))
            assert engine.get_global_grad_norm() == norm > 0
            ours = full_parameters(engine)
            for name in masters:
                assert np.array_equal(
                    ours[name].view(np.uint16), reference.param(name).view(np.uint16)
                ), (step, name)
        if tier == "nvme":
            moved = engine.ledger.snapshot()
            assert moved.nvme_read_bytes > 0
            assert moved.nvme_write_bytes > 0
        digests.append(digest(full_parameters(engine)))
        engine.destroy()
    assert digests[0] == digests[1]


def unscaled_step(
    reference: ReferenceAdamW, gradients: dict[str, np.ndarray], scale: float, pieces: Any
) -> float:
    """Step the reference on scaled gradients; a power of two scales norms without rounding."""
    return reference.step(
        gradients,
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        clip=0.5,
        pieces=pieces,
        loss_scale=scale,
    )


def test_a_dynamic_scale_halves_at_an_overflow_and_the_state_stays(scratch: Path) -> None:
    engine = engine_of(scratch, "nvme", dtype="fp16", accumulation=1)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    before, scale = digest(full_parameters(engine)), engine.loss_scaler.cur_scale
    for _ in range(2):  # the hysteresis of the field forgives one
        engine.backward(engine(*make_batch(1)) * 1e30)
        engine.step()
    assert engine.skipped_steps == 2
    assert engine.loss_scaler.cur_scale == scale / 2
    assert digest(full_parameters(engine)) == before
    engine.backward(engine(*make_batch(1)))
    engine.step()
    assert digest(full_parameters(engine)) != before
    engine.destroy()


def test_the_minimum_scale_names_the_tensors(scratch: Path) -> None:
    engine = engine_of(scratch, "nvme", dtype="fp16", accumulation=1)
    with pytest.raises(LossScaleError, match=r"minimum 1, in .*embedding\.weight"):
        for _ in range(12):
            engine.backward(engine(*make_batch(1)) * 1e30)
            engine.step()
    engine.destroy()


def test_a_plain_backward_under_fp16_is_refused_and_a_scaled_one_works(scratch: Path) -> None:
    engine = engine_of(scratch, "none", dtype="fp16", accumulation=1)
    with pytest.raises(RuntimeError, match=r"engine\.scale\(loss\)"):
        engine(*make_batch(0)).backward()
    engine.zero_grad()
    engine.scale(engine(*make_batch(0))).backward()
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def test_autocast_runs_forward_in_bfloat16_and_keeps_fp32_parameters(scratch: Path) -> None:
    losses = {}
    for name in ("ours", "torch"):
        seen: list[torch.dtype] = []
        model = make_model()
        model.blocks[0].up.register_forward_hook(lambda m, a, output: seen.append(output.dtype))  # noqa: B023
        if name == "ours":
            config = make_config(
                parameters="nvme",
                optimizer="nvme",
                nvme_path=str(scratch),
                host_memory="40KB",
                sub_group_size=1024,
            )
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
            engine, _, _, _ = zero.initialize(model=model, config=config)
            loss = engine(*make_batch(0))
            engine.backward(loss)
            engine.step()
            assert model.blocks[0].up.weight.dtype is torch.float32
            engine.destroy()
        else:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*make_batch(0))
        assert seen == [torch.bfloat16]
        losses[name] = loss.item()
    assert losses["ours"] == losses["torch"]


def test_a_named_schedule_is_right_from_the_first_step_and_waits_for_skipped_ones() -> None:
    config = make_config(host_memory="1GB", dtype="fp16")
    config["scheduler"] = {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": 0.01,
            "warmup_num_steps": 10,
            "warmup_type": "linear",
        },
    }
    engine, _, _, scheduler = zero.initialize(model=make_model(), config=config)
    assert scheduler is engine.lr_scheduler
    rates = []
    for step in range(4):
        rates.append(engine.get_lr()[0])
        engine.backward(engine(*make_batch(step)) * (1e30 if step == 1 else 1.0))
        engine.step()
    assert engine.skipped_steps == 1
    # The field's schedules count from -1, so the first two steps both have the first rate; the
    # second step is skipped and does not move the schedule.
    assert rates == pytest.approx([0.0, 0.0, 0.0, 0.001])
    engine.destroy()


def test_the_configuration_comes_in_one_of_three_ways() -> None:
    class Arguments:
        deepspeed_config = make_config(host_memory="1GB")

    for ways in ({"config_params": Arguments.deepspeed_config}, {"args": Arguments()}):
        engine, _, _, _ = zero.initialize(model=make_model(), **ways)
        engine.destroy()
    with pytest.raises(zero.ConfigError, match=r"as config and as args\.deepspeed_config; keep"):
        zero.initialize(Arguments(), make_model(), config=Arguments.deepspeed_config)
    with pytest.raises(zero.ConfigError, match="no configuration"):
        zero.initialize(model=make_model())
