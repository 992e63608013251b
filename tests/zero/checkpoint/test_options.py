"""What is loaded when less, or something else, is asked for; and parameters with a history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import zero
from tests.support.configs import make_config
from tests.support.observe import state_digest
from tests.support.tiny import TinyTransformer, make_batch, make_model
from zero.checkpoint import inspect
from zero.checkpoint.manifest import read_manifest
from zero.errors import CheckpointError

pytestmark = pytest.mark.nvme


def start(scratch: Path, model: Any = None, dtype: str = "bf16", **more: Any) -> zero.ZeroEngine:
    config = make_config(
        optimizer="nvme",
        parameters="nvme",
        nvme_path=str(scratch),
        sub_group_size=1024,
        host_memory="200KB",
        dtype=dtype,
    )
    return zero.initialize(model=model or make_model(), config={**config, **more})[0]


def train(engine: zero.ZeroEngine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*make_batch(step)))
        engine.step()


def freeze(engine: zero.ZeroEngine, block: int, *, frozen: bool) -> None:
    engine.module.blocks[block].requires_grad_(requires_grad=not frozen)


def with_history(engine: zero.ZeroEngine) -> None:
    """Unfreeze one block after two steps, freeze another after three."""
    train(engine, 0, 2)
    freeze(engine, 0, frozen=False)
    train(engine, 2, 3)
    freeze(engine, 1, frozen=True)
    train(engine, 3, 4)


def thaw_all(engine: zero.ZeroEngine) -> None:
    freeze(engine, 1, frozen=False)
    train(engine, 4, 6)


def frozen_model(*blocks: int) -> TinyTransformer:
    model = make_model()
    for block in blocks:
        model.blocks[block].requires_grad_(requires_grad=False)
    return model


def test_parameters_go_on_with_their_own_step_counts(scratch: Path) -> None:
    """One was unfrozen late, one is frozen now and its moments wait.

    In fp32: freezing a 16-bit parameter drops the low bits of its master, in any run.
    """
    engine = start(scratch, frozen_model(0), "fp32")
    with_history(engine)
    engine.save_checkpoint(scratch / "ck")
    thaw_all(engine)
    whole = state_digest(engine)
    engine.destroy()

    engine = start(scratch, frozen_model(1), "fp32")  # as it stood when it was saved
    engine.load_checkpoint(scratch / "ck")
    assert engine.resume_report == ()
    engine.save_checkpoint(scratch / "again")  # what waits is saved again
    thaw_all(engine)
    assert state_digest(engine) == whole
    engine.destroy()

    engine = start(scratch, dtype="fp32")  # nothing is frozen yet: what waited is trained at once
    with pytest.warns(zero.ResumeWarning, match="trained now, frozen then: blocks.1.gain"):
        engine.load_checkpoint(scratch / "again")
    train(engine, 4, 6)
    assert state_digest(engine) == whole
    engine.destroy()

    engine = start(scratch, frozen_model(0, 1), "fp32")
    with pytest.warns(zero.ResumeWarning, match="frozen now, trained then: blocks.0.gain"):
        engine.load_checkpoint(scratch / "ck")
    engine.module.blocks[0].requires_grad_(requires_grad=True)
    thaw_all(engine)
    assert state_digest(engine) == whole
    engine.destroy()


def moments(engine: zero.ZeroEngine) -> torch.Tensor:
    found = zero.safe_get_full_optimizer_state(engine.module.norm.weight, "exp_avg")
    assert found is not None
    return found


def test_weights_alone_and_without_states(scratch: Path) -> None:
    engine = start(scratch)
    train(engine, 0, 3)
    engine.save_checkpoint(scratch / "ck", client_state={"x": 1})
    weight = zero.safe_get_full_fp32_param(engine.module.norm.weight)
    engine.destroy()

    for options, steps, said in (
        ({"load_module_only": True}, 0, None),
        ({"load_optimizer_states": False}, 3, "its state was not loaded, as asked"),
    ):
        engine = start(scratch)
        if said is None:
            _, client = engine.load_checkpoint(scratch / "ck", **options)
        else:
            with pytest.warns(zero.ResumeWarning, match=said):
                _, client = engine.load_checkpoint(scratch / "ck", **options)
        assert client == {"x": 1}
        assert engine.global_steps == steps
        assert torch.equal(zero.safe_get_full_fp32_param(engine.module.norm.weight), weight)
        assert not moments(engine).any()
        assert engine._history.updates == 0, "the bias correction begins anew"
        train(engine, 3, 4)
        engine.destroy()


def test_a_smaller_or_larger_model_loads_what_is_there_if_asked(scratch: Path) -> None:
    engine = start(scratch)
    train(engine, 0, 2)
    engine.save_checkpoint(scratch / "ck")
    engine.destroy()
    for layers, words in ((1, "not in the model: blocks.1"), (3, "missing in the checkpoint: bl")):
        engine = start(scratch, make_model(layers=layers))
        before = state_digest(engine)
        with pytest.raises(CheckpointError, match=words):
            engine.load_checkpoint(scratch / "ck")
        assert state_digest(engine) == before
        engine.load_checkpoint(scratch / "ck", load_module_strict=False)
        assert engine.global_steps == 2
        assert moments(engine).any()
        if layers == 3:
            late = zero.safe_get_full_optimizer_state(engine.module.blocks[2].up.weight, "exp_avg")
            assert late is not None
            assert not late.any()
        train(engine, 2, 3)
        engine.destroy()


Change = Callable[[dict[str, Any]], None]


def test_a_run_that_differs_says_so_and_trains_on(scratch: Path) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 9}}
    engine = start(scratch, scheduler=warmup)
    train(engine, 0, 3)
    lr = engine.get_lr()
    engine.save_checkpoint(scratch / "ck")
    engine.destroy()
    longer = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 9}}
    for changes, words, rate in (
        ({"scheduler": longer}, r"max_lrs \[0.01\] -> \[0.02\]: the new value is used", None),
        ({}, "schedule: saved WarmupLR, now none: learning rates stay", lr),
        (
            {"scheduler": warmup, "gradient_accumulation_steps": 2},
            "batch: train_batch_size 2 -> 4, accumulation_steps 1 -> 2: the new sizes are used",
            lr,
        ),
    ):
        engine = start(scratch, **changes)
        with pytest.warns(zero.ResumeWarning, match=words):
            engine.load_checkpoint(scratch / "ck")
        assert len(engine.resume_report) == 1
        if rate is not None:
            assert engine.get_lr() == rate
        assert engine.global_samples == 6
        train(engine, 3, 5)
        assert engine.global_samples == 6 + 4
        engine.destroy()


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=9),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    ],
    ids=["warm restarts", "multi step", "one cycle", "lambda"],
)
def test_schedules_of_torch_go_on(scratch: Path, make: Callable[..., Any]) -> None:
    def engine_with_schedule() -> zero.ZeroEngine:
        config = make_config()
        del config["optimizer"]
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = make(optimizer)
        return zero.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
        )[0]

    engine = engine_with_schedule()
    train(engine, 0, 3)
    engine.save_checkpoint(scratch / "ck")
    train(engine, 3, 6)
    whole, lr = state_digest(engine), engine.get_lr()
    engine.destroy()
    engine = engine_with_schedule()
    engine.load_checkpoint(scratch / "ck")
    assert engine.resume_report == ()
    train(engine, 3, 6)
    assert (state_digest(engine), engine.get_lr()) == (whole, lr)
    engine.destroy()


@pytest.mark.parametrize("types", [("AdamW", "Lion"), ("Lion", "AdamW"), ("SGD", "Lion")])
def test_another_optimizer_goes_on_from_the_same_moments_alone(
    scratch: Path, types: tuple[str, str]
) -> None:
    """One that keeps others begins anew: its first step is that of a run with these weights."""
    first, second = ({"type": each, "params": {"lr": 3e-4}} for each in types)
    engine = start(scratch, optimizer=first)
    train(engine, 0, 3)
    moments = zero.safe_get_full_optimizer_state(engine.module.norm.weight, "exp_avg")
    engine.save_checkpoint(scratch / "ck")
    engine.destroy()
    goes_on = "AdamW" not in types
    what = "states of the same name" if goes_on else "begins anew, at step 1"
    other = start(scratch, make_model(seed=5), optimizer=second)
    train(other, 0, 1)  # so that it has moments of its own, and of another step
    with pytest.warns(zero.ResumeWarning, match=f"saved {types[0]}, now {types[1]}.*{what}"):
        other.load_checkpoint(scratch / "ck")
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.0 or types[1] == "AdamW"
    kept = zero.safe_get_full_optimizer_state(other.module.norm.weight, "exp_avg")
    assert moments is not None
    assert kept is not None
    assert torch.equal(kept, moments if goes_on else torch.zeros_like(kept))
    if not goes_on:
        fresh = start(scratch, make_model(seed=5), optimizer=second)
        with pytest.warns(zero.ResumeWarning, match="not loaded, as asked"):
            fresh.load_checkpoint(scratch / "ck", load_optimizer_states=False)
        train(fresh, 3, 5)
        train(other, 3, 5)
        assert state_digest(other) == state_digest(fresh)
        fresh.destroy()
    other.destroy()


def test_an_optimizer_without_a_kernel_takes_weights_alone(scratch: Path) -> None:
    engine = start(scratch)
    train(engine, 0, 2)
    engine.save_checkpoint(scratch / "ck")
    engine.destroy()
    other = start(scratch, make_model(seed=5), optimizer={"type": "RMSprop", "params": {}})
    before = state_digest(other)
    with pytest.raises(CheckpointError, match="was saved with AdamW, and RMSprop"):
        other.load_checkpoint(scratch / "ck")
    assert state_digest(other) == before
    with pytest.warns(zero.ResumeWarning, match="not loaded, as asked"):
        other.load_checkpoint(scratch / "ck", load_optimizer_states=False)
    train(other, 2, 4)
    assert other.global_steps == 4
    other.destroy()


@pytest.mark.parametrize(
    ("state_format", "dtype", "bytes_each", "types"),
    [("bf16", "BF16", 2.0, "bf16"), ("compact", "U8", 1 + 2 / 32, "8-bit codes and fp32")],
)
def test_moments_are_saved_as_they_are_stored(
    scratch: Path, state_format: str, dtype: str, bytes_each: float, types: str
) -> None:
    """Small files, the same state; every format reads them, also what is frozen meanwhile."""

    def make(wanted: str, *frozen: int) -> zero.ZeroEngine:
        return start(
            scratch, frozen_model(*frozen), tiers={"host_memory": "24KB", "state_format": wanted}
        )

    engine = make(state_format)
    assert engine._runtime.store.pager is not None
    train(engine, 0, 3)
    saved = state_digest(engine)
    moment = zero.safe_get_full_optimizer_state(engine.module.blocks[0].up.weight, "exp_avg_sq")
    engine.save_checkpoint(scratch / "wide")
    engine.save_checkpoint(scratch / "ck", as_stored=True)
    engine.destroy()
    manifest = read_manifest(scratch / "ck" / "global_step3")
    with safe_open(scratch / "ck" / "global_step3" / "rank00000.safetensors", "np") as file:
        pieces = [piece for _, piece in manifest.pieces() if piece.section.startswith("exp_avg")]
        narrow = {piece.name for piece in pieces if piece.dtype == dtype}
        assert "blocks.0.up.weight" in narrow
        for name in narrow:
            own = [piece for piece in pieces if piece.name == name]
            numel = sum(piece.numel for piece in own if piece.section == "exp_avg_sq")
            assert sum(piece.size_bytes for piece in own) == pytest.approx(
                2 * bytes_each * numel, abs=4
            )
            stored = file.get_slice(f"exp_avg_sq/{name}")
            assert stored.get_dtype() == dtype
    summary = inspect(scratch / "ck")
    assert summary.run["optimizer state"] == types
    assert summary.size_bytes < inspect(scratch / "wide").size_bytes
    for wanted in (state_format, "fp32"):
        engine = make(wanted)
        engine.load_checkpoint(scratch / "ck")
        assert state_digest(engine) == saved, wanted
        engine.destroy()
    engine = make(state_format, 0)  # its moments wait until it is trained again
    with pytest.warns(zero.ResumeWarning, match="frozen now, trained then"):
        engine.load_checkpoint(scratch / "ck")
    engine.save_checkpoint(scratch / "waiting", as_stored=True)
    engine.destroy()
    engine = make(state_format)
    with pytest.warns(zero.ResumeWarning, match="trained now, frozen then"):
        engine.load_checkpoint(scratch / "waiting")
    found = zero.safe_get_full_optimizer_state(engine.module.blocks[0].up.weight, "exp_avg_sq")
    assert torch.equal(found, moment)
    engine.destroy()
